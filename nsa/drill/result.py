"""Result of one drill scenario: what detected the fault, what was left behind, which requirements failed."""

from dataclasses import dataclass, field


class NotObserved(Exception):
    """Something that had to happen did not; the scenario ends."""


@dataclass
class DrillResult:
    """Filled in while a scenario runs; `unmet` lists every requirement that failed."""

    fault: str
    detected_by: str = ""
    after_s: float | None = None
    """Seconds from the fault to the record that reports it."""
    left_behind: str = ""
    resumed: str = ""
    unmet: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def holds(self) -> bool:
        return not self.unmet

    def require(self, holds: object, otherwise: str) -> None:
        if not holds:
            self.unmet.append(otherwise)

    def require_equal(self, what: str, found: object, wanted: object) -> None:
        self.require(found == wanted, f"{what} is {found!r}, not {wanted!r}")

    def detected(self, by: str, after_s: float, *, within_s: float) -> None:
        self.detected_by, self.after_s = by, after_s
        self.require(0 <= after_s <= within_s, f"found after {after_s:.1f} s, not within {within_s:.1f} s")
