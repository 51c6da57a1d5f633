"""Kinds of attention layers: what each attends to between its projections, its cache, and the table of all kinds.

`nsa` and `global` are `ThreeBranches`. The others have one projection of keys and values and no gates.

B batch · S tokens · T keys · G kv groups · R heads per group · X gates per group (R or 1) · K key dim · V value dim
C compressed blocks · N chosen blocks
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.core.attention_config import AttentionConfig, SelectorBlocks
from nsa.core.branches import (
    ATTENTION_PARTS,
    BRANCH_ORDER,
    DENSE_PART,
    AttendedKeys,
    BranchesOutput,
    BranchKeys,
    BranchStreams,
)
from nsa.core.coarse_attention import attend_coarse
from nsa.core.kv_cache import Compress, LayerCache
from nsa.core.positions import QuerySample
from nsa.core.probe import Probe
from nsa.core.selector_loss import selector_loss_of_queries
from nsa.geometry import CoarseLevel, Geometry
from nsa.kernels.interface import KernelShape, TokenDecoder, constant_when_traced
from nsa.kernels.reference import ScoreOptions
from nsa.kernels.registry import BackendRequest, KernelPlan, plan
from nsa.options import AttentionKind

COMPILED_ON_CPU = "cpu"
"""Backend whose sliding kernel, with a window of all tokens, is faster than PyTorch's attention on a CPU."""

_ALL_TOKENS = 2**30  # a window that holds every key, whatever their number, which may be symbolic while traced


class _DenseCache(LayerCache):
    """Keys and values of all tokens, in pages of l_sel tokens."""

    _pages_entries = False

    def _append_new(
        self, new: BranchStreams, pos_BS: Tensor, end_B1: Tensor, compress: Compress, decoder: TokenDecoder | None
    ) -> AttendedKeys:
        self.selected.write(pos_BS, pos_BS < end_B1, (new.k_sel, new.v_sel))
        self.length_B += end_B1[:, 0] - self.length_B
        n_pages, inside_BS = self._pages_read(pos_BS)
        k, v = (slots.content(n_pages) for slots in self.selected.both)
        keys = BranchKeys(k, v, inside_BS, pos_BS.new_zeros(()).expand_as(pos_BS))
        return keys, keys, keys


class _WindowCache(LayerCache):
    """Keys and values of the last w tokens of each row; its pages hold nothing."""

    _pages_tokens = _pages_entries = False

    def _append_new(
        self, new: BranchStreams, pos_BS: Tensor, end_B1: Tensor, compress: Compress, decoder: TokenDecoder | None
    ) -> AttendedKeys:
        keys = self._append_window(new.k_win, new.v_win, pos_BS, end_B1)
        if self.rewind:
            self._append_past(new, pos_BS, end_B1)
        self.length_B += end_B1[:, 0] - self.length_B
        if keys is None:
            k, v = (slots.content() for slots in self.window.both)
            keys = BranchKeys(k, v, self._window_pos_B1, pos_BS.new_zeros(()).expand_as(pos_BS))
        return keys, keys, keys


class _MergedCache(LayerCache):
    """Keys and values of all tokens, and compressed keys, which have no values: they only choose blocks."""

    _entries_have_values = False


class AttentionStrategy(ABC):
    """What the queries of a layer attend to.

    scale: what scores are multiplied by.
    branches: those that a layer of this kind has, of BRANCH_ORDER.
    coarse: second level of the compressed keys.
    loss_blocks: what the selector loss compares.
    """

    cache_type: ClassVar[type[LayerCache]] = LayerCache
    decodes: ClassVar[Literal["branches", "merged"] | None] = None
    """What a backend's fused step for one new token per row computes for a layer of this kind; None: there is none."""

    def __init__(
        self,
        shape: KernelShape,
        kernels: BackendRequest,
        scale: float,
        branches: tuple[str, ...] = BRANCH_ORDER,
        coarse: CoarseLevel | None = None,
        loss_blocks: SelectorBlocks = "chosen",
    ) -> None:
        self.shape, self.kernels, self.branches = shape, kernels, branches
        self.coarse, self.loss_blocks = coarse, loss_blocks
        self.options: ScoreOptions = {"geometry": shape.geometry, "scale": scale}

    @classmethod
    def own_config(cls, config: AttentionConfig) -> AttentionConfig:
        """The config of a layer of this kind, from that which all layers of a model share."""
        return config

    def shared_streams(self, config: AttentionConfig) -> tuple[bool, bool]:
        """Whether a cache holds the window's and the compressed branch's raw keys and values in the selected branch's
        pages. So it does with a window that nothing reads."""
        shared = config.kv == "shared"
        return shared or "sliding" not in self.branches, shared and config.compression.rotated == "before"

    @property
    def selects(self) -> bool:
        """Whether the layer chooses blocks, and so has compressed keys."""
        return "selected" in self.branches

    def plan(self, device: torch.device, dtype: torch.dtype) -> KernelPlan:
        """The backend that computes each branch there, and why."""
        return plan(self.kernels, device, dtype, self.shape)

    def attend_coarse(
        self, coarse: CoarseLevel, q_BSGRK: Tensor, compressed: BranchKeys
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The compressed branch's output, the chosen blocks and log-sum-exps, in two levels."""
        run = plan(self.kernels, q_BSGRK.device, q_BSGRK.dtype, self.shape._replace(geometry=coarse.geometry))
        return attend_coarse(run, q_BSGRK, compressed, coarse=coarse, **self.options)

    def visible(self, keys: AttendedKeys) -> AttendedKeys:
        """The keys with the positions up to which each branch sees them: the query's own, unless a kind differs."""
        return keys

    @abstractmethod
    def attend(
        self, run: KernelPlan, q_BSGRK: Tensor, gates_BSGR3: Tensor | None, keys: AttendedKeys
    ) -> BranchesOutput:
        """Attend to keys that `visible` returned. run: the backends of `plan`."""

    def selector_loss(
        self, run: KernelPlan, sample: QuerySample, q_BSGRK: Tensor, k_BCGK: Tensor, output: BranchesOutput,
        keys: AttendedKeys,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the selector loss of a layer that selects, and its plain mean over queries. k_BCGK: the compressed
        keys, which alone have a gradient."""
        chosen = output if self.loss_blocks == "chosen" else None
        return selector_loss_of_queries(sample, q_BSGRK, k_BCGK, keys, chosen, **self.options)

    def record(
        self, probe: Probe, gates: Tensor | None, gate_kind: str, blocks: Tensor | None, keys: AttendedKeys
    ) -> None:
        """Give a probe what was read."""
        assert blocks is not None
        probe.record(gates, gate_kind, blocks, keys, self.shape.geometry, self.branches, self.coarse)

    def flops(self, seq_len: int) -> dict[str, float]:
        """Forward FLOPs per token of ATTENTION_PARTS, averaged over a sequence; multiply-adds count two."""
        g, selectable = self.shape.geometry, self.selectable(seq_len)
        totals = {**g.total_reads(selectable), "sliding": g.total_reads(seq_len)["sliding"]}
        reads = {branch: total / seq_len for branch, total in totals.items()}
        scored = reads["compressed"]
        if self.coarse is not None:
            in_two = {part: total / seq_len for part, total in self.coarse.total_reads(g, selectable).items()}
            reads["compressed"], scored = in_two["compressed"], sum(in_two.values())
        n_heads = self.shape.n_kv_groups * self.shape.heads_per_group
        return {
            "select": 2 * n_heads * self.shape.d_k * scored,
            **{branch: self._flops_of(n) if branch in self.branches else 0.0 for branch, n in reads.items()},
        }

    def selectable(self, n_tokens: int) -> int:
        """Number of tokens among which the last of n_tokens tokens chooses its blocks."""
        return n_tokens

    def _flops_of(self, reads: float) -> float:
        s = self.shape
        return 2 * s.n_kv_groups * s.heads_per_group * (s.d_k + s.d_v) * reads

    def _flops_of_one_part(self, part: str, reads: float) -> dict[str, float]:
        return {**dict.fromkeys(ATTENTION_PARTS, 0.0), part: self._flops_of(reads)}


class ThreeBranches(AttentionStrategy):
    """Attends to the compressed entries, to the blocks that they choose and to the sliding window, if the layer has
    one, and mixes the three by gates."""

    decodes = "branches"

    def attend(
        self, run: KernelPlan, q_BSGRK: Tensor, gates_BSGR3: Tensor | None, keys: AttendedKeys,
        blocks_BSGN: Tensor | None = None,
    ) -> BranchesOutput:  # fmt: skip
        """The one sequence of kernel calls. blocks: to attend to in place of the selection. Without a window the first
        two branches are mixed, and the window's log-sum-exp is missing."""
        assert gates_BSGR3 is not None
        compressed, (k_sel, v_sel, pos, start), window = keys
        options = self.options
        if run.layer is not None and blocks_BSGN is None and self.coarse is None and "sliding" in self.branches:
            mixed, idx, *lse = run.layer(q_BSGRK, gates_BSGR3, *compressed, *keys[1], *window, **options)[:5]
            return BranchesOutput(mixed, idx, tuple(lse))
        if blocks_BSGN is not None:
            compressed_out, lse_cmp = run.functions.compressed(q_BSGRK, *compressed, **options, return_lse=True)
        elif self.coarse is None:
            compressed_out, blocks_BSGN, lse_cmp = run.compressed_and_select(
                q_BSGRK, *compressed, **options, return_lse=True
            )
        else:
            compressed_out, blocks_BSGN, lse_cmp = self.attend_coarse(self.coarse, q_BSGRK, compressed)
        selected_out, lse_sel = run.functions.selected(
            q_BSGRK, k_sel, v_sel, blocks_BSGN, pos, start, **options, return_lse=True
        )
        if "sliding" not in self.branches:
            gate_cmp, gate_sel = gates_BSGR3[..., 0, None], gates_BSGR3[..., 1, None]
            mixed = (gate_cmp * compressed_out + gate_sel * selected_out).to(compressed_out.dtype)
            return BranchesOutput(mixed, blocks_BSGN, (lse_cmp, lse_sel))
        sliding_out, lse_win = run.functions.sliding(q_BSGRK, *window, **options, return_lse=True)
        mixed = run.mix(gates_BSGR3, compressed_out, selected_out, sliding_out)
        return BranchesOutput(mixed, blocks_BSGN, (lse_cmp, lse_sel, lse_win))


class SlidingWindow(AttentionStrategy):
    """Attends to the query's own token and the w − 1 before it."""

    cache_type = _WindowCache

    def shared_streams(self, config: AttentionConfig) -> tuple[bool, bool]:
        return False, True  # a ring, and nothing to compress

    def attend(
        self, run: KernelPlan, q_BSGRK: Tensor, gates_BSGR3: Tensor | None, keys: AttendedKeys
    ) -> BranchesOutput:
        out = run.functions.sliding(q_BSGRK, *keys[2], **self.options)
        assert isinstance(out, Tensor)
        return BranchesOutput(out, None, ())

    def record(
        self, probe: Probe, gates: Tensor | None, gate_kind: str, blocks: Tensor | None, keys: AttendedKeys
    ) -> None:
        probe.record_tokens(keys[2], self.shape.geometry.w)

    def flops(self, seq_len: int) -> dict[str, float]:
        return self._flops_of_one_part("sliding", self.shape.geometry.total_reads(seq_len)["sliding"] / seq_len)


class AllTokens(AttentionStrategy):
    """Attends to every token up to the query's own: dense causal attention."""

    cache_type = _DenseCache

    def shared_streams(self, config: AttentionConfig) -> tuple[bool, bool]:
        return True, True  # everything is in pages

    def attend(
        self, run: KernelPlan, q_BSGRK: Tensor, gates_BSGR3: Tensor | None, keys: AttendedKeys
    ) -> BranchesOutput:
        """Through the faster of PyTorch's attention and a sliding kernel whose window holds every key.

        On a CPU the compiled sliding kernel takes 0.13 to 0.8 of the time of PyTorch's (512 to 4,096 tokens, forward
        and backward, bf16 and fp32). PyTorch's is faster than the portable kernel and, by assumption, than Triton's on
        a GPU. It takes only rows of one document without a cache; a backend requested by name is used.
        """
        backend = next(choice.backend for choice in run.choices if choice.branch == "sliding")
        tokens = keys[2]
        if self.kernels.sliding == "auto" and backend != COMPILED_ON_CPU and _is_plain(q_BSGRK, tokens):
            return BranchesOutput(_torch_attention(q_BSGRK, tokens.k, tokens.v, self.options["scale"]), None, ())
        g = self.shape.geometry
        whole = _with_window(g.l, g.d, g.l_sel, g.n_sel, _ALL_TOKENS)
        out = run.functions.sliding(q_BSGRK, *tokens, geometry=whole, scale=self.options["scale"])
        assert isinstance(out, Tensor)
        return BranchesOutput(out, None, ())

    def record(
        self, probe: Probe, gates: Tensor | None, gate_kind: str, blocks: Tensor | None, keys: AttendedKeys
    ) -> None:
        probe.record_tokens(keys[2], keys[2].k.shape[1])

    def flops(self, seq_len: int) -> dict[str, float]:
        return self._flops_of_one_part(DENSE_PART, (seq_len + 1) / 2)


class MergedSoftmax(AttentionStrategy):
    """Attends to the window and to selected blocks of the tokens before it, in one softmax; compressed keys only choose
    the blocks. With one set of keys and values this is dense causal attention for the first n_sel · l_sel + w tokens of
    a document, so a dense model's weights start as they are (`nsa convert`).

    Blocks are chosen, and read, as by the query that stands w tokens earlier, so that no token is read twice: block 0
    and the two blocks nearest the window are always in. Keys and values are one set, whatever `kv` says. φ of the keys
    is trained by the selector loss alone, on the attention mass of the selected blocks before the window, or of all.
    """

    cache_type = _MergedCache
    decodes = "merged"

    @classmethod
    def own_config(cls, config: AttentionConfig) -> AttentionConfig:
        """One set of keys and values; no selector loss for a φ without weights, which is all that it would train."""
        learned = config.compression.operator.has_weights
        return config.changed(kv="shared", selector_loss=config.selector.loss if learned else 0.0)

    def selectable(self, n_tokens: int) -> int:
        return max(0, n_tokens - self.shape.geometry.w)

    def visible(self, keys: AttendedKeys) -> AttendedKeys:
        compressed, selected, window = keys
        far_BS = (selected.pos_BS - self.shape.geometry.w).clamp(min=-1)
        return compressed._replace(pos_BS=far_BS), selected._replace(pos_BS=far_BS), window

    def attend(
        self, run: KernelPlan, q_BSGRK: Tensor, gates_BSGR3: Tensor | None, keys: AttendedKeys,
        blocks: Tensor | None = None,
    ) -> BranchesOutput:  # fmt: skip
        """blocks: to attend to in place of the selection."""
        (k_cmp, _, pos, first), (k, v, far, start), window = keys
        options = self.options
        if blocks is None and self.coarse is None:
            blocks = run.functions.select(q_BSGRK, k_cmp, pos, first, **options)
        elif blocks is None:
            assert self.coarse is not None
            with torch.no_grad():
                blocks = self.attend_coarse(self.coarse, q_BSGRK, BranchKeys(k_cmp, k_cmp, pos, first))[1]
        selected_out, lse_sel = run.functions.selected(q_BSGRK, k, v, blocks, far, start, **options, return_lse=True)
        window_out, lse_win = run.functions.sliding(q_BSGRK, *window, **options, return_lse=True)
        return BranchesOutput(merge(selected_out, lse_sel, window_out, lse_win), blocks, (lse_sel, lse_win))

    def selector_loss(
        self, run: KernelPlan, sample: QuerySample, q_BSGRK: Tensor, k_BCGK: Tensor, output: BranchesOutput,
        keys: AttendedKeys,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Nothing attends to compressed keys: the log-sum-exps of their scores are computed here, of the sampled
        queries."""
        if self.loss_blocks == "all":
            return super().selector_loss(run, sample, q_BSGRK, k_BCGK, output, keys)
        assert output.blocks is not None
        at_Q = sample.queries_Q
        compressed, selected = (
            BranchKeys(k, v, pos.index_select(1, at_Q), start.index_select(1, at_Q)) for k, v, pos, start in keys[:2]
        )
        q_BQGRK, blocks, lse_sel = (x.detach().index_select(1, at_Q) for x in (q_BSGRK, output.blocks, output.lse[0]))
        with torch.no_grad():
            entries = compressed._replace(v=compressed.k)
            if self.coarse is None:
                _, lse_cmp = run.functions.compressed(q_BQGRK, *entries, **self.options, return_lse=True)
            else:
                lse_cmp = self.attend_coarse(self.coarse, q_BQGRK, entries)[2]
        every_query = replace(sample, queries_Q=torch.arange(len(at_Q), device=at_Q.device))
        sampled = BranchesOutput(output.out, blocks, (lse_cmp, lse_sel))
        return super().selector_loss(run, every_query, q_BQGRK, k_BCGK, sampled, (compressed, selected, keys[2]))


class LayerKind(NamedTuple):
    """Strategy and branches of one kind of layer."""

    strategy: type[AttentionStrategy]
    branches: tuple[str, ...]


LAYER_KINDS: dict[AttentionKind, LayerKind] = {
    "nsa": LayerKind(ThreeBranches, BRANCH_ORDER),
    "dense": LayerKind(AllTokens, ("sliding",)),
    "window": LayerKind(SlidingWindow, ("sliding",)),
    "global": LayerKind(ThreeBranches, BRANCH_ORDER[:2]),
    "merged": LayerKind(MergedSoftmax, BRANCH_ORDER[1:]),
}


def merge(one_BSGRV: Tensor, lse_one_BSGR: Tensor, other_BSGRV: Tensor, lse_other_BSGR: Tensor) -> Tensor:
    """Attention over the keys of both, of which none is in both, from the outputs and log-sum-exps over each."""
    nothing = lse_other_BSGR == -torch.inf  # else −inf minus −inf
    share_BSGR1 = (lse_one_BSGR - lse_other_BSGR).masked_fill(nothing, torch.inf).sigmoid()[..., None]
    return (share_BSGR1 * one_BSGRV + (1 - share_BSGR1) * other_BSGRV).to(one_BSGRV.dtype)


@constant_when_traced  # torch.compile cannot trace the making of one
def _with_window(l: int, d: int, l_sel: int, n_sel: int, w: int) -> Geometry:
    return Geometry.from_ints([l, d, l_sel, n_sel, w])


def _is_plain(q_BSGRK: Tensor, keys: BranchKeys) -> bool:
    """Whether every row is one document from its first token on: then its start is stored once (`plain_layout`)."""
    length = q_BSGRK.shape[1]
    return length == keys.k.shape[1] and length > 1 and keys.start_BS.stride(1) == 0


def _torch_attention(q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, scale: float) -> Tensor:
    q_BHSK, k_BGTK, v_BGTV = (x.transpose(1, 2) for x in (q_BSGRK.flatten(2, 3), k_BTGK, v_BTGV))
    out_BHSV = F.scaled_dot_product_attention(q_BHSK, k_BGTK, v_BGTV, is_causal=True, scale=scale, enable_gqa=True)
    return out_BHSV.transpose(1, 2).unflatten(2, q_BSGRK.shape[2:4])
