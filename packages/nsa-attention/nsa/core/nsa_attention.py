"""Native Sparse Attention (NSA) as a module: projections, QK-norm, RoPE, KV cache and gates around a strategy.

B batch · S tokens · D model dim · G kv groups · R heads per group · K key dim · V value dim
C compressed blocks · N chosen blocks
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from nsa.core.attention_config import AttentionConfig, attention_config
from nsa.core.branches import AttendedKeys, BranchGates, BranchKeys, BranchStreams
from nsa.core.compression import BlockCompressor
from nsa.core.init import init_weights
from nsa.core.kv_cache import LayerCache
from nsa.core.layer_kinds import LAYER_KINDS
from nsa.core.positions import DocumentLayout, PositionOptions, Positions, locate
from nsa.core.probe import Probe
from nsa.core.rope import RotaryEmbedding, Tables, rotate
from nsa.core.selector_loss_sampling import LossLabels, attach_loss, with_sampled_queries
from nsa.errors import ConfigError
from nsa.geometry import CoarseLevel
from nsa.kernels.interface import KernelShape, NewToken, TokenDecoder, TokenForm
from nsa.kernels.registry import BackendRequest, KernelPlan, RequestedKernels, backend_request
from nsa.options import AttentionKind


class NSAAttention(nn.Module):
    """Causal self-attention through three branches mixed by learned gates (arXiv 2502.11089).

    One forward serves training, prefill and decode; a cache holds the tokens that came before. What is attended to
    between the projections is the `strategy`, one per kind.

    config: an `AttentionConfig`; or sizes by position and options by name, which `help(AttentionConfig)` lists, as in
        `NSAAttention(dim=768, n_heads=12, n_kv_groups=2, d_k=64, d_v=64, phi="mlp")`.
    kernels: a backend's name, or a name per branch; `auto` takes the one of NSA_KERNEL, else the fastest that can run.

    kind: `nsa`, or in place of the three branches `dense`, `window`, `global` (no window) or `merged` (one softmax over
        window and selected blocks); see `nsa.core.layer_kinds`.

    Weights: `w_k` and `w_v` hold the keys and values of all branches, ordered (group, branch, width) so that they shard
    by group. With shared keys each branch rotates the key as it would its own. The selector loss is added by a backward
    pass in training mode, without a cache and without padding.
    """

    gates: BranchGates | None
    phi_v: BlockCompressor | None

    def __init__(
        self,
        config: AttentionConfig | int | None = None,
        *sizes: int,
        kind: AttentionKind = "nsa",
        kernels: RequestedKernels = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        strategy, self.branches = LAYER_KINDS[kind]
        self.kind = kind
        self.config = c = strategy.own_config(attention_config(config, *sizes, **options))
        shape = KernelShape(c.n_kv_groups, c.n_heads // c.n_kv_groups, c.d_k, c.d_v, c.geometry)
        self.strategy = strategy(
            shape, backend_request(kernels), c.d_k**-0.5, self.branches, c.coarse.level, c.selector.blocks
        )
        self.dim, self.n_heads, self.n_kv_groups, self.d_k, self.d_v = c.dim, c.n_heads, c.n_kv_groups, c.d_k, c.d_v
        self.geometry, self.kv = c.geometry, c.kv
        self.rotary = RotaryEmbedding(c.d_k, c.rope)
        self.rope_compressed = c.compression.rotated
        self.probe: Probe | None = None
        self.selector_loss, self.selector_loss_share = c.selector.loss, c.selector.loss_share
        self.selector_weight, self.selector_step = c.selector.loss, 0  # a model of several layers divides the weight

        key_streams, value_streams = (min(n, len(self.branches)) for n in c.kv_streams)
        self.w_q = nn.Linear(c.dim, c.n_heads * c.d_k, bias=c.bias)
        self.w_k = nn.Linear(c.dim, c.n_kv_groups * key_streams * c.d_k, bias=c.bias)
        self.w_v = nn.Linear(c.dim, c.n_kv_groups * value_streams * c.d_v, bias=c.bias)
        self.qk_norm_per, norm = c.qk_norm.per, c.qk_norm
        normed = (c.n_heads * c.d_k, c.n_kv_groups * c.d_k) if norm.per == "layer" else (c.d_k, c.d_k)
        self.q_norm, self.k_norm = (nn.RMSNorm(n, eps=norm.eps) if norm.used else None for n in normed)
        self.gates = self.phi_v = None
        if self.selects:
            self.phi_k = BlockCompressor.of_config(c, c.d_k)
        if "compressed" in self.branches:
            self.phi_v = BlockCompressor.of_config(c, c.d_v)
            self.gates = BranchGates(c.dim, c.n_kv_groups, shape.heads_per_group, c.gate, len(self.branches))
        self.w_out = nn.Linear(c.n_heads * c.d_v, c.dim, bias=c.out_bias)
        self._norm_eps, phi, gates = norm.eps, c.compression, self.gates
        self._token_form = TokenForm(
            key_streams, value_streams, phi.phi if phi.operator.sums else None, phi.rotated == "after",
            *(None, 0, 1.0) if gates is None else (gates.kind, gates.n_branches, gates.temperature),
        )  # fmt: skip
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values in place, as the constructor does; also of sharded parameters (FSDP2), for a layer made
        on the meta device and then given memory by `to_empty`. Call it on the layer or the model, not on every part:
        linear layers are torch's, whose own method draws other values."""
        init_weights(self, std=self.config.init_std)

    @property
    def attention_layer(self) -> Self:
        """The layer itself, for `nsa.core.probe.attention_layers`."""
        return self

    @property
    def selects(self) -> bool:
        """Whether the layer chooses blocks, and so has compressed keys."""
        return self.strategy.selects

    @property
    def kernels(self) -> BackendRequest:
        return self.strategy.kernels

    @kernels.setter
    def kernels(self, kernels: BackendRequest) -> None:
        self.strategy.kernels = kernels

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.strategy.options["scale"]

    @property
    def coarse(self) -> CoarseLevel | None:
        return self.strategy.coarse

    @property
    def _shared_streams(self) -> tuple[bool, bool]:
        return self.strategy.shared_streams(self.config)

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
        places: PositionOptions = {}
        if attention_mask is not None or position_ids is not None or position_embeddings is not None:
            places = dict(
                attention_mask=attention_mask, position_ids=position_ids, position_embeddings=position_embeddings
            )
        self._check_arguments(x_BSD, cache, new_lens_B, cu_doc_lens, places, where)
        if cache is not None:
            # torch.compile cannot trace a lock.
            with torch.no_grad(), nullcontext() if torch.compiler.is_compiling() else cache.exclusive:
                where = where or self.locate(x_BSD, cache=cache, **places)
                whole = new_lens_B is None and where.padding is None
                if whole and (decoder := self._stepping_decoder(x_BSD, cache)) is not None:
                    return self.w_out(self._step(x_BSD, cache, where, decoder).flatten(2))
                x_BSD, q_BSGRK, streams, gates, new_lens_B = self._project_rows(x_BSD, where, cache, new_lens_B)
                attend, keys = self.append(q_BSGRK, streams, cache, new_lens_B)
                mixed_BSGRV, blocks = attend(q_BSGRK, gates)[:2]
                if self.probe is not None:
                    self._record(self.probe, q_BSGRK, gates, blocks, keys, keys_at_hand=q_BSGRK.shape[1] > 1)
                return self._project_back(mixed_BSGRV, where)
        where = where or self.locate(x_BSD, cu_doc_lens=cu_doc_lens, **places)
        rows_BSD = x_BSD if cu_doc_lens is None else x_BSD.flatten(0, 1)[None]
        rows_BSD, q_BSGRK, streams, gates, _ = self._project_rows(rows_BSD, where)
        layout = where.layout_for(rows_BSD, self.geometry)
        keys = self.strategy.visible(self._lay_out(streams, layout, where))
        run = self.plan(q_BSGRK.device, q_BSGRK.dtype)
        if where.exchange is not None:
            run = where.exchange.plan(self, run)
        output = self.strategy.attend(run, q_BSGRK, gates, keys)
        mixed_BSGRV, mean = output.out, None
        if where.sample is not None and self.selects:
            k_BCGK = self._keys_of_selector(rows_BSD, streams, where)
            loss, mean = self.strategy.selector_loss(run, where.sample, q_BSGRK, k_BCGK, output, keys)
            mixed_BSGRV = attach_loss(mixed_BSGRV, loss * self.selector_weight, where.sample.gradient)
        if self.probe is not None:
            self._record(self.probe, q_BSGRK, gates, output.blocks, keys, selector_loss=mean)
        out_BSD = self._project_back(mixed_BSGRV, where)
        return out_BSD if cu_doc_lens is None else out_BSD.view(x_BSD.shape)

    def _check_arguments(
        self, x_BSD: Tensor, cache: LayerCache | None, new_lens_B: Tensor | None, cu_doc_lens: object, places: object,
        where: Positions | None,
    ) -> None:  # fmt: skip
        """Refuse arguments of `forward` that contradict each other."""
        if places and where is not None:
            raise ConfigError(
                "`where` was given together with attention_mask, position_ids or position_embeddings, which it "
                "already contains. Pass either."
            )
        if cache is not None:
            self._check_cache(x_BSD, cache, cu_doc_lens)
        elif new_lens_B is not None:
            raise ConfigError(
                "new_lens_B was given without a cache: it is how many tokens the cache appends to each row. Pass cache "
                "too, attention_mask for a padded batch, or cu_doc_lens for documents packed into a batch."
            )

    def _project_rows(
        self, x_BSD: Tensor, where: Positions, cache: LayerCache | None = None, new_lens_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor, BranchStreams, Tensor | None, Tensor | None]:
        """The input, its queries, keys and values, its gates, and with a cache how many tokens of each row are real;
        real tokens first in rows that are padded."""
        padding = where.padding
        if padding is not None:
            x_BSD = padding.to_front(x_BSD.masked_fill(~padding.real_BS[..., None], 0))  # whatever padding holds
            new_lens_B = padding.lengths_for(cache, new_lens_B)
        q_BSGRK, streams = self.project(x_BSD, where.tables)
        if cache is not None:
            self._require_cached(where)
            q_BSGRK = q_BSGRK if q_BSGRK.dtype == cache.dtype else self._in_dtype_of(cache, q_BSGRK, x_BSD)
        return x_BSD, q_BSGRK, streams, None if self.gates is None else self.gates(x_BSD), new_lens_B

    def _require_cached(self, where: Positions) -> None:
        if where.layout is not None:
            raise ConfigError(
                "`where` has a layout and a cache is given, which has its own. Pass locate(x, cache=cache)."
            )

    def _project_back(self, mixed_BSGRV: Tensor, where: Positions) -> Tensor:
        out_BSD = self.w_out(mixed_BSGRV.flatten(2))
        return out_BSD if where.padding is None else where.padding.back(out_BSD)

    def locate(
        self,
        x_BSD: Tensor,
        *,
        cache: LayerCache | None = None,
        cu_doc_lens: Tensor | Sequence[int] | None = None,
        labels: LossLabels | None = None,
        **places: Unpack[PositionOptions],
    ) -> Positions:
        """The positions of these tokens. Arguments as for `forward`; labels: of the model's loss, over which the
        selector loss is averaged in training."""
        where = locate(x_BSD, self.rotary, self.geometry, self.rope_compressed, cache, cu_doc_lens, **places)
        return with_sampled_queries(where, self, x_BSD, labels)

    def new_cache(
        self, batch: int, max_len: int, rewind: int = 0, pages: int | None = None, like: Tensor | None = None
    ) -> LayerCache:
        """An empty cache for `batch` rows of at most `max_len` tokens.

        rewind: how many tokens `cache.crop` can remove at any time, e.g. rejected drafts of speculative decoding.
        pages: of l_sel tokens, which the rows take as they grow and return when they end; default enough for all.
        like: hidden states, whose dtype it takes, and whose device if the weights are elsewhere (offloaded) or packed;
            default device and dtype of the weights, which must be neither quantised nor offloaded.
        """
        device, dtype = self._cache_place(like)
        return self.strategy.cache_type(
            self.geometry, batch=batch, max_len=max_len, n_groups=self.n_kv_groups, d_k=self.d_k, d_v=self.d_v,
            device=device, dtype=dtype, rewind=rewind, shared=self._shared_streams, pages=pages,
        )  # fmt: skip

    def _cache_place(self, like: Tensor | None) -> tuple[torch.device, torch.dtype]:
        """Device and dtype of the keys: quantised weights have another dtype, offloaded ones another device."""
        weight: Tensor | None = getattr(self.w_k, "weight", None)
        if not isinstance(weight, Tensor):  # a method of a quantised layer
            weight = None
        if like is None:
            offloaded = weight is not None and weight.is_meta and hasattr(self.w_k, "_hf_hook")
            if weight is None or offloaded or not weight.is_floating_point() or weight.element_size() < 2:
                raise ConfigError(
                    f"the weights of the keys are quantised or offloaded ({type(self.w_k).__qualname__}): they do not "
                    f"say device and dtype of a cache. Pass like=x with hidden states x."
                )
            like = weight
        return (like if weight is None or weight.is_meta else weight).device, like.dtype

    def plan(self, device: torch.device, dtype: torch.dtype) -> KernelPlan:
        """The backend that computes each branch there, and why."""
        return self.strategy.plan(device, dtype)

    def flops(self, seq_len: int) -> dict[str, float]:
        """Forward FLOPs per token by part, averaged over a sequence of seq_len tokens; multiply-adds count two."""
        linear = [module for module in self.modules() if isinstance(module, nn.Linear)]
        phi = sum(module.flops_per_block() for module in self.children() if isinstance(module, BlockCompressor))
        return {
            "projections": 2.0 * sum(m.weight.numel() for m in linear),
            "compression": phi * self.geometry.n_compressed(seq_len) / seq_len,
            **self.strategy.flops(seq_len),
        }

    def append(
        self, q_BSGRK: Tensor, new: BranchStreams, cache: LayerCache, new_lens_B: Tensor | None = None
    ) -> tuple[Callable[[Tensor, Tensor | None], tuple[Any, ...]], AttendedKeys]:
        """Append projected tokens to a cache whose `exclusive` the caller holds. Returns a function of queries and
        gates, which attends to these tokens and those before and gives [B, S, G, R, V] and the chosen blocks; and what
        the branches attend over."""
        if (decoder := self._decoder(cache, q_BSGRK)) is not None:
            return decoder.attend, self.strategy.visible(cache.append_held(new, new_lens_B, self.compress, decoder))
        run = self.plan(q_BSGRK.device, q_BSGRK.dtype)  # refused before anything is appended, if it cannot run
        keys = self.strategy.visible(cache.append_held(new, new_lens_B, self.compress))
        return partial(self.strategy.attend, run, keys=keys), keys

    def _record(
        self, probe: Probe, q_BSGRK: Tensor, gates: Tensor | None, blocks: Tensor | None, keys: AttendedKeys,
        *, keys_at_hand: bool = True, selector_loss: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Give the probe what this pass read. keys_at_hand: a decoder reads keys in their pages."""
        self.strategy.record(probe, gates, "" if self.gates is None else self.gates.kind, blocks, keys)
        if blocks is not None and keys_at_hand:
            window = self.geometry.w if "sliding" in self.branches else 0
            probe.record_selection(q_BSGRK, blocks, keys, self.geometry, self.scale, window)
        if selector_loss is not None:
            probe.figures["selector_loss"] = selector_loss.detach()

    def require_width(self, x_BSD: Tensor) -> None:
        """Refuse hidden states of another width than the layer's, and token ids."""
        if not x_BSD.is_floating_point():
            raise ConfigError(
                f"the input has dtype {x_BSD.dtype}: it must be hidden states, floating-point numbers of shape "
                f"[batch, tokens, {self.dim}]. Pass the output of an embedding; nsa.NSATransformer takes token ids."
            )
        if x_BSD.shape[-1] != self.dim:
            raise ConfigError(
                f"the input has shape {list(x_BSD.shape)} and the layer dim={self.dim}: it must be [batch, tokens, "
                f"{self.dim}]. Pass hidden states of that width, or make the layer with their width as dim."
            )

    def _require_input(self, x_BSD: Tensor, tables: Tables) -> None:
        """Refuse hidden states of another width, and tables of other tokens."""
        self.require_width(x_BSD)
        needed = (*x_BSD.shape[:2], self.rotary.rotary_dim // 2)
        if tables[0].shape != needed:
            raise ConfigError(
                f"`where` rotates {list(tables[0].shape)} and the input needs {list(needed)}: these are the positions "
                f"of other tokens or of a layer with other RoPE. Pass what this module's locate gives for this input."
            )

    def project(self, x_BSD: Tensor, tables: Tables) -> tuple[Tensor, BranchStreams]:
        self._require_input(x_BSD, tables)
        heads = (self.n_kv_groups, -1)
        q_BSGRK = self._normed_heads(self.w_q(x_BSD), self.q_norm)
        k_BSGbK = self._project_keys(x_BSD)
        v_BSGbV = self.w_v(x_BSD).unflatten(-1, (*heads, self.d_v))
        return rotate(q_BSGRK, tables), self._streams(k_BSGbK, v_BSGbV, tables)

    def _streams(self, k_BSGbK: Tensor, v_BSGbV: Tensor, tables: Tables) -> BranchStreams:
        """Keys and values by branch, rotated. A branch that the layer lacks repeats those of the one before it."""
        v_cmp, *values = v_BSGbV.unbind(-2)
        if self.rope_compressed == "before" or k_BSGbK.shape[-2] == 1:
            k_cmp, *raw_keys = rotate(k_BSGbK, tables).unbind(-2)  # all at once: rotating is many small operations
        else:
            k_cmp, *raw_keys = k_BSGbK[..., 0, :], *rotate(k_BSGbK[..., 1:, :], tables).unbind(-2)
        raw_keys, values = raw_keys or [k_cmp], values or [v_cmp]
        if self.rope_compressed == "after":
            k_cmp = k_BSGbK[..., 0, :]
        return BranchStreams(k_cmp, v_cmp, raw_keys[0], values[0], raw_keys[-1], values[-1])

    def _project_keys(self, x_BSD: Tensor) -> Tensor:
        """Not rotated yet; b: one per branch, or one for all."""
        return self._normed_heads(self.w_k(x_BSD), self.k_norm)

    def _normed_heads(self, x_BSH: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        """A projection by group, normed: [B, S, G, heads or branches, K]."""
        heads = (self.n_kv_groups, -1, self.d_k)
        if norm is None or self.qk_norm_per == "head":
            x_BSGHK = x_BSH.unflatten(-1, heads)
            return x_BSGHK if norm is None else _normed(norm, x_BSGHK)
        return _normed(norm, x_BSH).unflatten(-1, heads)

    def _lay_out(self, new: BranchStreams, layout: DocumentLayout, where: Positions) -> AttendedKeys:
        """Lay out the keys of the branches, of the tokens of a pass without a cache."""
        if where.exchange is not None:
            return where.exchange.keys(self, new, layout)
        pos, start, first, begin, block_pos = layout
        window = BranchKeys(new.k_win, new.v_win, pos, start)
        if not self.selects:
            return window, window, window
        k_cmp, v_cmp = self.compress(new.k_cmp, new.v_cmp, begin, block_pos, where.tables)
        return BranchKeys(k_cmp, v_cmp, pos, first), BranchKeys(new.k_sel, new.v_sel, pos, start), window

    def compress(
        self, k: Tensor, v: Tensor, begin_BC: Tensor, block_pos_BC: Tensor, tables: Tables | None = None
    ) -> tuple[Tensor, Tensor]:
        """Entries of the blocks that begin at `begin` in k and v. A key rotated afterwards is rotated as its block's
        last token: as `tables` rotate that token, or by its position in the document. Entries without values only
        choose blocks: attention gives them no gradient."""
        with torch.no_grad() if self.phi_v is None else nullcontext():
            return self._compress_keys(k, begin_BC, block_pos_BC, tables), self.compress_values(v, begin_BC)

    def compress_values(self, v: Tensor, begin_BC: Tensor) -> Tensor:
        """Values of compressed entries; of width 0 in a layer that does not attend to them."""
        if self.phi_v is None:
            return v.new_empty(*begin_BC.shape, v.shape[2], 0)
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

    def _keys_of_selector(self, x_BSD: Tensor, streams: BranchStreams, where: Positions) -> Tensor:
        """Compressed keys for the selector loss, whose gradient reaches `w_k`, its norm and φ through them, and nothing
        else: they are made once more of detached hidden states. Where other branches read the same keys, it reaches φ
        alone: it would outweigh what attention itself asks of them."""
        if self.kv == "per_branch":
            k_BSGK = self._project_keys(x_BSD.detach()).select(-2, 0)
            k_BSGK = rotate(k_BSGK, where.tables) if self.rope_compressed == "before" else k_BSGK
        else:
            k_BSGK = streams.k_cmp.detach()
        assert where.layout is not None
        if where.exchange is not None:
            return where.exchange.compressed_keys(self, k_BSGK, where.layout)
        return self._compress_keys(k_BSGK, where.layout.begin_BC, where.layout.block_pos_BC, where.tables)

    def _check_cache(self, x_BSD: Tensor, cache: LayerCache, cu_doc_lens: object = None) -> None:
        """Refuse a cache that was made for other sizes: what is kept there would be read with ours."""
        if cu_doc_lens is not None:
            raise ConfigError("a cache holds one document per row: pass either cache or cu_doc_lens, not both.")
        if x_BSD.shape[0] == cache.batch:
            if cache.geometry is self.geometry and x_BSD.is_cpu:  # of this very module; the rest is seen in its shapes
                return
            if (type(cache), cache.geometry, cache.n_groups, cache.d_k, cache.d_v, cache.shared, cache.device) == (
                *(self.strategy.cache_type, self.geometry, self.n_kv_groups, self.d_k, self.d_v, self._shared_streams),
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

    def _decoder(self, cache: LayerCache, new_BSx: Tensor) -> TokenDecoder | None:
        """A backend's fused step for one new token per row, of one level; torch.compile cannot trace it."""
        if new_BSx.shape[1] > 1 or self.coarse is not None or torch.compiler.is_compiling():
            return None
        prepared_for, decoder = cache.prepared
        if prepared_for is not self:
            make, decoder = self.plan(cache.device, cache.dtype).decoder, None
            if make is not None and self.strategy.decodes is not None:
                means = self.phi_k.operator.is_mean and self.rope_compressed == "before"
                sizes = dict(means=means, heads_per_group=self.strategy.shape.heads_per_group)
                decoder = cache.decoder(
                    make, **sizes, merged=self.strategy.decodes == "merged", **self.strategy.options
                )
            cache.prepared = self, decoder
        return decoder

    def repeats_steps(self, x_BSD: Tensor, cache: LayerCache) -> bool:
        """Whether the pass of this one new token per row is the same sequence of launches on the same memory as that
        of the token before, whatever the rows' lengths, so that a CUDA graph of it may be replayed."""
        return self._stepping_decoder(x_BSD, cache) is not None and cache.has_room

    def _stepping_decoder(self, x_BSD: Tensor, cache: LayerCache) -> TokenDecoder | None:
        """The decoder, if its `step` can take the projections of one new token per row as they are."""
        decoder = self._decoder(cache, x_BSD)
        if decoder is None or decoder.step is None or cache.rewind:
            return None
        if self.probe is not None or x_BSD.dtype != cache.dtype or torch.is_autocast_enabled(x_BSD.device.type):
            return None
        return decoder

    def _step(self, x_B1D: Tensor, cache: LayerCache, where: Positions, decoder: TokenDecoder) -> Tensor:
        """Append one new token per row and attend: [B, 1, G, R, V]."""
        self._require_cached(where)
        self._require_input(x_B1D, where.tables)
        q, k, q_norm, k_norm = self.w_q(x_B1D), self.w_k(x_B1D), self.q_norm, self.k_norm
        if self.qk_norm_per == "layer" and q_norm is not None and k_norm is not None:
            q, k, q_norm, k_norm = _normed(q_norm, q), _normed(k_norm, k), None, None
        token = NewToken(
            q, k, self.w_v(x_B1D), None if self.gates is None else self.gates.proj(x_B1D), *where.tables,
            None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight, self._norm_eps,
            self.phi_k.weights, () if self.phi_v is None else self.phi_v.weights,
        )  # fmt: skip
        return cache.step(decoder, token, self._token_form, self.compress)[0]


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Under autocast the weight is wider than the input: torch has a fused kernel for one dtype only, and warns."""
    return norm(x.to(torch.promote_types(x.dtype, norm.weight.dtype))).to(x.dtype)
