"""`PagedAttention`: an `NSAAttention` over vLLM's pages, for the tokens of many requests at once.

N tokens of a step · B decoding requests · S tokens of a chunk · G kv groups · R heads per group · K, V key, value dim
"""

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context

from nsa.core.attention_config import AttentionConfig
from nsa.core.branches import AttendedKeys, BranchKeys, BranchStreams
from nsa.core.model_layers import AttentionHolder
from nsa.core.nsa_attention import NSAAttention
from nsa.core.rope import Tables
from nsa.kernels.interface import CachedKeys, CacheView, TokenDecoder
from nsa.vllm.page_streams import PageStream
from nsa.vllm.step import Chunk, LongestStep, PagedStep, StepBuffers


class PagedAttention(AttentionHolder):
    """Holds the groups of one tensor-parallel rank, with page streams in place of a `LayerCache`.

    The config is that of the rank's share of heads and groups; `w_out` gives a partial sum, which is added up over the
    ranks.
    """

    def __init__(self, config: AttentionConfig, *, prefix: str, buffers: StepBuffers, n_ranks: int) -> None:
        super().__init__(NSAAttention(config))
        g, (shared_window, shared_tail) = config.geometry, self.layer.strategy.shared_streams(config)
        sizes = dict(n_groups=config.n_kv_groups, d_k=config.d_k, d_v=config.d_v, l_sel=g.l_sel)
        streams = {
            "selected": PageStream(f"{prefix}.selected", **sizes),
            "compressed": PageStream(f"{prefix}.compressed", tokens_per_entry=g.d, **sizes),
        }
        if not shared_window:
            streams["window"] = PageStream(f"{prefix}.window", last=g.w, **sizes)
        if not shared_tail:
            streams["tail"] = PageStream(f"{prefix}.tail", last=g.l, **sizes)
        self.streams = nn.ModuleDict(streams)
        self._stream: dict[str, PageStream] = {
            **streams,
            "window": streams.get("window", streams["selected"]),
            "tail": streams.get("tail", streams["selected"]),
        }
        self._window_table, self._tail_table = (
            "selected" if s else n for s, n in ((shared_window, "window"), (shared_tail, "tail"))
        )
        self._first_entry = g.l // g.d - 1  # the place of compressed entry 0: where its block ends
        self._step_buffers, self._n_ranks, self._vllm_config = buffers, n_ranks, get_current_vllm_config()
        self._decoders: dict[int, tuple[tuple[object, ...], TokenDecoder]] = {}

    def forward(self, x_ND: Tensor, tables: Tables) -> Tensor:
        """Attend; `tables` rotate the step's tokens by their positions."""
        layer = self.layer
        q_1NGRK, streams = layer.project(x_ND[None], tables)
        assert layer.gates is not None
        gates_1NGX3 = layer.gates(x_ND[None])
        step = self._step()
        out_1NGRV = q_1NGRK.new_zeros(*q_1NGRK.shape[:-1], layer.d_v)
        if step is not None:
            self._append(streams, step)
            if step.n_decoding:
                self._decode(q_1NGRK, gates_1NGX3, out_1NGRV, step)
            for chunk in step.chunks:
                self._attend(q_1NGRK, gates_1NGX3, out_1NGRV, chunk, step)
        elif not self._stream["selected"].kv_cache.numel():
            self._attend_to_longest(q_1NGRK, gates_1NGX3, out_1NGRV)
        return self._summed(out_1NGRV[0].flatten(1))

    def _attend(
        self, q_1NGRK: Tensor, gates_1NGX3: Tensor, out_1NGRV: Tensor, chunk: Chunk, step: PagedStep | LongestStep
    ) -> None:
        layer, new = self.layer, slice(chunk.first, chunk.first + chunk.end - chunk.begin)
        run, keys = layer.plan(q_1NGRK.device, q_1NGRK.dtype), self._keys_of(chunk, step)
        out_1NGRV[:, new] = layer.strategy.attend(run, q_1NGRK[:, new], gates_1NGX3[:, new], keys).out

    def _attend_to_longest(self, q_1NGRK: Tensor, gates_1NGX3: Tensor, out_1NGRV: Tensor) -> None:
        """While vLLM measures memory, before there are pages: the last tokens of the longest request that it will
        schedule, whose copies of pages and partial results take the most."""
        size, longest = self._vllm_config.cache_config.block_size, self._vllm_config.model_config.max_model_len
        for stream in self._stream.values():
            stream.bind_one_page(size, q_1NGRK.device)
        try:
            chunk = Chunk(0, 0, max(0, longest - q_1NGRK.shape[1]), longest)
            self._attend(q_1NGRK, gates_1NGX3, out_1NGRV, chunk, LongestStep(size, q_1NGRK.device))
        finally:
            for stream in self._stream.values():
                stream.kv_cache = torch.empty(0)

    def _summed(self, mixed_NH: Tensor) -> Tensor:
        """`w_out` over all ranks; its bias once."""
        w_out = self.layer.w_out
        if self._n_ranks == 1:
            return w_out(mixed_NH)
        out_ND = tensor_model_parallel_all_reduce(torch.nn.functional.linear(mixed_NH, w_out.weight))
        return out_ND if w_out.bias is None else out_ND + w_out.bias

    def _step(self) -> PagedStep | None:
        """Data that the layers share in this step; None while vLLM measures the memory that a step needs."""
        every = get_forward_context().attn_metadata
        if every is None:
            return None
        selected = every[self._stream["selected"].prefix]
        if selected.made is None:
            own = {name: every[stream.prefix] for name, stream in self.streams.items() if name != "compressed"}
            pages = self._stream["selected"].kv_cache
            decode = self.layer.plan(pages.device, pages.dtype).decoder is not None
            selected.made = PagedStep(own, pages.shape[2], self.layer.geometry, self._step_buffers, decode)
        return selected.made

    def _append(self, new: BranchStreams, step: PagedStep) -> None:
        streams = dict(selected=(new.k_sel, new.v_sel), window=(new.k_win, new.v_win), tail=(new.k_cmp, new.v_cmp))
        for name, slots in step.token_slots.items():
            k, v = streams[name]
            self._stream[name].write(slots, k[0, : step.n_tokens], v[0, : step.n_tokens])
        if step.n_entries:
            k_ElGK, v_ElGV = self._stream["tail"].entries(step.entry_tokens)
            zero_E1 = torch.zeros_like(step.entry_begin_E[:, None])
            k_E1GK, v_E1GV = self.layer.compress(k_ElGK, v_ElGV, zero_E1, step.entry_begin_E[:, None])
            self._stream["compressed"].write(step.entry_slots, k_E1GK[:, 0], v_E1GV[:, 0])

    def _decode(self, q_1NGRK: Tensor, gates_1NGX3: Tensor, out_1NGRV: Tensor, step: PagedStep) -> None:
        """All requests that decode one token, in one call."""
        at_B = step.decode_token_B
        q, gates = (q_1NGRK[0], gates_1NGX3[0]) if at_B is None else (q_1NGRK[0, at_B], gates_1NGX3[0, at_B])
        n = step.n_decoding
        made_BGRV = self._decoder_for(n).attend(q[:n, None], gates[:n, None])[0][:, 0]
        if at_B is None:
            out_1NGRV[0, :n] = made_BGRV
        else:
            out_1NGRV[0, at_B] = made_BGRV

    def _decoder_for(self, n: int) -> TokenDecoder:
        """Return the decoder for n requests; built once for as long as its pages and tables stay where they are."""
        buffers, tables = self._step_buffers, self._step_buffers.tables
        valid = (*(stream.generation for stream in self._stream.values()), *map(id, tables.values()))
        known = self._decoders.get(n)
        if known is not None and known[0] == valid:
            return known[1]
        pos_B1, zero_B1, first_B1 = (x[:n] for x in (buffers.pos_B1, buffers.zero_B1, buffers.first_entry_B1))
        selected, window, tail = (tables[name][:n] for name in ("selected", self._window_table, self._tail_table))
        stream = self._stream
        view = CacheView(
            stream["tail"].key_pages(tail),
            CachedKeys(stream["compressed"].key_pages(selected), pos_B1, first_B1),
            CachedKeys(stream["selected"].key_pages(selected), pos_B1, zero_B1),
            CachedKeys(stream["window"].key_pages(window), pos_B1, zero_B1),
            buffers.zero_B[:n],
            buffers.zero_B[:n],
        )
        pages = stream["selected"].kv_cache
        make = self.layer.plan(pages.device, pages.dtype).decoder
        assert make is not None, "a step decodes only if its backend has a decoder"
        decoder = make(
            view,
            heads_per_group=self.layer.strategy.shape.heads_per_group,
            means=False,
            geometry=self.layer.geometry,
            scale=self.layer.scale,
        )
        self._decoders[n] = valid, decoder
        return decoder

    def _keys_of(self, chunk: Chunk, step: PagedStep | LongestStep) -> AttendedKeys:
        """Keys of the chunk's tokens, gathered from its request's pages."""
        g, stream = self.layer.geometry, self._stream
        pos_1S = torch.arange(chunk.begin, chunk.end, device=self._step_buffers.pos_B1.device)[None]
        zero_1S = torch.zeros_like(pos_1S[:, :1]).expand_as(pos_1S)
        blocks, _ = step.blocks("selected", chunk, 0)
        entries = self._first_entry, self._first_entry + g.n_compressed(chunk.end)
        oldest = max(0, chunk.begin - g.w + 1)
        window_blocks, at = step.blocks(self._window_table, chunk, oldest)
        k_win, v_win = stream["window"].rows(window_blocks, oldest - at, chunk.end - at)
        return (
            BranchKeys(*stream["compressed"].rows(blocks, *entries), pos_1S, zero_1S),
            BranchKeys(*stream["selected"].rows(blocks, 0, chunk.end), pos_1S, zero_1S),
            BranchKeys(k_win, v_win, pos_1S, (zero_1S[:, :1] - oldest).expand_as(pos_1S)),
        )
