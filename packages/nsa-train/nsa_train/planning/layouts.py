"""Parallel layouts of a run: data, tensor and context parallelism, micro-batch and checkpointing, within the rules."""

from collections.abc import Iterator
from dataclasses import dataclass

from nsa.options import CHECKPOINTING, Checkpointing, DataParallel
from nsa_train.config.rules import broken_parallel_rules
from nsa_train.config.schema import RunConfig

_LARGEST_ROWS = 64


@dataclass(frozen=True)
class ParallelLayout:
    """How a run with a given model, length and global batch is divided among its ranks."""

    data: DataParallel
    shard_ranks: int | None
    """Data-parallel ranks that share one copy of the weights (hsdp)."""
    tp: int
    cp: int
    rows: int
    """Micro-batch: rows that a data-parallel rank computes at once."""
    batch_size: int
    """Rows of all ranks in one pass."""
    passes: int
    """Forward and backward passes per step (gradient accumulation)."""
    checkpointing: Checkpointing

    @property
    def name(self) -> str:
        """Data parallelism, as in a table: hsdp 8."""
        return self.data if self.shard_ranks is None else f"{self.data} {self.shard_ranks}"

    def overrides(self) -> list[str]:
        """Settings to give after the config."""
        shards = "null" if self.shard_ranks is None else self.shard_ranks
        return [
            f"parallel.data={self.data}",
            *([f"parallel.shard_ranks={shards}"] if self.data == "hsdp" else []),
            f"parallel.tp={self.tp}",
            f"parallel.cp={self.cp}",
            f"train.batch_size={self.batch_size}",
            f"train.accumulate_grad_batches={self.passes}",
            f"runtime.gradient_checkpointing={self.checkpointing}",
        ]

    def applied(self, config: RunConfig) -> RunConfig:
        """The run with this layout."""
        parallel = dict(data=self.data, shard_ranks=self.shard_ranks, tp=self.tp, cp=self.cp)
        train = dict(batch_size=self.batch_size, accumulate_grad_batches=self.passes)
        return config.model_copy(
            update={
                "parallel": config.parallel.model_copy(update=parallel),
                "train": config.train.model_copy(update=train),
                "runtime": config.runtime.model_copy(update={"gradient_checkpointing": self.checkpointing}),
            }
        )


@dataclass(frozen=True)
class ImpossibleSplit:
    """Degrees of tensor and context parallelism that a rule excludes."""

    tp: int
    cp: int
    reason: str


def layouts(config: RunConfig, ranks: int, ranks_per_node: int) -> Iterator[ParallelLayout | ImpossibleSplit]:
    """Every layout with the run's global batch that keeps the rules; for a split of rows that keeps none, why.

    Tensor parallelism stays inside a node. Degrees, shards and rows are powers of two, and what divides the ranks.
    """
    global_rows = config.train.batch_size * config.train.accumulate_grad_batches
    for tp in _powers(min(ranks, ranks_per_node)):
        for cp in _powers(ranks // tp):
            if reason := _why_not(config, ranks, ranks_per_node, tp, cp, global_rows):
                yield ImpossibleSplit(tp, cp, reason)
            else:
                yield from _of_split(config, ranks, ranks_per_node, tp, cp, global_rows)


def _why_not(config: RunConfig, ranks: int, ranks_per_node: int, tp: int, cp: int, global_rows: int) -> str | None:
    if ranks % (tp * cp):
        return f"{tp * cp} ranks to a row do not divide {ranks} ranks"
    data_ranks = ranks // (tp * cp)
    if global_rows % data_ranks:
        return (
            f"{data_ranks} data-parallel ranks do not divide the global batch of {global_rows} rows "
            f"(train.batch_size times train.accumulate_grad_batches)"
        )
    one = ParallelLayout("fsdp", None, tp, cp, 1, data_ranks, 1, "full").applied(config)
    broken = next(broken_parallel_rules(one, ranks, ranks_per_node), None)
    return None if broken is None else broken.message


def _of_split(
    config: RunConfig, ranks: int, ranks_per_node: int, tp: int, cp: int, global_rows: int
) -> Iterator[ParallelLayout]:
    data_ranks = ranks // (tp * cp)
    kinds: list[tuple[DataParallel, int | None]] = [("fsdp", None)]
    kinds += [("hsdp", shards) for shards in _powers(data_ranks // 2) if data_ranks % shards == 0]
    of_one = global_rows // data_ranks
    for rows in _powers(min(of_one, _LARGEST_ROWS)):
        if of_one % rows:
            continue
        for data, shards in kinds:
            for mode in CHECKPOINTING:
                yield ParallelLayout(data, shards, tp, cp, rows, rows * data_ranks, of_one // rows, mode)


def _powers(largest: int) -> list[int]:
    """Powers of two up to `largest`."""
    return [2**n for n in range(largest.bit_length())]
