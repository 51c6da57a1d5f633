"""Parallel layouts of a run, ranked by modelled tokens per second: memory, traffic, time, price and goodput of each.

Times are modelled: compute as in `nsa_train.planning.estimate`, communication from bytes and the assumed speed of
links. Gathering weights and reducing gradients overlaps with compute; tensor and context parallelism does not.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

from nsa.core.branches import BRANCH_ORDER
from nsa.geometry import Geometry
from nsa.options import CHECKPOINTING, Checkpointing, DataParallel
from nsa_train.config.rules import broken_parallel_rules
from nsa_train.config.schema import RunConfig
from nsa_train.planning.collective_bytes import (
    OVERLAPPED,
    CollectiveUse,
    StepCounts,
    by_group,
    collectives,
    weight_shards,
)
from nsa_train.planning.estimate import MemoryEstimate, RunEstimate, estimate
from nsa_train.planning.hardware import HardwareTarget
from nsa_train.planning.model_figures import ModelFigures, model_figures
from nsa_train.planning.preflight_rules import SAFE_MEMORY

LLAMA3_GPU_HOURS = 16_384 * 54 * 24 / 419
"""GPU-hours per interruption in the pretraining of Llama 3: 419 unexpected ones in 54 days on 16,384 GPUs."""
_RESTART_S = 600.0
"""Seconds from a failure to the next step, with detection, rendezvous and loading (assumed)."""
_STORAGE_GB_S = 2.0
"""Speed at which one node writes to storage (assumed)."""
_STAGING_GB_S = 10.0
"""Speed of copies from a GPU to the host, which a save in the background waits for (assumed)."""
_FIXED_SAVE_S = 2.0
"""Seconds for planning a save and for its barriers (assumed)."""


@dataclass(frozen=True)
class FailureModel:
    gpu_hours_per_failure: float = LLAMA3_GPU_HOURS
    restart_s: float = _RESTART_S
    storage_gb_s: float = _STORAGE_GB_S

    def mtbf_s(self, gpus: int) -> float:
        """Mean time between failures of any of so many GPUs."""
        return 3600 * self.gpu_hours_per_failure / gpus

    def save_s(self, checkpoint_bytes: float, gpus: int, writers: int, nodes: int, *, background: bool) -> float:
        """Seconds for which a save stops training. `writers`: ranks that have a share of the checkpoint to write."""
        if background:
            return _FIXED_SAVE_S + checkpoint_bytes / min(writers, gpus) / (1e9 * _STAGING_GB_S)
        return _FIXED_SAVE_S + self.write_s(checkpoint_bytes, nodes)

    def write_s(self, checkpoint_bytes: float, nodes: int) -> float:
        """Seconds until a checkpoint is stored by the nodes that hold a share of it."""
        return checkpoint_bytes / (1e9 * self.storage_gb_s * nodes)


@dataclass(frozen=True)
class RunGoodput:
    """Share of the time that failures and saving cost (Young and Daly): with a mean time between failures M, a save
    that stops training for δ and a restart that takes R, saving every T loses δ/T + T/(2M) + R/M; T = √(2δM) loses
    least."""

    mtbf_s: float
    save_s: float
    restart_s: float
    interval_s: float
    """Seconds between two saves."""

    @property
    def best_interval_s(self) -> float:
        return sqrt(2 * self.save_s * self.mtbf_s)

    @property
    def lost(self) -> float:
        """Share of the time: saving, steps done again, restarts; at most 1."""
        return min(1.0, self.lost_at(self.interval_s))

    def lost_at(self, interval_s: float) -> float:
        return self.save_s / interval_s + interval_s / (2 * self.mtbf_s) + self.restart_s / self.mtbf_s


_LARGEST_ROWS = 64


@dataclass(frozen=True)
class ParallelLayout:
    """Division of a run with a given model, length and global batch among its ranks."""

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
    global_rows = config.train.global_rows
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


_LINK_SHARE = 0.8
"""Share of a link's speed that a collective reaches (assumed)."""
_CALL_S = 20e-6
"""Time of a collective besides its bytes (assumed), and …"""
_CALL_S_PER_RANK = 0.2e-6
"""… its time for each rank of the group."""


@dataclass(frozen=True)
class _LinkTraffic:
    """Collectives of one purpose in a step, and the time that they take."""

    use: CollectiveUse
    in_node: bool
    received_bytes: float
    seconds: float


@dataclass(frozen=True)
class LayoutFigures:
    layout: ParallelLayout
    estimate: RunEstimate
    traffic: tuple[_LinkTraffic, ...]
    goodput: RunGoodput
    """Goodput at the interval that loses least."""

    @property
    def memory(self) -> MemoryEstimate:
        return self.estimate.memory

    @property
    def compute_s(self) -> float:
        return self.estimate.step_s

    @property
    def overlapped_s(self) -> float:
        return sum(each.seconds for each in self.traffic if each.use.purpose in OVERLAPPED)

    @property
    def exposed_s(self) -> float:
        """Communication that compute does not hide."""
        rest = sum(each.seconds for each in self.traffic if each.use.purpose not in OVERLAPPED)
        return rest + max(0.0, self.overlapped_s - self.compute_s)

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def tokens_per_s(self) -> float:
        return self.estimate.tokens_per_step / self.step_s

    @property
    def wall_s(self) -> float:
        """Duration of the whole run, with what failures and saving cost."""
        return self.estimate.steps * self.step_s / (1 - min(0.99, self.goodput.lost))

    @property
    def usd(self) -> float:
        return self.wall_s / 3600 * self.estimate.usd_per_hour

    @property
    def fits(self) -> bool:
        """Whether it fits by the rule of preflight: without full checkpointing part of the memory stays free."""
        room = 1.0 if self.layout.checkpointing == "full" else SAFE_MEMORY
        return self.memory.total <= room * self.memory.available


@dataclass(frozen=True)
class _BranchShare:
    """Share of an attention branch in the keys that queries read and in the FLOPs of a layer."""

    branch: str
    reads_of_last: int
    """Keys that the last query reads, per kv group."""
    reads: float
    """Mean over the queries of the row."""
    flops: float
    """Forward FLOPs per token of one layer; the compressed branch with the scores that selection computes again. Of a
    model of `merged` layers these alone: nothing attends to compressed keys."""


@dataclass(frozen=True)
class LayoutPlan:
    target: HardwareTarget
    figures: ModelFigures
    ranked: tuple[LayoutFigures, ...]
    """Layouts that fit, the best of each data parallelism and split, the fastest first."""
    too_large: tuple[LayoutFigures, ...]
    """The smallest layout of each split of which none fits."""
    impossible: tuple[ImpossibleSplit, ...]
    considered: int
    branches: tuple[_BranchShare, ...]


def plan_layouts(
    config: RunConfig,
    target: HardwareTarget,
    vocab_size: int,
    *,
    efficiency: float | None = None,
    price: float | None = None,
    failures: FailureModel | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> LayoutPlan:
    model, failures = model_figures(config, vocab_size), failures or FailureModel()
    impossible, figures = [], []
    for layout in layouts(config, target.count, target.ranks_per_node):
        if isinstance(layout, ImpossibleSplit):
            impossible.append(layout)
            continue
        figures.append(_layout_figures(config, layout, target, vocab_size, model, failures, efficiency, price))
        progress(f"comparing layouts: {len(figures)}")
    fitting = sorted((each for each in figures if each.fits), key=lambda each: -each.tokens_per_s)
    splits = {_split(each) for each in fitting}
    left = sorted((each for each in figures if _split(each) not in splits), key=lambda each: each.memory.total)
    return LayoutPlan(
        target,
        model,
        tuple(_first_of_each(fitting, lambda each: (each.layout.data, *_split(each)))),
        tuple(_first_of_each(left, _split)),
        tuple(impossible),
        len(figures),
        tuple(_branch_shares(config)),
    )


def _layout_figures(
    config: RunConfig,
    layout: ParallelLayout,
    target: HardwareTarget,
    vocab_size: int,
    model: ModelFigures,
    failures: FailureModel,
    efficiency: float | None,
    price: float | None,
) -> LayoutFigures:
    divided = layout.applied(config)
    run_estimate = estimate(divided, target, vocab_size, efficiency=efficiency, price=price, figures=model)
    uses = collectives(divided, model, target.count, target.ranks_per_node, layout.passes)
    return LayoutFigures(
        layout,
        run_estimate,
        tuple(_link_traffic(use, target) for use in uses),
        _best_goodput(divided, target, run_estimate.checkpoint_bytes, failures),
    )


def _link_traffic(use: CollectiveUse, target: HardwareTarget) -> _LinkTraffic:
    """Time of a ring. Between nodes a group has the network cards of all its ranks on a node, as far as the links
    inside carry it."""
    group, device, in_a_node = use.group, target.device, min(target.count, target.ranks_per_node)
    in_node = group.in_one_node(in_a_node)
    speed = device.node_gb_s
    if not in_node:
        speed = min(speed, device.network_gb_s * group.ranks_in_node(in_a_node))
    received = group.received(use.total.n_bytes)
    calls_s = use.total.calls * (_CALL_S + _CALL_S_PER_RANK * group.size)
    return _LinkTraffic(use, in_node, received, received / (1e9 * _LINK_SHARE * speed) + calls_s)


def _best_goodput(
    config: RunConfig, target: HardwareTarget, checkpoint_bytes: int, failures: FailureModel
) -> RunGoodput:
    """Goodput at the interval that loses least, or that in which a checkpoint is stored if that is longer."""
    shards = weight_shards(config.parallel, target.count, target.ranks_per_node) * config.parallel.tp
    nodes = -(-min(shards, target.count) // target.ranks_per_node)
    background = config.train.save_async
    save_s = failures.save_s(checkpoint_bytes, target.count, shards, nodes, background=background)
    goodput = RunGoodput(failures.mtbf_s(target.count), save_s, failures.restart_s, interval_s=1.0)
    shortest = failures.write_s(checkpoint_bytes, nodes) if background else 0.0
    return RunGoodput(goodput.mtbf_s, save_s, failures.restart_s, max(goodput.best_interval_s, shortest))


def _split(figures: LayoutFigures) -> tuple[int, int]:
    return figures.layout.tp, figures.layout.cp


def _first_of_each(
    figures: Sequence[LayoutFigures], key: Callable[[LayoutFigures], tuple[object, ...]]
) -> list[LayoutFigures]:
    first: dict[tuple[object, ...], LayoutFigures] = {}
    for each in figures:
        first.setdefault(key(each), each)
    return list(first.values())


def _branch_shares(config: RunConfig) -> list[_BranchShare]:
    """Shares of the branches at the sequence length of a run."""
    model, geometry, length = config.model, config.nsa.geometry, config.train.seq_len
    merged = not {"nsa", "global"} & {*model.attention} and "merged" in model.attention
    totals = geometry.total_merged_reads(length) if merged else geometry.total_reads(length)
    reads = {branch: total / length for branch, total in totals.items()}
    per_read = 2 * model.n_heads * (model.d_k + model.d_v)
    selection = 2 * model.n_heads * model.d_k * reads["compressed"]
    last = _reads_of_last(geometry, length, merged)
    attended = BRANCH_ORDER[1:] if merged else BRANCH_ORDER
    return [
        _BranchShare(
            branch,
            last[branch],
            reads[branch],
            per_read * reads[branch] * (branch in attended) + (selection if branch == "compressed" else 0.0),
        )
        for branch in BRANCH_ORDER
    ]


def _reads_of_last(geometry: Geometry, length: int, merged: bool) -> dict[str, int]:
    """Keys that the last query of a row reads in each branch. `merged`: blocks are of the tokens before the window."""
    selectable = max(0, length - geometry.w) if merged else length
    return {
        "compressed": geometry.n_compressed(selectable),
        "selected": geometry.n_selected_tokens(selectable),
        "sliding": min(geometry.w, length),
    }


@dataclass(frozen=True)
class _CountedFigure:
    """One figure of a step on one rank, as estimated and as a simulated step of the engine counted it."""

    name: str
    unit: str
    estimated: float
    executed: float

    @property
    def difference(self) -> float:
        """Relative error of the estimate."""
        return self.estimated / self.executed - 1 if self.executed else 0.0


def compare_with_counts(
    config: RunConfig, figures: LayoutFigures, model: ModelFigures, target: HardwareTarget, counts: StepCounts
) -> Iterator[_CountedFigure]:
    """Compare the estimate of a layout with the counts of a simulated step; `config` is that of the layout.

    The estimate's reserve, which no operator allocates, is left out.
    """
    memory = figures.memory
    yield _CountedFigure("held memory", "bytes", memory.weights + memory.optimizer, counts.held_bytes)
    yield _CountedFigure("peak memory", "bytes", memory.total - memory.reserve, counts.peak_bytes)
    tokens = config.train.batch_size * counts.passes * config.train.seq_len / target.count
    per_token = sum(figures.estimate.flops_per_token.values()) + figures.estimate.recomputed_flops_per_token
    yield _CountedFigure("FLOPs", "FLOP", tokens * per_token, counts.flops)
    estimated = by_group(collectives(config, model, target.count, target.ranks_per_node, counts.passes))
    for group, total in counts.collectives.items():
        known = estimated.get(group)
        name = f"{group.kind} among {group.size:,}, stride {group.stride:,}"
        yield _CountedFigure(name, "bytes", known.n_bytes if known else 0, total.n_bytes)
