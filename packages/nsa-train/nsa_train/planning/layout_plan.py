"""Ranks the parallel layouts of a run by modelled tokens per second: memory, traffic, time, price and goodput of each.

Times are modelled: compute as in `nsa_train.planning.step_time`, communication from bytes and the assumed speed of
links. Gathering weights and reducing gradients overlaps with compute; tensor and context parallelism does not.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nsa.core.branches import BRANCH_ORDER
from nsa.geometry import Geometry
from nsa_train.config.schema import RunConfig
from nsa_train.planning.collective_bytes import OVERLAPPED, CollectiveUse, by_group, collectives, weight_shards
from nsa_train.planning.estimate import MemoryEstimate, RunEstimate, estimate
from nsa_train.planning.expected_goodput import FailureModel, RunGoodput
from nsa_train.planning.hardware import RANKS_PER_NODE, HardwareTarget
from nsa_train.planning.layouts import ImpossibleSplit, ParallelLayout, layouts
from nsa_train.planning.model_figures import ModelFigures, model_figures
from nsa_train.planning.resource_rules import SAFE_MEMORY
from nsa_train.planning.step_counts import StepCounts

_LINK_SHARE = 0.8
"""Share of a link's speed that a collective reaches (assumed)."""
_CALL_S = 20e-6
"""Time of a collective besides its bytes (assumed), and …"""
_CALL_S_PER_RANK = 0.2e-6
"""… its time for each rank of the group."""


@dataclass(frozen=True)
class LinkTraffic:
    """Collectives of one purpose in a step, and the time that they take."""

    use: CollectiveUse
    in_node: bool
    received_bytes: float
    seconds: float


@dataclass(frozen=True)
class LayoutFigures:
    layout: ParallelLayout
    estimate: RunEstimate
    traffic: tuple[LinkTraffic, ...]
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
        """Whether it fits as preflight judges it: without full checkpointing part of the memory stays free."""
        room = 1.0 if self.layout.checkpointing == "full" else SAFE_MEMORY
        return self.memory.total <= room * self.memory.available


@dataclass(frozen=True)
class BranchShare:
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
    branches: tuple[BranchShare, ...]


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
    for layout in layouts(config, target.count, RANKS_PER_NODE):
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
    uses = collectives(divided, model, target.count, RANKS_PER_NODE, layout.passes)
    return LayoutFigures(
        layout,
        run_estimate,
        tuple(_link_traffic(use, target) for use in uses),
        _best_goodput(divided, target, run_estimate.checkpoint_bytes, failures),
    )


def _link_traffic(use: CollectiveUse, target: HardwareTarget) -> LinkTraffic:
    """Time of a ring. Between nodes a group has the network cards of all its ranks on a node, as far as the links
    inside carry it."""
    group, device = use.group, target.device
    in_node = group.in_one_node(RANKS_PER_NODE)
    speed = device.node_gb_s
    if not in_node:
        speed = min(speed, device.network_gb_s * group.ranks_in_node(RANKS_PER_NODE))
    received = group.received(use.total.n_bytes)
    calls_s = use.total.calls * (_CALL_S + _CALL_S_PER_RANK * group.size)
    return LinkTraffic(use, in_node, received, received / (1e9 * _LINK_SHARE * speed) + calls_s)


def _best_goodput(
    config: RunConfig, target: HardwareTarget, checkpoint_bytes: int, failures: FailureModel
) -> RunGoodput:
    """Goodput at the interval that loses least, or that in which a checkpoint is stored if that is longer."""
    shards = weight_shards(config.parallel, target.count, RANKS_PER_NODE) * config.parallel.tp
    nodes = -(-min(shards, target.count) // RANKS_PER_NODE)
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


def _branch_shares(config: RunConfig) -> list[BranchShare]:
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
        BranchShare(
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
class CountedFigure:
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
) -> Iterator[CountedFigure]:
    """Compare the estimate of a layout with the counts of a simulated step; `config` is that of the layout.

    The estimate's reserve, which no operator allocates, is left out.
    """
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
