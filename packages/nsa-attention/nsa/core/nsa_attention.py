"""Native Sparse Attention (NSA) as a module: projections, QK-norm, RoPE, KV cache and gates around the functional core.

B batch · S tokens · D model dim · G kv groups · R heads per group · K key dim · V value dim
C compressed blocks · N chosen blocks
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from nsa.core.attention_config import AttentionConfig, attention_config
from nsa.core.block_mass_loss import block_mass_loss
from nsa.core.branches import (
    BRANCH_ORDER,
    BranchesOutput,
    BranchGates,
    BranchKeys,
    BranchStreams,
    CompressedOutput,
    attend_branches,
)
from nsa.core.coarse_attention import attend_coarse
from nsa.core.compression import BlockCompressor
from nsa.core.document_layout import DocumentLayout
from nsa.core.init import init_weights
from nsa.core.kv_cache import LayerCache
from nsa.core.positions import PositionOptions, Positions, QuerySample, locate
from nsa.core.probe import Probe, count_reads
from nsa.core.rope import RotaryEmbedding, Tables, rotate
from nsa.core.selector_loss import LossLabels, attach_loss, selector_loss, with_sampled_queries
from nsa.errors import ConfigError
from nsa.kernels.interface import TokenDecoder
from nsa.kernels.reference import ScoreOptions
from nsa.kernels.registry import KernelPlan, KernelShape, RequestedKernels, backend_request, plan
from nsa.options import AttentionKind

_THREE_BRANCHES = tuple[BranchKeys, BranchKeys, BranchKeys]


class NSAAttention(nn.Module):
    """Causal self-attention through three branches mixed by learned gates (arXiv 2502.11089).

    One forward serves training, prefill and decode; a cache holds the tokens that came before. The attention between
    the projections is `nsa.core.branches`.

    config: an `AttentionConfig`; or sizes by position and options by name, which `help(AttentionConfig)` lists, as in
        `NSAAttention(dim=768, n_heads=12, n_kv_groups=2, d_k=64, d_v=64, phi="mlp")`.
    kernels: a backend's name, or a name per branch; `auto` takes the one of NSA_KERNEL, else the fastest that can run.

    Weights: `w_k` and `w_v` hold the keys and values of all branches, ordered (group, branch, width) so that they shard
    by group. With shared keys each branch rotates the key as it would its own. The selector loss is added by a backward
    pass in training mode, without a cache and without padding.

    `nsa.core.layer_kinds` has the layers with fewer branches; what they lack is in `branches`.
    """

    kind: ClassVar[AttentionKind] = "nsa"
    branches: ClassVar[tuple[str, ...]] = BRANCH_ORDER
    cache_type: ClassVar[type[LayerCache]] = LayerCache
    gates: BranchGates | None

    def __init__(
        self,
        config: AttentionConfig | int | None = None,
        *sizes: int,
        kernels: RequestedKernels = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        self.config = c = self._own_config(attention_config(config, *sizes, **options))
        self.dim, self.n_heads, self.n_kv_groups, self.d_k, self.d_v = c.dim, c.n_heads, c.n_kv_groups, c.d_k, c.d_v
        self.geometry, self.coarse, self.kv = c.geometry, c.coarse.level, c.kv
        self.shape = KernelShape(c.n_kv_groups, c.n_heads // c.n_kv_groups, c.d_k, c.d_v, c.geometry)
        self.rotary = RotaryEmbedding(c.d_k, c.rope)
        self.rope_compressed = c.compression.rotated
        self.kernels = backend_request(kernels)
        self.scale = c.d_k**-0.5
        self.probe: Probe | None = None
        self.selector_loss, self.selector_loss_share = c.selector.loss, c.selector.loss_share
        self.selector_blocks = c.selector.blocks
        self.selector_weight, self.selector_step = c.selector.loss, 0  # a model of several layers divides the weight

        key_streams, value_streams = (min(n, len(self.branches)) for n in c.kv_streams)
        self.w_q = nn.Linear(c.dim, c.n_heads * c.d_k, bias=c.bias)
        self.w_k = nn.Linear(c.dim, c.n_kv_groups * key_streams * c.d_k, bias=c.bias)
        self.w_v = nn.Linear(c.dim, c.n_kv_groups * value_streams * c.d_v, bias=c.bias)
        self.qk_norm_per, norm = c.qk_norm.per, c.qk_norm
        normed = (c.n_heads * c.d_k, c.n_kv_groups * c.d_k) if norm.per == "layer" else (c.d_k, c.d_k)
        self.q_norm, self.k_norm = (nn.RMSNorm(n, eps=norm.eps) if norm.used else None for n in normed)
        self.gates = None
        if self.selects:
            self.phi_k = BlockCompressor.of_config(c, c.d_k)
        if "compressed" in self.branches:
            self.phi_v = BlockCompressor.of_config(c, c.d_v)
            self.gates = BranchGates(c.dim, c.n_kv_groups, self.shape.heads_per_group, c.gate, len(self.branches))
        self.w_out = nn.Linear(c.n_heads * c.d_v, c.dim, bias=c.out_bias)
        init_weights(self, std=c.init_std)

    @classmethod
    def _own_config(cls, config: AttentionConfig) -> AttentionConfig:
        """The config of a layer of this kind."""
        return config

    @property
    def selects(self) -> bool:
        """Whether the layer chooses blocks, and so has compressed keys."""
        return "selected" in self.branches

    def extra_repr(self) -> str:
        g, heads = self.geometry, f"dim={self.dim}, n_heads={self.n_heads}, n_kv_groups={self.n_kv_groups}"
        blocks = f"l={g.l}, d={g.d}, l_sel={g.l_sel}, n_sel={g.n_sel}, w={g.w}"
        rope = f"rope_compressed={self.rope_compressed!r}, rope_type={self.rotary.scaling['rope_type']!r}"
        phi = f"phi={self.phi_k.phi!r}, kv={self.kv!r}" if self.selects else f"kind={self.kind!r}"
        return f"{heads}, d_k={self.d_k}, d_v={self.d_v}, {blocks}, {phi}, {rope}"

    def forward(
        self,
        x_BSD: Tensor,
        *,
        cache: LayerCache | None = None,
        new_lens_B: Tensor | None = None,
        cu_doc_lens: Tensor | Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        position_embeddings: Sequence[Tensor] | None = None,
        where: Positions | None = None,
    ) -> Tensor:
        """Attend; the result has the input's shape.

        cache: the tokens before these; the new ones are appended, without gradients.
        new_lens_B: with a cache, how many tokens of each row are real; they come first.
        cu_doc_lens: cumulative lengths of the documents packed into the batch, rows end to end; they do not see each
            other.
        attention_mask: padding mask of 0 and 1, [batch, tokens]; with a cache it may also cover earlier tokens. Output
            at padding is zero. Other masks are refused.
        position_ids: [batch, tokens], positions for RoPE if they are not 0, 1, 2, … (with a cache: those that follow).
        position_embeddings: (cos, sin) instead of the module's own RoPE.
        where: positions from `locate`, if the caller already has them, in place of the last three.
        """
        given: PositionOptions = {}
        if attention_mask is not None or position_ids is not None or position_embeddings is not None:
            given = dict(
                attention_mask=attention_mask, position_ids=position_ids, position_embeddings=position_embeddings
            )
            if where is not None:
                raise ConfigError(
                    "`where` was given together with attention_mask, position_ids or position_embeddings, which it "
                    "already contains. Pass either."
                )
        if cache is not None:
            self._check_cache(x_BSD, cache, cu_doc_lens)
            # torch.compile cannot trace a lock.
            with torch.no_grad(), nullcontext() if torch.compiler.is_compiling() else cache.exclusive:
                where = where or self.locate(x_BSD, cache=cache, **given)
                return self._forward(x_BSD, where, cache, new_lens_B)
        if new_lens_B is not None:
            raise ConfigError(
                "new_lens_B was given without a cache: it is how many tokens the cache appends to each row. Pass cache "
                "too, attention_mask for a padded batch, or cu_doc_lens for documents packed into a batch."
            )
        where = where or self.locate(x_BSD, cu_doc_lens=cu_doc_lens, **given)
        if cu_doc_lens is not None:
            return self._forward(x_BSD.flatten(0, 1)[None], where, None, None).view(x_BSD.shape)
        return self._forward(x_BSD, where, None, None)

    def locate(
        self,
        x_BSD: Tensor,
        *,
        cache: LayerCache | None = None,
        cu_doc_lens: Tensor | Sequence[int] | None = None,
        labels: LossLabels | None = None,
        **given: Unpack[PositionOptions],
    ) -> Positions:
        """The positions of these tokens. Arguments as for `forward`; labels: of the model's loss, over which the
        selector loss is averaged in training."""
        where = locate(x_BSD, self.rotary, self.geometry, self.rope_compressed, cache, cu_doc_lens, **given)
        return with_sampled_queries(where, self, x_BSD, labels)

    def new_cache(self, batch: int, max_len: int, rewind: int = 0, pages: int | None = None) -> LayerCache:
        """An empty cache for `batch` rows of at most `max_len` tokens, on the weights' device and in their dtype.

        rewind: how many tokens `cache.crop` can remove at any time, e.g. rejected drafts of speculative decoding.
        pages: of l_sel tokens, which the rows take as they grow and return when they end; default enough for all.
        """
        weight = self._loaded_weight()
        return self.cache_type(
            self.geometry, batch=batch, max_len=max_len, n_groups=self.n_kv_groups, d_k=self.d_k, d_v=self.d_v,
            device=weight.device, dtype=weight.dtype, rewind=rewind, shared=self._shared_streams,
            pages=pages,
        )  # fmt: skip

    def _loaded_weight(self) -> Tensor:
        """The weights of the keys, whose device and dtype a cache takes; raises if they are not here as numbers."""
        weight = getattr(self.w_k, "weight", None)
        if not isinstance(weight, Tensor):
            mode = f"the weights of the keys are packed in a {type(self.w_k).__module__}.{type(self.w_k).__qualname__}"
        elif not weight.is_floating_point() or weight.element_size() < 2:
            mode = f"the weights of the keys are quantised ({weight.dtype}, as by bitsandbytes)"
        elif weight.is_meta and hasattr(self.w_k, "_hf_hook"):
            mode = "the weights of the keys are offloaded (device_map or offloading of accelerate)"
        else:
            return weight
        raise ConfigError(
            f"{mode}: a cache of keys and values takes device and dtype of these weights, and cannot be made in this "
            f"loading mode. Load the model unquantised and whole on one device (dtype=torch.bfloat16 halves it), or "
            f"run it without a cache (use_cache=False)."
        )

    @property
    def _shared_streams(self) -> tuple[bool, bool]:
        """Whether the window's and the compressed branch's raw keys and values are those of the selected branch."""
        return self.kv == "shared", self.kv == "shared" and self.rope_compressed == "before"

    def fill_cache(self, cache: LayerCache, new: BranchStreams) -> None:
        """Append tokens to a cache without attending to anything."""
        with torch.no_grad():
            cache.append(new, None, self.compress)

    def plan(self, device: torch.device, dtype: torch.dtype) -> KernelPlan:
        """The backend that computes each branch there, and why."""
        return plan(self.kernels, device, dtype, self.shape)

    def flops(self, seq_len: int) -> dict[str, float]:
        """Forward FLOPs per token by part, averaged over a sequence of seq_len tokens; multiply-adds count two."""
        g, selectable = self.geometry, self._selectable(seq_len)
        totals = {**g.total_reads(selectable), "sliding": g.total_reads(seq_len)["sliding"]}
        reads = {branch: total / seq_len for branch, total in totals.items()}
        scored = reads["compressed"]
        if self.coarse is not None:
            in_two = {part: total / seq_len for part, total in self.coarse.total_reads(g, selectable).items()}
            reads["compressed"], scored = in_two["compressed"], sum(in_two.values())
        linear = [module for module in self.modules() if isinstance(module, nn.Linear)]
        phi = sum(module.flops_per_block() for module in self.children() if isinstance(module, BlockCompressor))
        per_read = 2 * self.n_heads * (self.d_k + self.d_v)
        return {
            "projections": 2.0 * sum(m.weight.numel() for m in linear),
            "compression": phi * g.n_compressed(seq_len) / seq_len,
            "select": 2 * self.n_heads * self.d_k * scored,
            **{branch: per_read * n if branch in self.branches else 0.0 for branch, n in reads.items()},
        }

    def _selectable(self, n_tokens: int) -> int:
        """Tokens among which the last of n_tokens tokens chooses its blocks."""
        return n_tokens

    def _visible(self, keys: _THREE_BRANCHES) -> _THREE_BRANCHES:
        """What the branches attend over, with the positions up to which each sees it; here the query's own."""
        return keys

    def attend_cached(
        self,
        q_BSGRK: Tensor,
        new: BranchStreams,
        gates: Tensor | None,
        cache: LayerCache,
        new_lens_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, _THREE_BRANCHES]:
        """A cached forward between its projections, for a caller that holds `cache.exclusive`: append the new tokens,
        attend. Returns [B, S, G, R, V], the chosen blocks, and what the branches attended over."""
        decoder = self._decoder(cache, q_BSGRK)
        if decoder is None:
            self.plan(q_BSGRK.device, q_BSGRK.dtype)  # a backend that cannot run is refused before anything is appended
        keys = self._visible(cache.append_held(new, new_lens_B, self.compress, decoder))
        if decoder is not None:
            return *decoder.attend(q_BSGRK, gates), keys
        made = self.attend(q_BSGRK, gates, *keys)
        return made.out, made.blocks, keys

    def _forward(self, x_BSD: Tensor, where: Positions, cache: LayerCache | None, new_lens_B: Tensor | None) -> Tensor:
        padding = where.padding
        if padding is not None:
            x_BSD = padding.to_front(x_BSD.masked_fill(~padding.real_BS[..., None], 0))  # whatever padding holds
            new_lens_B = padding.lengths_for(cache, new_lens_B)
        q_BSGRK, streams = self.project(x_BSD, where.tables)
        gates, mean = None if self.gates is None else self.gates(x_BSD), None
        if cache is None:
            layout = where.layout_for(x_BSD, self.geometry)
            keys = self._visible(self._lay_out(streams, layout, where))
            made = self.attend(q_BSGRK, gates, *keys)
            mixed_BSGRV, idx_BSGN = made.out, made.blocks
            if where.sample is not None and self.selects:
                loss, mean = self._selector_loss(where.sample, x_BSD, q_BSGRK, streams, made, keys, where)
                mixed_BSGRV = attach_loss(mixed_BSGRV, loss * self.selector_weight, where.sample.gradient)
        else:
            if where.layout is not None:
                raise ConfigError(
                    "`where` has a layout and a cache is given, which has its own. Pass locate(x, cache=cache)."
                )
            q_BSGRK = q_BSGRK if q_BSGRK.dtype == cache.dtype else self._in_dtype_of(cache, q_BSGRK, x_BSD)
            mixed_BSGRV, idx_BSGN, keys = self.attend_cached(q_BSGRK, streams, gates, cache, new_lens_B)
        if self.probe is not None:
            self._record(self.probe, gates, idx_BSGN, keys)
            if idx_BSGN is not None and q_BSGRK.shape[1] > 1:  # a decoder reads keys that are not at hand here
                own_BS = keys[2].pos_BS if "sliding" in self.branches else None
                self.probe.record_selection(q_BSGRK, idx_BSGN, keys[1], self.geometry, self.scale, own_BS)
            if mean is not None:
                self.probe.figures["selector_loss"] = mean.detach()
        out_BSD = self.w_out(mixed_BSGRV.flatten(2))
        return out_BSD if padding is None else padding.back(out_BSD)

    def _record(self, probe: Probe, gates: Tensor | None, idx_BSGN: Tensor | None, keys: _THREE_BRANCHES) -> None:
        assert idx_BSGN is not None
        options = self.geometry, self.branches, self.coarse
        reads_BSG = count_reads(idx_BSGN, *keys, *options)
        kind = "" if self.gates is None else self.gates.kind
        pos_BS, own_BS = keys[1].pos_BS, keys[2].pos_BS
        probe.record(gates, idx_BSGN, pos_BS, reads_BSG, *options, window_pos_BS=own_BS, gate_kind=kind)

    def project(self, x_BSD: Tensor, tables: Tables) -> tuple[Tensor, BranchStreams]:
        heads = (self.n_kv_groups, -1)
        needed = (*x_BSD.shape[:2], self.rotary.rotary_dim // 2)
        if tables[0].shape != needed:
            raise ConfigError(
                f"`where` rotates {list(tables[0].shape)} and the input needs {list(needed)}: these are the positions "
                f"of other tokens or of a layer with other RoPE. Pass what this module's locate gives for this input."
            )
        q_BSGRK = self._normed_heads(self.w_q(x_BSD), self.q_norm)
        k_BSGbK = self._project_keys(x_BSD)
        v_BSGbV = self.w_v(x_BSD).unflatten(-1, (*heads, self.d_v))
        return rotate(q_BSGRK, tables), self._streams(k_BSGbK, v_BSGbV, tables)

    def _streams(self, k_BSGbK: Tensor, v_BSGbV: Tensor, tables: Tables) -> BranchStreams:
        """Keys and values by branch, rotated. A branch that the layer lacks repeats those of the one before it."""
        (k_cmp, *raw_keys), (v_cmp, *values) = k_BSGbK.unbind(-2), v_BSGbV.unbind(-2)
        rotated = [rotate(k, tables) for k in raw_keys or [k_cmp]]
        if self.rope_compressed == "before":
            k_cmp = rotate(k_cmp, tables) if raw_keys else rotated[0]
        values = values or [v_cmp]
        return BranchStreams(k_cmp, v_cmp, rotated[0], values[0], rotated[-1], values[-1])

    def _project_keys(self, x_BSD: Tensor) -> Tensor:
        """Not rotated yet; b: one per branch, or one for all."""
        return self._normed_heads(self.w_k(x_BSD), self.k_norm)

    def _normed_heads(self, x_BSH: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        """Of a projection, by group: [B, S, G, heads or branches, K]."""
        heads = (self.n_kv_groups, -1, self.d_k)
        if norm is None or self.qk_norm_per == "head":
            x_BSGHK = x_BSH.unflatten(-1, heads)
            return x_BSGHK if norm is None else _normed(norm, x_BSGHK)
        return _normed(norm, x_BSH).unflatten(-1, heads)

    def _lay_out(self, new: BranchStreams, layout: DocumentLayout, where: Positions) -> _THREE_BRANCHES:
        """What the branches attend over, of the tokens of a pass without a cache."""
        pos, start, first, begin, block_pos = layout
        k_cmp, v_cmp = self.compress(new.k_cmp, new.v_cmp, begin, block_pos, where.tables)
        return (
            BranchKeys(k_cmp, v_cmp, pos, first),
            BranchKeys(new.k_sel, new.v_sel, pos, start),
            BranchKeys(new.k_win, new.v_win, pos, start),
        )

    def compress(
        self, k: Tensor, v: Tensor, begin_BC: Tensor, block_pos_BC: Tensor, tables: Tables | None = None
    ) -> tuple[Tensor, Tensor]:
        """Entries of the blocks that begin at `begin` in k and v. A key rotated afterwards is rotated as its block's
        last token: as `tables` rotate that token, or by its position in the document."""
        return self._compress_keys(k, begin_BC, block_pos_BC, tables), self.compress_values(v, begin_BC)

    def compress_values(self, v: Tensor, begin_BC: Tensor) -> Tensor:
        return self.phi_v(v, begin_BC)

    def _compress_keys(self, k: Tensor, begin_BC: Tensor, block_pos_BC: Tensor, tables: Tables | None) -> Tensor:
        k_BCGK = self.phi_k(k, begin_BC)
        if self.rope_compressed == "after":
            if tables is None:
                last_BC, wide = block_pos_BC + self.geometry.l - 1, torch.promote_types(k.dtype, torch.float32)
                tables = self.rotary.tables(last_BC, wide)
            else:
                last_token_BC1 = (begin_BC + self.geometry.l - 1)[..., None]
                cos, sin = (x.gather(1, last_token_BC1.expand(-1, -1, x.shape[-1])) for x in tables)
                tables = cos, sin
            k_BCGK = rotate(k_BCGK, tables)
        return k_BCGK

    def _selector_loss(
        self, sample: QuerySample, x_BSD: Tensor, q_BSGRK: Tensor, streams: BranchStreams, made: BranchesOutput,
        keys: _THREE_BRANCHES, where: Positions,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The selector loss and its plain mean over queries. The gradient reaches `w_k`, its norm and φ through the
        compressed keys, which are made once more of detached hidden states, and nothing else. Where other branches read
        the same keys, it reaches φ alone: it would outweigh what attention itself asks of them."""
        if self.kv == "per_branch":
            k_BSGK = self._project_keys(x_BSD.detach()).select(-2, 0)
            k_BSGK = rotate(k_BSGK, where.tables) if self.rope_compressed == "before" else k_BSGK
        else:
            k_BSGK = streams.k_cmp.detach()
        k_BCGK = self._compressed_keys(k_BSGK, where)
        options: ScoreOptions = {"geometry": self.geometry, "scale": self.scale}
        if self.selector_blocks == "all":
            return block_mass_loss(sample, q_BSGRK, k_BCGK, *keys[:2], keys[2].pos_BS, **options)
        return selector_loss(sample, q_BSGRK, k_BCGK, made, *keys[:2], **options)

    def _compressed_keys(self, k_BSGK: Tensor, where: Positions) -> Tensor:
        """All compressed keys of the rows, of the raw keys of a pass without a cache."""
        assert where.layout is not None
        return self._compress_keys(k_BSGK, where.layout.begin_BC, where.layout.block_pos_BC, where.tables)

    def _check_cache(self, x_BSD: Tensor, cache: LayerCache, cu_doc_lens: object = None) -> None:
        """Refuse a cache that was made for other sizes: what is kept there would be read with ours."""
        if cu_doc_lens is not None:
            raise ConfigError("a cache holds one document per row: pass either cache or cu_doc_lens, not both.")
        if x_BSD.shape[0] == cache.batch:
            if cache.geometry is self.geometry and x_BSD.is_cpu:  # of this very module; the rest is seen in its shapes
                return
            if (type(cache), cache.geometry, cache.n_groups, cache.d_k, cache.d_v, cache.shared, cache.device) == (
                *(self.cache_type, self.geometry, self.n_kv_groups, self.d_k, self.d_v, self._shared_streams),
                x_BSD.device,
            ):
                return
        raise ConfigError(
            f"the cache is for {cache.batch} rows on {cache.device}, {cache.n_groups} groups, keys of {cache.d_k}, "
            f"values of {cache.d_v}, shared streams {cache.shared}, {cache.geometry}; the input has {x_BSD.shape[0]} "
            f"rows on {x_BSD.device}, and the module {self.n_kv_groups} groups, {self.d_k}, {self.d_v}, "
            f"{self._shared_streams}, {self.geometry}. Make it with this module's new_cache({x_BSD.shape[0]}, …)."
        )

    def _in_dtype_of(self, cache: LayerCache, q_BSGRK: Tensor, x_BSD: Tensor) -> Tensor:
        if x_BSD.dtype != cache.dtype and not torch.is_autocast_enabled(x_BSD.device.type):
            raise ConfigError(
                f"the cache holds {cache.dtype} and the module computes {x_BSD.dtype}: its output would be of the "
                f"wrong dtype. Make the cache with new_cache of the module in its present dtype."
            )
        return q_BSGRK.to(cache.dtype)

    def _decoder(self, cache: LayerCache, q_BSGRK: Tensor) -> TokenDecoder | None:
        """A backend's fused step for one new token per row, of one level; torch.compile cannot trace it."""
        if q_BSGRK.shape[1] > 1 or self.coarse is not None or torch.compiler.is_compiling():
            return None
        prepared_for, decoder = cache.prepared
        if prepared_for is not self:
            make = self._decoder_maker(self.plan(cache.device, cache.dtype))
            means = self.phi_k.operator.is_mean and self.rope_compressed == "before"
            sizes = dict(heads_per_group=self.shape.heads_per_group, geometry=self.geometry, scale=self.scale)
            decoder = None if make is None else cache.decoder(make, means=means, **sizes)
            cache.prepared = self, decoder
        return decoder

    def _decoder_maker(self, run: KernelPlan) -> Callable[..., TokenDecoder] | None:
        return run.decoder

    def attend(
        self,
        q_BSGRK: Tensor,
        gates_BSGR3: Tensor | None,
        compressed: BranchKeys,
        selected: BranchKeys,
        window: BranchKeys,
    ) -> BranchesOutput:
        """The branches mixed by the gates, and the chosen blocks."""
        assert gates_BSGR3 is not None
        run = self.plan(q_BSGRK.device, q_BSGRK.dtype)
        keys = compressed, selected, window if "sliding" in self.branches else None
        options = dict(geometry=self.geometry, scale=self.scale)
        in_two_levels = None if self.coarse is None else self._attend_coarse
        return attend_branches(run, q_BSGRK, gates_BSGR3, *keys, **options, attend_compressed=in_two_levels)

    def _attend_coarse(self, q_BSGRK: Tensor, compressed: BranchKeys) -> CompressedOutput:
        assert self.coarse is not None
        run = plan(self.kernels, q_BSGRK.device, q_BSGRK.dtype, self.shape._replace(geometry=self.coarse.geometry))
        return attend_coarse(run, q_BSGRK, compressed, geometry=self.geometry, coarse=self.coarse, scale=self.scale)


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Under autocast the weight is wider than the input: torch has a fused kernel for one dtype only, and warns."""
    return norm(x.to(torch.promote_types(x.dtype, norm.weight.dtype))).to(x.dtype)
