"""Counts of one training step of one rank: peak memory, FLOPs and collectives, estimated or executed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


@dataclass(frozen=True)
class CollectiveGroup:
    """One kind of collective among `size` ranks, of which neighbours are `stride` apart."""

    kind: CollectiveKind
    size: int
    stride: int

    def in_one_node(self, ranks_per_node: int) -> bool:
        return (self.size - 1) * self.stride < ranks_per_node

    def ranks_in_node(self, ranks_per_node: int) -> int:
        """Ranks of this group on one node."""
        return max(1, min(self.size, ranks_per_node // max(1, self.stride)))

    def received(self, n_bytes: float) -> float:
        """Bytes that a rank receives in a ring for tensors of `n_bytes` (see `CollectiveTotal`)."""
        share = (self.size - 1) / self.size
        return n_bytes * {"all_reduce": 2 * share, "all_to_all": 1.0, "broadcast": 1.0}.get(self.kind, share)


@dataclass(frozen=True)
class CollectiveTotal:
    calls: int
    n_bytes: int
    """Bytes of whole tensors: as gathered, as before they are scattered, as reduced; the larger of sent and received of
    an all-to-all."""


@dataclass(frozen=True)
class StepCounts:
    layers: int
    passes: int
    """Forward and backward passes of the step."""
    held_bytes: int
    """Weights and optimizer states between two steps."""
    peak_bytes: int
    flops: float
    """FLOPs of matrix products and attention operators, recomputation included."""
    collectives: Mapping[CollectiveGroup, CollectiveTotal]
    extended_from: int = 0
    """Layers of the largest model that was counted, if the counts are extended to more; 0: all were."""

    def extended(self, longer: Self, layers: int) -> "StepCounts":
        """Counts with `layers` layers, all alike, from these and those of a model with more layers."""
        more = (layers - self.layers) / (longer.layers - self.layers)

        def line(short: float, long: float) -> int:
            return round(short + more * (long - short))

        none = CollectiveTotal(0, 0)
        pairs = {group: (self.collectives.get(group, none), total) for group, total in longer.collectives.items()}
        return StepCounts(
            layers,
            self.passes,
            line(self.held_bytes, longer.held_bytes),
            line(self.peak_bytes, longer.peak_bytes),
            line(self.flops, longer.flops),
            {
                group: CollectiveTotal(line(short.calls, long.calls), line(short.n_bytes, long.n_bytes))
                for group, (short, long) in pairs.items()
            },
            longer.layers,
        )

    def as_json(self) -> dict[str, Any]:
        listed = [{**vars(group), **vars(total)} for group, total in self.collectives.items()]
        return {**vars(self), "collectives": listed}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StepCounts":
        collectives = {
            CollectiveGroup(each["kind"], each["size"], each["stride"]): CollectiveTotal(each["calls"], each["n_bytes"])
            for each in values["collectives"]
        }
        return cls(**{**values, "collectives": collectives})
