"""Bytes that the collectives of a step move, by purpose, and the counts of a step, estimated or executed.

Bytes are those of whole tensors on rank 0. tests/nsa_train/train/engine/test_collective_estimate.py compares them with
a simulated step of the training engine.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, Self

from nsa.options import SELECTING_KINDS
from nsa_train.config.rules import context_pieces, hsdp_shard_ranks
from nsa_train.config.schema import ParallelConfig, RunConfig
from nsa_train.planning.model_figures import HEAD, ModelFigures

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]


@dataclass(frozen=True)
class CollectiveGroup:
    """One kind of collective among `size` ranks, of which neighbours are `stride` apart."""

    kind: CollectiveKind
    size: int
    stride: int

    def in_one_node(self, ranks_per_node: int) -> bool:
        """Whether all groups like this one are each on one node: the first ranks of nodes must be those of groups."""
        return ranks_per_node % max(1, self.size * self.stride) == 0

    def ranks_in_node(self, ranks_per_node: int) -> int:
        """Ranks of a group like this one on one node, the fewest."""
        span = self.size * self.stride
        together = ranks_per_node if span > ranks_per_node else gcd(span, ranks_per_node)
        return max(1, together // max(1, self.stride))

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


_FP32 = 4
_WEIGHTS, GRADIENTS, _REPLICAS = "gather weights", "scatter gradients", "sum replicas"
_TENSOR, _HALO, _CONTEXT_GATHER, _CONTEXT_SCATTER = "tensor parallelism", "halo", "gather keys", "scatter key gradients"
OVERLAPPED = (_WEIGHTS, GRADIENTS, _REPLICAS)
"""Purposes whose collectives run while the blocks before or after them compute."""


@dataclass(frozen=True)
class CollectiveUse:
    """Collectives of one purpose in a step, all passes together."""

    purpose: str
    group: CollectiveGroup
    total: CollectiveTotal


def weight_shards(parallel: ParallelConfig, ranks: int, ranks_per_node: int) -> int:
    """Ranks among which the weights of one rank of tensor parallelism are divided: context-parallel ranks are among
    them."""
    if parallel.data == "ddp":
        return 1
    data_ranks = max(1, ranks // parallel.ranks_per_row)
    if parallel.data == "hsdp":
        data_ranks = min(data_ranks, hsdp_shard_ranks(parallel, min(ranks, ranks_per_node)))
    return data_ranks * parallel.cp


def collectives(
    config: RunConfig, figures: ModelFigures, ranks: int, ranks_per_node: int, passes: int
) -> list[CollectiveUse]:
    """Collectives of one step with so many forward and backward passes; those among one rank are left out."""
    uses = [
        *_of_weights(config, figures, ranks, ranks_per_node, passes),
        *_of_tensor_parallelism(config, figures, ranks, passes),
        *_of_context_parallelism(config, figures, ranks, passes),
    ]
    return [use for use in uses if use.group.size > 1 and use.total.n_bytes]


def by_group(uses: list[CollectiveUse]) -> dict[CollectiveGroup, CollectiveTotal]:
    """Sum collectives over their purposes, to compare them with counts."""
    calls: Counter[CollectiveGroup] = Counter()
    n_bytes: Counter[CollectiveGroup] = Counter()
    for use in uses:
        calls[use.group] += use.total.calls
        n_bytes[use.group] += use.total.n_bytes
    return {group: CollectiveTotal(calls[group], n_bytes[group]) for group in calls}


def _of_weights(
    config: RunConfig, figures: ModelFigures, ranks: int, ranks_per_node: int, passes: int
) -> Iterator[CollectiveUse]:
    """Blocks are gathered for the forward and for the backward pass, embeddings and head once (a tied head, which is
    part of the whole model, twice, and a head once more at the end of every pass but the last); gradients are scattered
    in fp32 in every pass. Replicas of hsdp sum their shards once per step."""
    parallel, tp = config.parallel, config.parallel.tp
    width = _FP32 if config.runtime.precision == "fp32" else 2
    shards = weight_shards(parallel, ranks, ranks_per_node)
    if parallel.data == "ddp":
        replicas, share = ranks // tp, figures.share(1, tp)
        total = CollectiveTotal(1, _FP32 * share)
        yield CollectiveUse(_REPLICAS, CollectiveGroup("all_reduce", replicas, tp), total)
        return
    blocks = {kind: shapes.padded(shards, tp) for kind, shapes in figures.blocks.items()}
    in_blocks = sum(figures.layers[kind] * size for kind, size in blocks.items())
    outside = sum(shapes.padded(shards, tp) for shapes in figures.outside.values())
    n_layers, n_outside = sum(figures.layers.values()), len(figures.outside)
    head, again = figures.outside[HEAD].padded(shards, tp), passes if n_outside == 1 else passes - 1
    gathered = CollectiveTotal(
        passes * (2 * n_layers + n_outside) + again, width * (passes * (2 * in_blocks + outside) + again * head)
    )
    yield CollectiveUse(_WEIGHTS, CollectiveGroup("all_gather", shards, tp), gathered)
    scattered = CollectiveTotal(passes * (n_layers + n_outside), passes * _FP32 * (in_blocks + outside))
    yield CollectiveUse(GRADIENTS, CollectiveGroup("reduce_scatter", shards, tp), scattered)
    if parallel.data == "hsdp":
        summed = CollectiveTotal(n_layers + n_outside, _FP32 * (in_blocks + outside) // shards)
        yield CollectiveUse(_REPLICAS, CollectiveGroup("all_reduce", ranks // (shards * tp), shards * tp), summed)


def _of_tensor_parallelism(
    config: RunConfig, figures: ModelFigures, ranks: int, passes: int
) -> Iterator[CollectiveUse]:
    """Attention and feed-forward gather their input and scatter their output; their backward passes do the reverse.
    Recomputation repeats the forward pass up to the feed-forward's last product."""
    parallel, model = config.parallel, config.model
    tp, layers = parallel.tp, sum(figures.layers.values())
    width = _FP32 if config.runtime.precision == "fp32" else 2
    rows = config.train.batch_size * parallel.ranks_per_row // ranks
    stream = rows * config.train.seq_len // parallel.cp * model.dim * width
    again = config.runtime.gradient_checkpointing != "off"
    head = figures.parameters.head_weights * width
    gathers = layers * (4 + 2 * again)
    scatters = layers * (4 + again)
    for kind, calls, more in (("all_gather", gathers + 1, head), ("reduce_scatter", scatters + 1, head)):
        group = CollectiveGroup(kind, tp, 1)  # type: ignore[arg-type]
        yield CollectiveUse(_TENSOR, group, CollectiveTotal(passes * (calls + 1), passes * (calls * stream + more)))


def _of_context_parallelism(
    config: RunConfig, figures: ModelFigures, ranks: int, passes: int
) -> Iterator[CollectiveUse]:
    """Collectives of context parallelism.

    Each layer has one exchange of the tokens before each piece, a gather of the keys and one of the values that may be
    selected, and one of the compressed entries; the backward pass scatters their gradients.
    """
    parallel, model, nsa = config.parallel, config.model, config.nsa
    pieces = context_pieces(parallel)
    width = _FP32 if config.runtime.precision == "fp32" else 2
    rows = config.train.batch_size * parallel.ranks_per_row // ranks
    per_token = rows * model.n_kv_groups // parallel.tp * width
    keys, both = per_token * model.d_k, per_token * (model.d_k + model.d_v)
    entries = pieces * -(-config.train.seq_len // pieces // nsa.d)
    halo: dict[str, int] = {
        "nsa": both * (nsa.l - 1 + nsa.w - 1),
        "global": both * (nsa.l - 1),
        "merged": keys * (nsa.l - 1) + both * (nsa.w - 1),
        "window": both * (config.window - 1),
        "dense": 0,
    }
    raw, compressed = both * config.train.seq_len, both * entries
    scattered = {"nsa": raw + compressed, "global": raw + compressed, "merged": raw, "window": 0, "dense": raw}
    n_scatters = {"nsa": 3, "global": 3, "merged": 2, "window": 0, "dense": 2}
    selector_halo = dict.fromkeys(halo, 0)  # has a gradient only if the compressed branch has keys of its own
    if nsa.selector_loss > 0:
        for kind in SELECTING_KINDS:
            if kind != "merged" or config.attention.compression.operator.has_weights:  # else there is nothing to train
                selector_halo[kind] = keys * (nsa.l - 1)
                scattered[kind] += keys * entries
                n_scatters[kind] += 1
    # Compressed keys that only choose blocks have no gradient.
    gathered = scattered | {"merged": scattered["merged"] + keys * entries}
    n_gathers = n_scatters | {"merged": n_scatters["merged"] + 1}
    forward = 2 if config.runtime.gradient_checkpointing != "off" else 1

    def summed(of: Mapping[str, int]) -> int:
        return sum(count * of[kind] for kind, count in figures.layers.items())

    def use(purpose: str, kind: CollectiveKind, times: int, calls: int, n_bytes: int) -> CollectiveUse:
        group = CollectiveGroup(kind, parallel.cp, parallel.tp)
        return CollectiveUse(purpose, group, CollectiveTotal(passes * times * calls, passes * times * n_bytes))

    def exchanges(of: Mapping[str, int]) -> int:
        return summed({kind: int(size > 0) for kind, size in of.items()})

    yield use(_HALO, "all_to_all", forward + 1, exchanges(halo), summed(halo))
    times = forward + (nsa.kv == "per_branch")
    yield use(_HALO, "all_to_all", times, exchanges(selector_halo), summed(selector_halo))
    yield use(_CONTEXT_GATHER, "all_gather", forward, summed(n_gathers), summed(gathered))
    yield use(_CONTEXT_SCATTER, "reduce_scatter", 1, summed(n_scatters), summed(scattered))
