"""Compares what a plan estimates with what a simulated step of the training engine counted."""

from collections.abc import Iterator
from dataclasses import dataclass

from nsa_train.config.schema import RunConfig
from nsa_train.planning.collective_bytes import by_group, collectives
from nsa_train.planning.hardware import RANKS_PER_NODE, HardwareTarget
from nsa_train.planning.layout_plan import LayoutFigures
from nsa_train.planning.model_figures import ModelFigures
from nsa_train.planning.step_counts import StepCounts


@dataclass(frozen=True)
class CountedFigure:
    """One figure of a step on one rank."""

    name: str
    unit: str
    estimated: float
    executed: float

    @property
    def difference(self) -> float:
        """Of the estimate to what was executed, as a share of that."""
        return self.estimated / self.executed - 1 if self.executed else 0.0


def compare_with_counts(
    config: RunConfig, figures: LayoutFigures, model: ModelFigures, target: HardwareTarget, counts: StepCounts
) -> Iterator[CountedFigure]:
    """`config`: of the layout. The estimate's reserve, which no operator allocates, is left out."""
    memory = figures.memory
    yield CountedFigure("held memory", "bytes", memory.weights + memory.optimizer, counts.held_bytes)
    yield CountedFigure("peak memory", "bytes", memory.total - memory.reserve, counts.peak_bytes)
    tokens = config.train.batch_size * counts.passes * config.train.seq_len / target.count
    per_token = sum(figures.estimate.flops_per_token.values()) + figures.estimate.recomputed_flops_per_token
    yield CountedFigure("FLOPs", "FLOP", tokens * per_token, counts.flops)
    estimated = by_group(collectives(config, model, target.count, RANKS_PER_NODE, counts.passes))
    for group, total in counts.collectives.items():
        known = estimated.get(group)
        name = f"{group.kind} among {group.size:,}, stride {group.stride:,}"
        yield CountedFigure(name, "bytes", known.n_bytes if known else 0, total.n_bytes)
