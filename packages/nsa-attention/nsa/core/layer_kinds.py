"""Layers of other kinds than NSA, to mix with it or compare it with: `dense`, `window`, `global`, and `merged`
(`nsa.core.merged_attention`).

All take the arguments of `NSAAttention` and share its queries, RoPE, QK-norm, biases, groups and widths, so that every
layer of a model may be of another kind. All but `global` have one projection of keys and values and no gates.

B batch · S tokens · T keys · G kv groups · R heads per group · K key dim · V value dim · N chosen blocks
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.core.branches import ATTENTION_PARTS, BRANCH_ORDER, DENSE_PART, BranchesOutput, BranchKeys, BranchStreams
from nsa.core.document_layout import DocumentLayout
from nsa.core.kv_cache import LayerCache
from nsa.core.merged_attention import MergedAttention
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import Positions
from nsa.core.probe import Probe
from nsa.core.token_caches import DenseCache, WindowCache
from nsa.geometry import Geometry
from nsa.kernels.interface import constant_when_traced
from nsa.options import AttentionKind

COMPILED_ON_CPU = "cpu"
"""Backend whose sliding kernel, with a window of all tokens, is faster than PyTorch's attention on a CPU."""

_ALL_TOKENS = 2**30  # a window that holds every key, whatever their number, which may be symbolic while traced
_Keys = tuple[BranchKeys, BranchKeys, BranchKeys]


class GlobalAttention(NSAAttention):
    """The compressed and the selected branch, without the sliding window."""

    kind: ClassVar[AttentionKind] = "global"
    branches: ClassVar[tuple[str, ...]] = BRANCH_ORDER[:2]

    @property
    def _shared_streams(self) -> tuple[bool, bool]:
        """In the cache the window, which nothing reads, is the selected branch's pages."""
        return True, super()._shared_streams[1]


class WindowAttention(NSAAttention):
    """Causal attention over the query's own token and the w − 1 before it."""

    kind: ClassVar[AttentionKind] = "window"
    branches: ClassVar[tuple[str, ...]] = ("sliding",)
    cache_type: ClassVar[type[LayerCache]] = WindowCache

    def flops(self, seq_len: int) -> dict[str, float]:
        reads = self.geometry.total_reads(seq_len)["sliding"]
        return self._flops("sliding", reads / seq_len)

    def _flops(self, part: str, reads_per_token: float) -> dict[str, float]:
        linear = (self.w_q, self.w_k, self.w_v, self.w_out)
        per_read = 2 * self.n_heads * (self.d_k + self.d_v)
        return {
            "projections": 2.0 * sum(m.weight.numel() for m in linear),
            **dict.fromkeys(("compression", *ATTENTION_PARTS), 0.0),
            part: per_read * reads_per_token,
        }

    @property
    def _shared_streams(self) -> tuple[bool, bool]:
        return False, True  # a ring, and nothing to compress

    def attend_cached(
        self,
        q_BSGRK: Tensor,
        new: BranchStreams,
        gates: Tensor | None,
        cache: LayerCache,
        new_lens_B: Tensor | None = None,
    ) -> tuple[Tensor, None, _Keys]:
        self.plan(q_BSGRK.device, q_BSGRK.dtype)  # a backend that cannot run is refused before anything is appended
        keys = cache.append_held(new, new_lens_B, self.compress)
        return self.attend(q_BSGRK, None, *keys).out, None, keys

    def _lay_out(self, new: BranchStreams, layout: DocumentLayout, where: Positions) -> _Keys:
        keys = BranchKeys(new.k_win, new.v_win, layout.pos_BS, layout.start_BS)
        return keys, keys, keys

    def _record(self, probe: Probe, gates: Tensor | None, idx_BSGN: Tensor | None, keys: _Keys) -> None:
        probe.record_tokens(keys[2], self.geometry.w)

    def attend(
        self,
        q_BSGRK: Tensor,
        gates_BSGR3: Tensor | None,
        compressed: BranchKeys,
        selected: BranchKeys,
        window: BranchKeys,
    ) -> BranchesOutput:
        return BranchesOutput(self.attend_tokens(q_BSGRK, window), None, ())

    def attend_tokens(self, q_BSGRK: Tensor, keys: BranchKeys) -> Tensor:
        run = self.plan(q_BSGRK.device, q_BSGRK.dtype).functions
        out = run.sliding(q_BSGRK, *keys, geometry=self.geometry, scale=self.scale)
        assert isinstance(out, Tensor)
        return out


class DenseAttention(WindowAttention):
    """Causal attention over all tokens."""

    kind: ClassVar[AttentionKind] = "dense"
    cache_type: ClassVar[type[LayerCache]] = DenseCache

    def flops(self, seq_len: int) -> dict[str, float]:
        return self._flops(DENSE_PART, (seq_len + 1) / 2)

    @property
    def _shared_streams(self) -> tuple[bool, bool]:
        return True, True  # everything is in pages

    def _record(self, probe: Probe, gates: Tensor | None, idx_BSGN: Tensor | None, keys: _Keys) -> None:
        probe.record_tokens(keys[2], keys[2].k.shape[1])

    def attend_tokens(self, q_BSGRK: Tensor, keys: BranchKeys) -> Tensor:
        """Through the faster of PyTorch's attention and a sliding kernel whose window holds every key.

        On a CPU the compiled sliding kernel takes 0.13 to 0.8 of the time of PyTorch's (512 to 4,096 tokens, forward
        and backward, bf16 and fp32). PyTorch's is faster than the portable kernel and, by assumption, than Triton's on
        a GPU. It takes only rows of one document without a cache; a backend requested by name is used.
        """
        plan = self.plan(q_BSGRK.device, q_BSGRK.dtype)
        backend = next(choice.backend for choice in plan.choices if choice.branch == "sliding")
        if self.kernels.sliding == "auto" and backend != COMPILED_ON_CPU and _is_plain(q_BSGRK, keys):
            return _torch_attention(q_BSGRK, keys.k, keys.v, self.scale)
        g = self.geometry
        whole = _with_window(g.l, g.d, g.l_sel, g.n_sel, _ALL_TOKENS)
        out = plan.functions.sliding(q_BSGRK, *keys, geometry=whole, scale=self.scale)
        assert isinstance(out, Tensor)
        return out


LAYER_CLASSES: dict[AttentionKind, type[NSAAttention]] = {
    layer.kind: layer for layer in (NSAAttention, DenseAttention, WindowAttention, GlobalAttention, MergedAttention)
}


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


def layer_parameters(layer: NSAAttention, of_nsa: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of a layer as parts of an NSA layer's: what kinds share starts from the same values.

    Queries, output and norms are the same. Keys and values are those of the layer's own branches, `dense` as `window`;
    of `merged`, which has one set of them, those of the selected branch.
    """
    own = [BRANCH_ORDER.index(branch) for branch in layer.branches]
    found = {}
    for name, parameter in layer.named_parameters():
        whole = of_nsa[name]
        if whole.shape != parameter.shape:
            # w_k and w_v are ordered (group, branch, width), gates (group, head, branch).
            outer, inner = (-1, 1) if name.startswith("gates.") else (layer.n_kv_groups, -1)
            by_branch = whole.unflatten(0, (outer, len(BRANCH_ORDER), inner))
            kept = own[: len(BRANCH_ORDER) * parameter.shape[0] // whole.shape[0]]
            whole = by_branch[:, torch.tensor(kept, device=whole.device)].flatten(0, 2)
        found[name] = whole
    return found


def layer_of_kind(kind: AttentionKind, whole: NSAAttention) -> NSAAttention:
    """A layer of the same config, with the values that `whole`, an NSA layer, has for its parameters."""
    if kind == whole.kind:
        return whole
    with torch.device("meta"):
        layer = LAYER_CLASSES[kind](whole.config, kernels=whole.kernels)
    weight = whole.w_q.weight
    values = layer_parameters(layer, whole.state_dict())
    layer.to_empty(device=weight.device).to(weight.dtype).load_state_dict(values)
    return layer
