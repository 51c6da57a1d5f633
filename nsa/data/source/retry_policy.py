"""How long a read may take, and what happens between two attempts."""

import random
import time
from dataclasses import dataclass

from nsa.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds of one read, of a unit or of a listing entry.

    `attempts` counts tries in a row that brought no new byte; `deadline_s` bounds everything together, so that a server
    which sends one byte per second ends too.
    """

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 10.0
    attempts: int = 8
    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    deadline_s: float = 90.0

    def __post_init__(self) -> None:
        if self.deadline_s <= 2 * self.read_timeout_s:
            raise ConfigError(
                f"deadline_s is {self.deadline_s:g} but read_timeout_s is {self.read_timeout_s:g}: a deadline must "
                f"leave room for a second attempt. Set read_timeout_s below {self.deadline_s / 2:g}."
            )
        if self.attempts < 1:
            raise ConfigError(f"attempts is {self.attempts}: at least one try is needed. Set it to 1 or more.")

    @classmethod
    def below(cls, loader_timeout_s: float) -> "RetryPolicy":
        """Limits under which a read reports its own error before the loader's timeout reports a silent one."""
        deadline_s = 0.75 * loader_timeout_s
        return cls(
            connect_timeout_s=min(5.0, deadline_s / 8), read_timeout_s=min(10.0, deadline_s / 4), deadline_s=deadline_s
        )

    def pause_s(self, attempt: int) -> float:
        """Exponential back-off; the random half keeps a thousand ranks from returning in the same instant."""
        return min(self.backoff_max_s, self.backoff_s * 2**attempt) * (0.5 + 0.5 * random.random())


class ReadDeadline:
    """Started once per read. No wait begins later than one read timeout before the end, so none can outlast it."""

    def __init__(self, patience: RetryPolicy) -> None:
        self._started = time.monotonic()
        self._last_start = self._started + patience.deadline_s - patience.read_timeout_s

    def left_s(self) -> float:
        return self._last_start - time.monotonic()

    def passed_s(self) -> float:
        return time.monotonic() - self._started
