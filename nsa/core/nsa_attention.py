"""Native Sparse Attention as one module: project, rotate, remember, compress, select, attend three times, mix.

B batch · S tokens · D model dim · G kv groups · R heads per group · K key dim · V value dim
C compressed blocks · N chosen blocks
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa.core.compression import BlockCompressor
from nsa.core.document_layout import DocumentLayout, packed_layout, plain_layout
from nsa.core.gates import BRANCH_ORDER, BranchGates
from nsa.core.init import init_weights
from nsa.core.kv_cache import BranchKeys, BranchStreams, LayerCache
from nsa.core.probe import Probe
from nsa.core.reads import compressed_reads, selected_reads, sliding_reads
from nsa.core.rope import RotaryEmbedding, rotate
from nsa.errors import ConfigError
from nsa.geometry import Geometry, broken_rope_rule, resolve_rope_compressed
from nsa.kernels.decoder import TokenDecoder
from nsa.kernels.registry import BackendRequest, KernelPlan, KernelShape, plan, wanted
from nsa.options import ROPE_COMPRESSED


class Positions(NamedTuple):
    """Positions of a forward pass and their rotations; the same for all layers, so a model makes it once."""

    layout: DocumentLayout | None
    """None with a cache: the cache knows."""
    tables: tuple[Tensor, Tensor]


class NSAAttention(nn.Module):
    """Causal self-attention through three branches mixed by learned gates (arXiv 2502.11089).

    One forward serves training, prefill and decode: a cache only says how many tokens came before. Each branch has its
    own keys and values; `w_k` and `w_v` hold all three, ordered (group, branch, width) so that they shard by group.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_groups: int,
        d_k: int,
        d_v: int,
        l: int = 32,
        d: int = 16,
        l_sel: int = 64,
        n_sel: int = 16,
        w: int = 512,
        *,
        phi: str = "avg",
        phi_pos_emb: bool = False,
        gate: str = "softmax",
        gate_per: str = "head",
        gate_temperature: float = 1.0,
        rope_base: float = 500_000.0,
        rope_scale: float = 1.0,
        rope_compressed: str = "auto",
        kernels: str | Mapping[str, str] | BackendRequest = BackendRequest(),  # noqa: B008 - an immutable tuple of names
    ) -> None:
        super().__init__()
        _check_heads(n_heads, n_kv_groups, d_k)
        _check_rope(phi, rope_compressed)
        self.dim, self.n_heads, self.n_kv_groups, self.d_k, self.d_v = dim, n_heads, n_kv_groups, d_k, d_v
        self.geometry = Geometry(l, d, l_sel, n_sel, w)
        self.shape = KernelShape(n_kv_groups, n_heads // n_kv_groups, d_k, d_v, self.geometry)
        self.rotary = RotaryEmbedding(d_k, rope_base, rope_scale)
        self.rope_compressed = resolve_rope_compressed(phi, rope_compressed)
        self.kernels = wanted(kernels)
        self.scale = d_k**-0.5
        self.probe: Probe | None = None

        n_branches = len(BRANCH_ORDER)
        self.w_q = nn.Linear(dim, n_heads * d_k, bias=False)
        self.w_k = nn.Linear(dim, n_kv_groups * n_branches * d_k, bias=False)
        self.w_v = nn.Linear(dim, n_kv_groups * n_branches * d_v, bias=False)
        self.phi_k = BlockCompressor(phi, l, d, n_kv_groups, d_k, phi_pos_emb)
        self.phi_v = BlockCompressor(phi, l, d, n_kv_groups, d_v, phi_pos_emb)
        self.gates = BranchGates(dim, n_kv_groups, self.shape.heads_per_group, gate, gate_per, gate_temperature)
        self.w_out = nn.Linear(n_heads * d_v, dim, bias=False)
        init_weights(self)

    def forward(
        self,
        x_BSD: Tensor,
        *,
        cache: LayerCache | None = None,
        new_lens_B: Tensor | None = None,
        cu_doc_lens: Tensor | Sequence[int] | None = None,
        where: Positions | None = None,
    ) -> Tensor:
        """Attend; the result has the input's shape.

        `cache`: the tokens before these; it takes in the new ones, without gradients. `new_lens_B`: with a cache, how
        many tokens of each row are real. `cu_doc_lens`: cumulative lengths of the documents packed into the batch, rows
        end to end; they do not see each other. `where`: positions from `locate`, if the caller already has them.
        """
        if cache is not None:
            self._check_cache(x_BSD, cache, cu_doc_lens)
            with torch.no_grad():
                if torch.compiler.is_compiling():  # a graph cannot look into a lock
                    return self._forward(x_BSD, where or self.locate(x_BSD, cache=cache), cache, new_lens_B)
                with cache.exclusive:
                    return self._forward(x_BSD, where or self.locate(x_BSD, cache=cache), cache, new_lens_B)
        if new_lens_B is not None:
            raise ConfigError(
                "new_lens_B was given without a cache: it says how many new tokens a cache takes in for each row. Pass "
                "cache too, or cu_doc_lens for documents packed into a batch."
            )
        where = where or self.locate(x_BSD, cu_doc_lens=cu_doc_lens)
        if cu_doc_lens is not None:
            return self._forward(x_BSD.flatten(0, 1)[None], where, None, None).view(x_BSD.shape)
        return self._forward(x_BSD, where, None, None)

    def locate(
        self,
        x_BSD: Tensor,
        *,
        cache: LayerCache | None = None,
        cu_doc_lens: Tensor | Sequence[int] | None = None,
    ) -> Positions:
        """The positions of these tokens."""
        if x_BSD.dim() != 3:
            raise ConfigError(f"the input has shape {list(x_BSD.shape)}: it must be [batch, tokens, dim].")
        batch, length = x_BSD.shape[:2]
        if cache is not None:
            self._check_cache(x_BSD, cache, cu_doc_lens)
            return Positions(None, self.rotary.tables(cache.positions(length)))
        if cu_doc_lens is not None:
            cu_doc_lens = torch.as_tensor(cu_doc_lens, device=x_BSD.device)
            layout = packed_layout(cu_doc_lens, batch * length, self.geometry)
        else:
            layout = plain_layout(batch, length, self.geometry, x_BSD.device)
        return Positions(layout, self.rotary.tables(layout.pos_BS))

    def new_cache(self, batch: int, max_len: int) -> LayerCache:
        """An empty cache for `batch` rows of at most `max_len` tokens, on the weights' device and in their dtype."""
        weight = self.w_k.weight
        return LayerCache(
            self.geometry, batch=batch, max_len=max_len, n_groups=self.n_kv_groups, d_k=self.d_k, d_v=self.d_v,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip

    def plan(self, device: torch.device, dtype: torch.dtype) -> KernelPlan:
        """The backend that computes each branch there, and why."""
        return plan(self.kernels, device, dtype, self.shape)

    def flops(self, seq_len: int) -> dict[str, float]:
        """Forward FLOPs per token by part, averaged over a sequence of seq_len tokens; multiply-adds count two."""
        g = self.geometry
        reads = {branch: total / seq_len for branch, total in g.total_reads(seq_len).items()}
        linear = (self.w_q, self.w_k, self.w_v, self.gates.proj, self.w_out)
        phi = self.phi_k.flops_per_block() + self.phi_v.flops_per_block()
        per_read = 2 * self.n_heads * (self.d_k + self.d_v)
        return {
            "projections": 2.0 * sum(m.weight.numel() for m in linear),
            "compression": phi * g.n_compressed(seq_len) / seq_len,
            "select": 2 * self.n_heads * self.d_k * reads["compressed"],
            **{branch: per_read * n for branch, n in reads.items()},
        }

    def _forward(self, x_BSD: Tensor, where: Positions, cache: LayerCache | None, new_lens_B: Tensor | None) -> Tensor:
        q_BSGRK, streams = self._project(x_BSD, where.tables)
        gates, decoder = self.gates(x_BSD), None
        if cache is None:
            keys = self._lay_out(streams, self._checked_layout(where.layout, x_BSD))
        else:
            if where.layout is not None:
                raise ConfigError(
                    "`where` has a layout and a cache is given: the cache knows. Pass locate(x, cache=cache)."
                )
            q_BSGRK = q_BSGRK if q_BSGRK.dtype == cache.dtype else self._in_dtype_of(cache, q_BSGRK, x_BSD)
            decoder = self._decoder(cache, q_BSGRK)
            keys = cache.append_held(streams, new_lens_B, self._compress, decoder)
        mixed_BSGRV, idx_BSGN = decoder.attend(q_BSGRK, gates) if decoder else self._attend(q_BSGRK, gates, *keys)
        if self.probe is not None:
            reads_BSG = self._count_reads(idx_BSGN, *keys)
            self.probe.record(gates, idx_BSGN, keys[1].pos_BS, reads_BSG, self.geometry)
        return self.w_out(mixed_BSGRV.flatten(2))

    def _project(self, x_BSD: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, BranchStreams]:
        heads = (self.n_kv_groups, -1)
        if tables[0].shape != (*x_BSD.shape[:2], self.d_k // 2):
            raise ConfigError(
                f"`where` rotates {list(tables[0].shape)} and the input needs {[*x_BSD.shape[:2], self.d_k // 2]}: "
                f"these are the positions of other tokens. Pass what this module's locate gives for this input."
            )
        q_BSGRK = rotate(self.w_q(x_BSD).unflatten(-1, (*heads, self.d_k)), tables)
        k_cmp, k_sel, k_win = self.w_k(x_BSD).unflatten(-1, (*heads, self.d_k)).unbind(-2)
        v_cmp, v_sel, v_win = self.w_v(x_BSD).unflatten(-1, (*heads, self.d_v)).unbind(-2)
        if self.rope_compressed == "before":
            k_cmp = rotate(k_cmp, tables)
        return q_BSGRK, BranchStreams(k_cmp, v_cmp, rotate(k_sel, tables), v_sel, rotate(k_win, tables), v_win)

    def _lay_out(self, new: BranchStreams, layout: DocumentLayout) -> tuple[BranchKeys, BranchKeys, BranchKeys]:
        pos, start, first, begin, block_pos = layout
        k_cmp, v_cmp = self._compress(new.k_cmp, new.v_cmp, begin, block_pos)
        return (
            BranchKeys(k_cmp, v_cmp, pos, first),
            BranchKeys(new.k_sel, new.v_sel, pos, start),
            BranchKeys(new.k_win, new.v_win, pos, start),
        )

    def _compress(self, k: Tensor, v: Tensor, begin_BC: Tensor, block_pos_BC: Tensor) -> tuple[Tensor, Tensor]:
        k_BCGK, v_BCGV = self.phi_k(k, begin_BC), self.phi_v(v, begin_BC)
        if self.rope_compressed == "after":
            last_token_BC = block_pos_BC + self.geometry.l - 1
            k_BCGK = rotate(k_BCGK, self.rotary.tables(last_token_BC))
        return k_BCGK, v_BCGV

    def _check_cache(self, x_BSD: Tensor, cache: LayerCache, cu_doc_lens: object = None) -> None:
        """Refuse a cache that was made for other sizes: what is kept there would be read with ours."""
        if cu_doc_lens is not None:
            raise ConfigError("a cache holds one document per row: pass either cache or cu_doc_lens, not both.")
        if x_BSD.shape[0] == cache.batch:
            if cache.geometry is self.geometry and x_BSD.is_cpu:  # of this very module; the rest is seen in its shapes
                return
            if (cache.geometry, cache.n_groups, cache.d_k, cache.d_v, cache.device) == (
                *(self.geometry, self.n_kv_groups, self.d_k, self.d_v),
                x_BSD.device,
            ):
                return
        raise ConfigError(
            f"the cache is for {cache.batch} rows on {cache.device}, {cache.n_groups} groups, keys of {cache.d_k}, "
            f"values of {cache.d_v}, {cache.geometry}; here are {x_BSD.shape[0]} rows on {x_BSD.device}, "
            f"{self.n_kv_groups} groups, {self.d_k}, {self.d_v}, {self.geometry}. Make it with this module's "
            f"new_cache({x_BSD.shape[0]}, …)."
        )

    def _in_dtype_of(self, cache: LayerCache, q_BSGRK: Tensor, x_BSD: Tensor) -> Tensor:
        if x_BSD.dtype != cache.dtype and not torch.is_autocast_enabled(x_BSD.device.type):
            raise ConfigError(
                f"the cache holds {cache.dtype} and the module computes {x_BSD.dtype}: its output would be of the "
                f"wrong dtype. Make the cache with new_cache of the module in its present dtype."
            )
        return q_BSGRK.to(cache.dtype)

    def _checked_layout(self, layout: DocumentLayout | None, x_BSD: Tensor) -> DocumentLayout:
        if layout is not None:
            batch, length = x_BSD.shape[:2]
            per_token, per_block = (batch, length), (batch, self.geometry.n_compressed(length))
            if [part.shape for part in layout] == [per_token] * 3 + [per_block] * 2:
                return layout
        raise ConfigError(
            f"`where` was made for other tokens, a cache or another geometry than this input of shape "
            f"{list(x_BSD.shape)}. Pass what this module's locate gives for this input."
        )

    def _decoder(self, cache: LayerCache, q_BSGRK: Tensor) -> TokenDecoder | None:
        """A backend's own way for one new token per row; a graph cannot look into it."""
        if q_BSGRK.shape[1] > 1 or torch.compiler.is_compiling():
            return None
        prepared_for, decoder = cache.prepared
        if prepared_for is not self:
            decoder = self._prepare_decoder(cache)
            cache.prepared = self, decoder
        return decoder

    def _prepare_decoder(self, cache: LayerCache) -> TokenDecoder | None:
        make = self.plan(cache.device, cache.dtype).decoder
        if make is None:
            return None
        means = self.phi_k.phi == "avg" and self.rope_compressed == "before"
        return cache.decoder(make, heads_per_group=self.shape.heads_per_group, means=means, geometry=self.geometry,
                             scale=self.scale)  # fmt: skip

    def _attend(
        self, q_BSGRK: Tensor, gates_BSGR3: Tensor, compressed: BranchKeys, selected: BranchKeys, window: BranchKeys
    ) -> tuple[Tensor, Tensor]:
        """The three branches mixed by the gates, and the chosen blocks."""
        g, scale = self.geometry, self.scale
        run = self.plan(q_BSGRK.device, q_BSGRK.dtype)
        compressed_out, idx_BSGN = run.compressed_and_select(q_BSGRK, *compressed, geometry=g, scale=scale)
        k, v, pos, start = selected
        selected_out = run.functions.selected(q_BSGRK, k, v, idx_BSGN, pos, start, geometry=g, scale=scale)
        sliding_out = run.functions.sliding(q_BSGRK, *window, geometry=g, scale=scale)
        assert isinstance(selected_out, Tensor)
        assert isinstance(sliding_out, Tensor)
        return run.mix(gates_BSGR3, compressed_out, selected_out, sliding_out), idx_BSGN

    def _count_reads(
        self, idx_BSGN: Tensor, compressed: BranchKeys, selected: BranchKeys, window: BranchKeys
    ) -> Tensor:
        g = self.geometry
        shared_BS = sliding_reads(window.pos_BS, window.start_BS, window.k.shape[1], g.w)
        shared_BS = shared_BS + compressed_reads(
            compressed.pos_BS, compressed.start_BS, compressed.k.shape[1], g.l, g.d
        )
        return shared_BS[..., None] + selected_reads(idx_BSGN, selected.pos_BS, g.l_sel)


def _check_heads(n_heads: int, n_kv_groups: int, d_k: int) -> None:
    if min(n_heads, n_kv_groups, d_k) < 1:
        raise ConfigError(
            f"model.n_heads is {n_heads}, model.n_kv_groups {n_kv_groups}, model.d_k {d_k}: each must be 1 or more."
        )
    if n_heads % n_kv_groups:
        raise ConfigError(
            f"model.n_heads is {n_heads} and model.n_kv_groups is {n_kv_groups}: every group has the same number of "
            f"heads. Set n_heads to a multiple of {n_kv_groups}."
        )
    if d_k % 2:
        raise ConfigError(f"model.d_k is {d_k}: rotary embedding turns pairs of it. Set an even number.")


def _check_rope(phi: str, rope_compressed: str) -> None:
    if rope_compressed not in ROPE_COMPRESSED:
        known = ", ".join(ROPE_COMPRESSED)
        raise ConfigError(f"nsa.rope_compressed is {rope_compressed!r}: there is no such choice. Use one of: {known}.")
    if broken := broken_rope_rule(phi, rope_compressed):
        raise ConfigError(broken)
