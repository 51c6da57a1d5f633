"""CPU decoder: one new token per row in two library calls, KV cache append and attention over the cache in place."""

import ctypes

import torch
from torch import Tensor

from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.cpu import library
from nsa.kernels.cpu.library import CacheAppend, DecodeStep, dense, rows
from nsa.kernels.interface import CacheView

BRANCHES = ("compressed", "selected", "sliding")


class CpuDecoder:
    """Keeps the cache's addresses; only the new token's addresses change from step to step."""

    def __init__(
        self, cache: CacheView, *, heads_per_group: int, means: bool, geometry: Geometry, scale: float
    ) -> None:
        self._cache = cache  # keeps alive the memory whose addresses the library has
        k, v = cache.selected[:2]
        batch, _, groups, d_k = k.shape
        q = k.new_empty((batch, 1, groups, heads_per_group, d_k))
        self._q_shape, self._out_shape, self._dtype = q.shape, (*q.shape[:-1], v.shape[-1]), q.dtype
        self._gate_shapes = tuple(torch.Size((*q.shape[:3], n, 3)) for n in (heads_per_group, 1))
        self._new_shapes = [torch.Size((batch, 1, groups, x.shape[-1])) for x in (k, v)] * 3
        self._idx_B1GN = q.new_empty((batch, 1, groups, geometry.n_sel), dtype=torch.int32)
        self._step, self._new_token = DecodeStep(), _append_arguments_of(cache, means, geometry)
        d_v = v.shape[-1]
        for branch, (k, v, pos, start) in zip(BRANCHES, cache[1:4], strict=True):
            one = library.problem(branch, q, k, pos, start, geometry, scale, d_v)
            library.require("cached values", v, (*k.shape[:-1], d_v), q.dtype)
            one.v = rows(v)
            setattr(self._step, branch, one)
        self._step.compressed.idx = self._idx_B1GN.data_ptr()
        self._append, self._append_arguments = library.load().nsa_append, ctypes.byref(self._new_token)
        self._first, self._fresh = self._step.compressed, [stream.fresh for stream in self._new_token.streams]
        self._strides: list[tuple[int, ...]] = [()] * len(self._fresh)
        self._first.out = rows(q.new_empty(self._out_shape))
        self._q, self._out, self._q_strides = self._first.q, self._first.out, q.stride()

    def append(self, new: tuple[Tensor, ...]) -> bool:
        if [x.shape for x in new] != self._new_shapes or not new[0].is_cpu:
            raise ConfigError(
                f"the new tokens' keys and values are {[list(x.shape) for x in new]} on {new[0].device}: this cache "
                f"takes {[list(shape) for shape in self._new_shapes]} on the CPU. Pass one token for each of its rows."
            )
        new = tuple([x if x.dtype is self._dtype else x.to(self._dtype) for x in new])
        for i, x in enumerate(new):
            if (strides := x.stride()) != self._strides[i]:
                if strides[-1] != 1 < x.shape[-1]:
                    return self.append(tuple([dense(y) for y in new]))
                self._strides[i] = strides
                self._fresh[i].batch, _, self._fresh[i].group, _ = strides
            self._fresh[i].data = x.data_ptr()
        self._new_token.isa = library.isa_for(self._dtype)
        if (outcome := self._append(self._append_arguments)) == library.NO_ROOM:
            raise ConfigError(
                f"the cache has rows of {self._cache.length_B.tolist()} tokens, and room for 0 to "
                f"{self._cache.selected[0].shape[1]}: there is no slot for one more token. Set a larger max_len."
            )
        return bool(outcome)

    def attend(self, q_B1GRK: Tensor, gates_B1GR3: Tensor) -> tuple[Tensor, Tensor]:
        """The selected blocks are overwritten by the next step."""
        if q_B1GRK.shape != self._q_shape or q_B1GRK.dtype is not self._dtype or not q_B1GRK.is_cpu:
            library.require("queries", q_B1GRK, self._q_shape, self._dtype)
        if gates_B1GR3.shape not in self._gate_shapes or not gates_B1GR3.is_cpu:
            library.require("gates", gates_B1GR3, self._gate_shapes[0], torch.float32)
        q, gates = dense(q_B1GRK), gates_B1GR3
        if gates.dtype is not torch.float32 or not gates.is_contiguous():
            gates = gates.float().contiguous()
        out, first = q.new_empty(self._out_shape), self._first
        if (strides := q.stride()) != self._q_strides:
            self._q_strides = strides
            self._q.batch, self._q.token, self._q.group, self._q.head, _ = strides
        self._q.data, self._out.data = q.data_ptr(), out.data_ptr()
        first.threads, first.isa = torch.get_num_threads(), library.isa_for(self._dtype)
        self._step.gates, self._step.gates_per_group = gates.data_ptr(), gates.shape[3]
        library.call("nsa_decode", self._step)
        return out, self._idx_B1GN


def _append_arguments_of(cache: CacheView, means: bool, geometry: Geometry) -> CacheAppend:
    slots = (*cache.tail, *cache.selected[:2], *cache.window[:2])
    batch, _, groups, _ = slots[0].shape
    g, dtype = geometry, library.DTYPES[slots[0].dtype]
    made = CacheAppend(dtype, 0, batch, groups, g.l, g.d, g.w, means)
    for stream, x in zip(made.streams, slots, strict=True):
        stream.slots, stream.n_slots, stream.width = rows(x), x.shape[1], x.shape[-1]
    made.compressed[:] = [rows(x) for x in cache.compressed[:2]]
    made.n_compressed_slots = cache.compressed[0].shape[1]
    counters = (cache.length_B, cache.n_compressed_B, cache.selected[2], cache.window[2])
    made.length, made.n_compressed, made.pos, made.window_pos = (x.data_ptr() for x in counters)
    return made
