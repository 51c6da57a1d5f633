"""Retry policy of reads: timeouts, exponential back-off, number of attempts, total deadline."""

import random
import time
from dataclasses import dataclass

from nsa.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of one read (a unit, or one entry of a listing)."""

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 10.0
    attempts: int = 8
    """Consecutive attempts without a new byte before giving up."""
    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    deadline_s: float = 90.0
    """Limit of the whole read, so that a server that sends one byte per second is given up too."""

    def __post_init__(self) -> None:
        if self.deadline_s <= 2 * self.read_timeout_s:
            raise ConfigError(
                f"deadline_s is {self.deadline_s:g} but read_timeout_s is {self.read_timeout_s:g}: the deadline must "
                f"leave time for a second attempt. Set read_timeout_s below {self.deadline_s / 2:g}."
            )
        if self.attempts < 1:
            raise ConfigError(f"attempts is {self.attempts}: at least one is needed. Set it to 1 or more.")

    @classmethod
    def below(cls, loader_timeout_s: float) -> "RetryPolicy":
        """Limits below the loader's timeout, so that a failing read reports its reason before the loader times out."""
        deadline_s = 0.75 * loader_timeout_s
        return cls(
            connect_timeout_s=min(5.0, deadline_s / 8), read_timeout_s=min(10.0, deadline_s / 4), deadline_s=deadline_s
        )

    def pause_s(self, attempt: int) -> float:
        """Exponential back-off with jitter, so that thousands of ranks do not retry at the same instant."""
        return min(self.backoff_max_s, self.backoff_s * 2**attempt) * (0.5 + 0.5 * random.random())


class ReadDeadline:
    """Total deadline of one read. No wait starts later than one read timeout before it, so none can exceed it."""

    def __init__(self, retry_policy: RetryPolicy) -> None:
        self._started = time.monotonic()
        self._last_start = self._started + retry_policy.deadline_s - retry_policy.read_timeout_s

    def left_s(self) -> float:
        return self._last_start - time.monotonic()

    def passed_s(self) -> float:
        return time.monotonic() - self._started
