"""Result of one GPU check: claim, status, measured value, limit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class CheckStatus(StrEnum):
    HOLDS = "holds"
    FAILS = "FAILS"
    NEEDS_GPU = "needs a GPU"
    FACT = "fact"


@dataclass(frozen=True)
class CheckResult:
    claim: str
    verdict: CheckStatus
    measured: float | str | None = None
    limit: float | None = None
    note: str = ""
    subject: str = ""
    """Filled in, like the seconds, by the worker."""
    seconds: float = 0.0


def bounded(claim: str, measured: float, limit: float, note: str = "") -> CheckResult:
    """Holds if measured ≤ limit; NaN fails."""
    return CheckResult(claim, CheckStatus.HOLDS if measured <= limit else CheckStatus.FAILS, measured, limit, note)


def fact(claim: str, text: str) -> CheckResult:
    return CheckResult(claim, CheckStatus.FACT, text)


def needs_gpu(claim: str) -> CheckResult:
    return CheckResult(claim, CheckStatus.NEEDS_GPU)


@dataclass(frozen=True)
class MeasuredTable:
    """A measurement for the report: its JSON record, and table rows and notes as text."""

    record: dict[str, Any]
    rows: list[tuple[str, ...]]
    notes: list[str]
    kind: str = "figures"
    """Section of the report: gpu, peaks, figures or memory."""


@dataclass(frozen=True)
class GpuCheck:
    """A check that yields one or more results. If it crashes, the next one still runs."""

    subject: str
    name: str
    run: Callable[[], Iterator[CheckResult | MeasuredTable]]
