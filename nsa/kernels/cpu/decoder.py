"""One new token per row, in two calls of the compiled library: take it into the cache, attend over it in place."""

import ctypes

import torch
from torch import Tensor

from nsa.kernels.cpu import library
from nsa.kernels.cpu.library import Arrival, Rows, Step, dense, rows
from nsa.kernels.decoder import Remembered

BRANCHES = ("compressed", "selected", "sliding")


class Decoder:
    """Keeps the cache's addresses; only those of the new token change from step to step."""

    def __init__(
        self, cache: Remembered, *, heads_per_group: int, l: int, d: int, l_sel: int, n_sel: int, w: int, scale: float
    ) -> None:
        self._cache = cache  # the library is given addresses, which this keeps alive
        self._library, self._n_sel = library.load(), n_sel
        self._step = Step()
        k, v = cache.selected[:2]
        self._batch, _, self._groups, self._d_k = k.shape
        self._heads, self._d_v = heads_per_group, v.shape[-1]
        sizes = dict(V=self._d_v, w=w, l=l, d=d, l_sel=l_sel, n_sel=n_sel)
        q = k.new_empty((self._batch, 1, self._groups, heads_per_group, self._d_k))
        for branch, (k, v, pos, start) in zip(BRANCHES, cache[1:4], strict=True):
            one = library.problem(branch, q, k, pos, start, scale, **sizes)
            one.v = rows(v)
            setattr(self._step, branch, one)
        self._first = self._step.compressed
        self._arrival = _arrival(cache, l=l, d=d, w=w)
        self._fresh = [stream.fresh for stream in self._arrival.streams]
        self._strides: list[tuple[int, ...]] = [()] * len(self._fresh)
        self._dtype = q.dtype

    def take_in(self, new: tuple[Tensor, ...]) -> bool:
        new = tuple(x if x.dtype is self._dtype and x.stride(-1) == 1 else self._plain(x) for x in new)
        for i, (x, fresh) in enumerate(zip(new, self._fresh, strict=True)):
            fresh.data = x.data_ptr()
            if (strides := x.stride()) != self._strides[i]:
                self._strides[i] = strides
                fresh.batch, _, fresh.group, _ = strides
        return bool(self._library.nsa_take_in(ctypes.byref(self._arrival)))

    def attend(self, q_B1GRK: Tensor, gates_B1GR3: Tensor) -> tuple[Tensor, Tensor]:
        q, gates = dense(q_B1GRK), gates_B1GR3.float().contiguous()
        out = q.new_empty((self._batch, 1, self._groups, self._heads, self._d_v))
        idx = q.new_empty((self._batch, 1, self._groups, self._n_sel), dtype=torch.int32)
        first = self._first
        first.q, first.out, first.idx = rows(q), rows(out), idx.data_ptr()
        first.threads, first.isa = torch.get_num_threads(), library.isa_for(q.dtype)
        self._step.gates, self._step.gates_per_group = gates.data_ptr(), gates.shape[3]
        library.call("nsa_decode", self._step)
        return out, idx

    def _plain(self, x: Tensor) -> Tensor:
        return dense(x.to(self._dtype))


def _arrival(cache: Remembered, *, l: int, d: int, w: int) -> Arrival:
    slots = (*cache.tail, *cache.selected[:2], *cache.window[:2])
    batch, _, groups, _ = slots[0].shape
    made = Arrival(slots[0].element_size(), batch, groups, l, d, w)
    for stream, x in zip(made.streams, slots, strict=True):
        stream.slots = Rows(x.data_ptr(), *x.stride()[:-1])
        stream.n_slots, stream.width = x.shape[1], x.shape[-1]
    made.length, made.pos, made.window_pos = (
        x.data_ptr() for x in (cache.length_B, cache.selected[2], cache.window[2])
    )
    return made
