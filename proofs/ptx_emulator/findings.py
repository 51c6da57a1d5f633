"""Findings: what the emulator reports about a kernel besides its numbers, one entry per kind and PTX instruction."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class FindingKind(StrEnum):
    SHARED_RACE = "shared_race"
    """Two threads touch the same shared memory between two barriers, and one of them writes."""
    GLOBAL_RACE = "global_race"
    """Two programs of one launch, or two unsynchronized warps, touch the same global memory, and one of them writes."""
    READ_BEFORE_WAIT = "read_before_wait"
    """Data of cp.async or wgmma is used before the wait that makes it visible."""
    WRITE_BEFORE_WAIT = "write_before_wait"
    """Shared memory is overwritten while an asynchronous copy or wgmma still uses it."""
    OUT_OF_BOUNDS = "out_of_bounds"
    MISALIGNED = "misaligned"
    UNINITIALIZED = "uninitialized"
    """Shared memory is read that nobody wrote."""
    BARRIER_DIVERGENCE = "barrier_divergence"
    """A barrier that only some threads of a program reach."""
    WARP_DIVERGENCE = "warp_divergence"
    """An instruction that all lanes of a warp must execute together, executed by some."""
    MISSING_FENCE = "missing_fence"
    """wgmma without the wgmma.fence or fence.proxy.async that its operands need."""


@dataclass(frozen=True)
class Finding:
    kind: FindingKind
    kernel: str
    line: int
    """Line of the PTX text."""
    instruction: str
    source: str
    """file:line of the kernel's source, from .loc; empty where there is none."""
    program: tuple[int, int, int]
    warp: int
    address: int
    detail: str = ""
    occurrences: int = 1

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return (
            f"{self.kind}: {self.kernel}, PTX line {self.line}{where}: {self.instruction} — program {self.program}, "
            f"warp {self.warp}, address {self.address:#x}; {self.occurrences} times. {self.detail}"
        ).rstrip()


class FindingLog:
    """Collects findings; those of the same kind at the same instruction become one, with a count."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[str, str, int], Finding] = {}

    def add(self, finding: Finding) -> None:
        place = (finding.kind, finding.kernel, finding.line)
        known = self._by_place.get(place)
        if known is None:
            self._by_place[place] = finding
            return
        count = known.occurrences + finding.occurrences
        self._by_place[place] = Finding(**{**known.__dict__, "occurrences": count})

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._by_place.values())

    def __len__(self) -> int:
        return len(self._by_place)

    def take(self) -> list[Finding]:
        """Return every finding so far and empty the log."""
        findings = list(self)
        self._by_place.clear()
        return findings
