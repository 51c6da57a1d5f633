"""A fault that a rank is to be started with: what, where and when. Travels as JSON on a command line."""

import json
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


class FaultKind(StrEnum):
    NAN_GRADIENT = "nan_gradient"
    GATE_COLLAPSE = "gate_collapse"
    SLOW_RANK = "slow_rank"
    BENIGN_NOISE = "benign_noise"


@dataclass(frozen=True, kw_only=True)
class PlantedFault:
    kind: FaultKind
    marker: str
    """File that is written, with the time in it, when the fault first acts."""
    first_batch: int = 0
    """From this batch of the process on, counted from 0."""
    also: tuple[int, ...] = ()
    """Single batches before that."""
    rank: int = 0
    seconds: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PlantedFault":
        values = json.loads(text)
        return cls(**{**values, "kind": FaultKind(values["kind"]), "also": tuple(values["also"])})

    def hits(self, batch: int) -> bool:
        return batch >= self.first_batch or batch in self.also

    def mark(self) -> None:
        if not Path(self.marker).exists():
            Path(self.marker).write_text(repr(time.time()), encoding="utf-8")
