"""Fact hits: how often selected blocks hold the fact that answers a question, and how accuracy depends on it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass
class HitCounts:
    """Questions of one layer, or of all together."""

    questions: int = 0
    hits: int = 0
    """Questions whose fact lies in a selected block."""
    right: int = 0
    right_if_hit: int = 0

    def add(self, hit: bool, right: bool) -> None:
        self.questions += 1
        self.hits += hit
        self.right += right
        self.right_if_hit += hit and right

    @property
    def hit_rate(self) -> float:
        return self.hits / self.questions

    @property
    def accuracy_if_hit(self) -> float | None:
        return self.right_if_hit / self.hits if self.hits else None

    @property
    def accuracy_if_missed(self) -> float | None:
        missed = self.questions - self.hits
        return (self.right - self.right_if_hit) / missed if missed else None


@dataclass
class FactHits:
    """Hits of every layer that selects blocks, in any group, and of any layer."""

    by_layer: list[HitCounts] = field(default_factory=list)
    any_layer: HitCounts = field(default_factory=HitCounts)

    def add(self, selected_by_layer: Sequence[Collection[int]], fact_blocks: set[int], right: bool) -> None:
        """Count a question: the blocks that each layer selected, those of the fact, and whether the answer is right."""
        self.by_layer = self.by_layer or [HitCounts() for _ in selected_by_layer]
        hits = [not fact_blocks.isdisjoint(blocks) for blocks in selected_by_layer]
        for counts, hit in zip(self.by_layer, hits, strict=True):
            counts.add(hit, right)
        self.any_layer.add(any(hits), right)
