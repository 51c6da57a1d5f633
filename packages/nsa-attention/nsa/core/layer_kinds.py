"""Kinds of attention layers: what each attends to, its branches, and the table of all kinds.

`nsa` and `global` are `ThreeBranches`. The others have one projection of keys and values and no gates.

B batch · S tokens · T keys · G kv groups · R heads per group · K key dim · V value dim
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.core.attention_config import AttentionConfig
from nsa.core.attention_strategy import AttentionStrategy
from nsa.core.branches import BRANCH_ORDER, DENSE_PART, AttendedKeys, BranchesOutput, BranchKeys
from nsa.core.positions import QuerySample
from nsa.core.probe import Probe
from nsa.core.three_branches import ThreeBranches
from nsa.core.token_caches import DenseCache, MergedCache, WindowCache
from nsa.geometry import Geometry
from nsa.kernels.interface import TokenDecoder, constant_when_traced
from nsa.kernels.registry import KernelPlan
from nsa.options import AttentionKind

COMPILED_ON_CPU = "cpu"
"""Backend whose sliding kernel, with a window of all tokens, is faster than PyTorch's attention on a CPU."""

_ALL_TOKENS = 2**30  # a window that holds every key, whatever their number, which may be symbolic while traced


class SlidingWindow(AttentionStrategy):
    """Attends to the query's own token and the w − 1 before it."""

    cache_type = WindowCache

    def shared_streams(self, config: AttentionConfig) -> tuple[bool, bool]:
        return False, True  # a ring, and nothing to compress

    def attend(
        self, run: KernelPlan, q_BSGRK: Tensor, gates_BSGR3: Tensor | None, keys: AttendedKeys
    ) -> BranchesOutput:
        out = run.functions.sliding(q_BSGRK, *keys[2], **self.selection.options)
        assert isinstance(out, Tensor)
        return BranchesOutput(out, None, ())

    def record(
        self, probe: Probe, gates: Tensor | None, gate_kind: str, blocks: Tensor | None, keys: AttendedKeys
    ) -> None:
        probe.record_tokens(keys[2], self.geometry.w)

    def flops(self, seq_len: int) -> dict[str, float]:
        return self._flops_of_one_part("sliding", self.geometry.total_reads(seq_len)["sliding"] / seq_len)


class AllTokens(AttentionStrategy):
    """Attends to every token up to the query's own: dense causal attention."""

    cache_type = DenseCache

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
            return BranchesOutput(_torch_attention(q_BSGRK, tokens.k, tokens.v, self.scale), None, ())
        g = self.geometry
        whole = _with_window(g.l, g.d, g.l_sel, g.n_sel, _ALL_TOKENS)
        out = run.functions.sliding(q_BSGRK, *tokens, geometry=whole, scale=self.scale)
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

    cache_type = MergedCache

    @classmethod
    def own_config(cls, config: AttentionConfig) -> AttentionConfig:
        """One set of keys and values; no selector loss for a φ without weights, which is all that it would train."""
        learned = config.compression.operator.has_weights
        return config.changed(kv="shared", selector_loss=config.selector.loss if learned else 0.0)

    def selectable(self, n_tokens: int) -> int:
        return max(0, n_tokens - self.geometry.w)

    def visible(self, keys: AttendedKeys) -> AttendedKeys:
        compressed, selected, window = keys
        far_BS = (selected.pos_BS - self.geometry.w).clamp(min=-1)
        return compressed._replace(pos_BS=far_BS), selected._replace(pos_BS=far_BS), window

    def attend(
        self, run: KernelPlan, q_BSGRK: Tensor, gates_BSGR3: Tensor | None, keys: AttendedKeys
    ) -> BranchesOutput:
        compressed, (k, v, far, start), window = keys
        options = self.selection.options
        blocks = self.selection.select(run, self.plan_coarse(q_BSGRK), q_BSGRK, compressed)
        selected_out, lse_sel = run.functions.selected(q_BSGRK, k, v, blocks, far, start, **options, return_lse=True)
        window_out, lse_win = run.functions.sliding(q_BSGRK, *window, **options, return_lse=True)
        return BranchesOutput(merge(selected_out, lse_sel, window_out, lse_win), blocks, (lse_sel, lse_win))

    def decoder_maker(self, run: KernelPlan) -> Callable[..., TokenDecoder] | None:
        return run.merged_decoder

    def selector_loss(
        self, run: KernelPlan, sample: QuerySample, q_BSGRK: Tensor, k_BCGK: Tensor, output: BranchesOutput,
        keys: AttendedKeys,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        run_coarse = self.plan_coarse(q_BSGRK)
        return self.selection.loss_of_selection_alone(run, run_coarse, sample, q_BSGRK, k_BCGK, output, keys)


class LayerKind(NamedTuple):
    """What makes a layer of one kind."""

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
    out_BHSV = F.scaled_dot_product_attention(
        q_BSGRK.flatten(2, 3).transpose(1, 2),
        k_BTGK.transpose(1, 2),
        v_BTGV.transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=True,
    )
    return out_BHSV.transpose(1, 2).unflatten(2, q_BSGRK.shape[2:4])
