"""One row of the table: what a fault did, what was demanded, and whether it was so."""

from dataclasses import dataclass, field


class NotObserved(Exception):
    """Something that had to happen did not, so the rest of the scenario has no meaning."""


@dataclass
class DrillResult:
    """Filled in while a scenario is played; `unmet` lists every demand that did not hold."""

    fault: str
    detected_by: str = ""
    after_s: float | None = None
    """From the fault to the record that tells of it."""
    left_behind: str = ""
    resumed: str = ""
    unmet: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def holds(self) -> bool:
        return not self.unmet

    def demand(self, holds: object, otherwise: str) -> None:
        if not holds:
            self.unmet.append(otherwise)

    def demand_equal(self, what: str, found: object, wanted: object) -> None:
        self.demand(found == wanted, f"{what} is {found!r}, not {wanted!r}")

    def detected(self, by: str, after_s: float, *, within_s: float) -> None:
        self.detected_by, self.after_s = by, after_s
        self.demand(0 <= after_s <= within_s, f"found after {after_s:.1f} s, not within {within_s:.1f} s")
