"""CPU backend: compiled C++ kernels in fp32, bf16 and fp16 with AMX, AVX-512, AVX2 or plain C++.

Every result is computed by one thread in an order that depends on the sizes alone: any number of threads gives the same
bits. `CpuDecoder` appends one new token per row to the KV cache and attends over it in place, in two calls of the
library. Shapes as in `nsa.kernels.reference`.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.cpu import build, library
from nsa.kernels.cpu.library import CacheAppend, DecodeStep, check, dense, problem, require, rows
from nsa.kernels.interface import BranchInputs, CacheView, Gradients, KeyPages, constant_when_traced


def why_not(branch: str, device: torch.device, dtype: torch.dtype, shape: object) -> str | None:
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device.type}"
    if dtype not in library.DTYPES:
        return f"it computes {', '.join(str(d).removeprefix('torch.') for d in library.DTYPES)}, not {dtype}"
    return _why_not_built()


def describe() -> str:
    """One line on what was compiled, or why nothing was."""
    return _why_not_built() or f"{library.best_isa()}, compiled in {build.cache_folder()}"


@constant_when_traced  # tracing cannot call into the library
def _why_not_built() -> str | None:
    try:
        library.load()
    except build.BuildError as error:
        return str(error)
    return None


def attend_forward(x: BranchInputs) -> tuple[Tensor, Tensor]:
    x = _readable(x)
    arguments, out, lse = _forward_problem(x)
    check(library.load().nsa_forward(byref(arguments)))
    return out, lse


def compressed_and_select(x: BranchInputs) -> tuple[Tensor, Tensor, Tensor]:
    x = _readable(x)
    arguments, out, lse = _forward_problem(x)
    idx_BSGN = _new_choice(x.q_BSGRK, x.geometry)
    arguments.idx = idx_BSGN.data_ptr()
    check(library.load().nsa_choose(byref(arguments)))
    return out, lse, idx_BSGN


def attend_backward(
    x: BranchInputs, out_BSGRV: Tensor, lse_BSGR: Tensor, dout_BSGRV: Tensor, dlse_BSGR: Tensor | None
) -> Gradients:
    x = _readable(x)
    q, k, v = x.q_BSGRK, x.k_BTGK, x.v_BTGV
    dout, out, lse = dense(dout_BSGRV), dense(out_BSGRV), lse_BSGR.contiguous()
    dq, dk, dv = torch.empty_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
    arguments = _problem(x)
    require("outputs", out, (*q.shape[:-1], v.shape[-1]), q.dtype)
    require("gradients of outputs", dout, out.shape, q.dtype)
    require("log-sum-exps", lse, q.shape[:-1], torch.float32)
    arguments.out, arguments.dout, arguments.lse = rows(out), rows(dout), lse.data_ptr()
    arguments.dq, arguments.dk, arguments.dv = rows(dq), rows(dk), rows(dv)
    if dlse_BSGR is not None:
        dlse = dlse_BSGR.contiguous()
        require("gradients of log-sum-exps", dlse, q.shape[:-1], torch.float32)
        arguments.dlse = dlse.data_ptr()
    check(library.load().nsa_backward(byref(arguments)))
    return dq, dk, dv


def select(
    q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, scale: float
) -> Tensor:
    q, k, pos, first = dense(q_BSGRK), dense(k_BCGK), _index(pos_BS), _index(first_BS)
    idx_BSGN = _new_choice(q, geometry)
    arguments = problem("compressed", q, k, pos, first, geometry, scale)
    arguments.idx = idx_BSGN.data_ptr()
    check(library.load().nsa_choose(byref(arguments)))
    return idx_BSGN


def _readable(x: BranchInputs) -> BranchInputs:
    """The tensors as the library reads them; keep them until it has been called: it is given addresses."""
    idx = None if x.idx_BSGN is None else x.idx_BSGN.to(torch.int32).contiguous()
    q, k, v, pos, start = dense(x.q_BSGRK), dense(x.k_BTGK), dense(x.v_BTGV), _index(x.pos_BS), _index(x.start_BS)
    return BranchInputs(x.branch, q, k, v, idx, pos, start, x.geometry, x.scale)


def _problem(x: BranchInputs) -> library.AttentionProblem:
    """Queries, keys, values and chosen blocks, checked."""
    q, v, idx = x.q_BSGRK, x.v_BTGV, x.idx_BSGN
    arguments = problem(x.branch, q, x.k_BTGK, x.pos_BS, x.start_BS, x.geometry, x.scale, v.shape[-1])
    require("values", v, (*x.k_BTGK.shape[:-1], v.shape[-1]), q.dtype)
    arguments.v = rows(v)
    if idx is not None:
        require("chosen blocks", idx, (*q.shape[:3], idx.shape[-1]), torch.int32)
        arguments.idx, arguments.n_sel = idx.data_ptr(), idx.shape[-1]
    return arguments


def _forward_problem(x: BranchInputs) -> tuple[library.AttentionProblem, Tensor, Tensor]:
    """The arguments of a forward pass, with the output and the log-sum-exps that it writes."""
    arguments = _problem(x)
    out = x.q_BSGRK.new_empty((*x.q_BSGRK.shape[:-1], x.v_BTGV.shape[-1]))
    lse = x.q_BSGRK.new_empty(x.q_BSGRK.shape[:-1], dtype=torch.float32)
    arguments.out, arguments.lse = rows(out), lse.data_ptr()
    return arguments, out, lse


def _new_choice(q_BSGRK: Tensor, geometry: Geometry) -> Tensor:
    return q_BSGRK.new_empty((*q_BSGRK.shape[:3], geometry.n_sel), dtype=torch.int32)


def _index(x_BS: Tensor) -> Tensor:
    return x_BS.to(torch.int64).contiguous()


def mix_forward(gates_BSGX3: Tensor, *branches_BSGRV: Tensor) -> Tensor:
    gates, branches = gates_BSGX3.float().contiguous(), [x.contiguous() for x in branches_BSGRV]
    out = torch.empty_like(branches[0])
    arguments = _mix_problem(gates, branches)
    arguments.out = out.data_ptr()
    check(library.load().nsa_mix(byref(arguments)))
    return out


def mix_backward(
    dout_BSGRV: Tensor, gates_BSGX3: Tensor, *branches_BSGRV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dout, gates = dout_BSGRV.contiguous(), gates_BSGX3.float().contiguous()
    branches = [x.contiguous() for x in branches_BSGRV]
    dgates, dbranches = torch.empty_like(gates), [torch.empty_like(x) for x in branches]
    arguments = _mix_problem(gates, branches)
    require("gradients of the mix", dout, branches[0].shape, branches[0].dtype)
    arguments.dout, arguments.dgates = dout.data_ptr(), dgates.data_ptr()
    arguments.dbranches[:] = [x.data_ptr() for x in dbranches]
    check(library.load().nsa_mix(byref(arguments)))
    return dgates.to(gates_BSGX3.dtype), dbranches[0], dbranches[1], dbranches[2]


def _mix_problem(gates: Tensor, branches: list[Tensor]) -> library.GateMix:
    first = branches[0]
    dtype = first.dtype
    if first.dim() != 5 or first.shape[3] < 1 or dtype not in library.DTYPES:
        raise ConfigError(f"a branch is {dtype} of shape {list(first.shape)}: it must be [B, S, G, R, V].")
    *_, R, V = first.shape
    for branch in branches:
        require("branches", branch, first.shape, dtype)
    n_gates = 1 if gates.dim() == 5 and gates.shape[3] == 1 else R
    require("gates", gates, (*first.shape[:3], n_gates, 3), torch.float32)
    arguments = library.GateMix(
        library.DTYPES[dtype], library.isa_for(dtype), torch.get_num_threads(), gates.numel() // 3, R // n_gates, V
    )
    arguments.gates = gates.data_ptr()
    arguments.branches[:] = [x.data_ptr() for x in branches]
    return arguments


_BRANCHES = ("compressed", "selected", "sliding")


class CpuDecoder:
    """Keeps the cache's addresses; only the new token's addresses change from step to step.

    merged: one softmax over selected blocks and window, whose compressed keys have no values, without gates.
    """

    step = None

    def __init__(
        self,
        cache: CacheView,
        *,
        heads_per_group: int,
        means: bool,
        geometry: Geometry,
        scale: float,
        merged: bool = False,
    ) -> None:
        self._cache = cache  # keeps alive the memory whose addresses the library has
        k, v, table_BP = cache.selected.pages
        batch, (_, groups, _, d_k) = len(table_BP), k.shape
        q = k.new_empty((batch, 1, groups, heads_per_group, d_k))
        self._q_shape, self._out_shape, self._dtype = q.shape, (*q.shape[:-1], v.shape[-1]), q.dtype
        self._gate_shapes = tuple(torch.Size((*q.shape[:3], n, 3)) for n in (heads_per_group, 1))
        self._new_shapes = [torch.Size((batch, 1, groups, x.shape[-1])) for x in (k, v)] * 3
        self._idx_B1GN = q.new_empty((batch, 1, groups, geometry.n_sel), dtype=torch.int32)
        self._step, self._new_token = DecodeStep(), _append_arguments_of(cache, means, geometry, merged)
        self._far_B1 = torch.full_like(cache.selected.pos_B1, -1) if merged else None
        d_v = v.shape[-1]
        for branch, keys in zip(_BRANCHES, (cache.compressed, cache.selected, cache.window), strict=True):
            pos_B1 = keys.pos_B1 if self._far_B1 is None or branch == "sliding" else self._far_B1
            one = library.query_problem(branch, q, pos_B1, keys.start_B1, geometry, scale, d_v)
            one.T = keys.pages.n_entries
            widths = (d_k, 0 if merged and branch == "compressed" else d_v)
            one.k, one.v = _paged(branch, keys.pages, batch, groups, widths, q.dtype)
            setattr(self._step, branch, one)
        self._step.gates_per_group = 1
        if self._far_B1 is not None:
            self._step.far = self._far_B1.data_ptr()
        self._step.compressed.idx = self._idx_B1GN.data_ptr()
        self._append, self._append_arguments = library.load().nsa_append, ctypes.byref(self._new_token)
        self._decode, self._decode_arguments = library.load().nsa_decode, ctypes.byref(self._step)
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
                f"{self._cache.selected.pages.n_entries}: there is no slot for one more token. Set a larger max_len."
            )
        return bool(outcome)

    def attend(self, q_B1GRK: Tensor, gates_B1GR3: Tensor | None) -> tuple[Tensor, Tensor]:
        """The selected blocks are overwritten by the next step."""
        if q_B1GRK.shape != self._q_shape or q_B1GRK.dtype is not self._dtype or not q_B1GRK.is_cpu:
            library.require("queries", q_B1GRK, self._q_shape, self._dtype)
        gates = gates_B1GR3
        if (gates is None) != (self._far_B1 is not None):
            raise ConfigError(
                f"gates are {'missing' if gates is None else 'given'}: they mix the branches, and a merged layer has "
                f"none. Pass them to a decoder that was made with merged=False, and only to that."
            )
        if gates is not None:
            if gates.shape not in self._gate_shapes or not gates.is_cpu:
                library.require("gates", gates, self._gate_shapes[0], torch.float32)
            if gates.dtype is not torch.float32 or not gates.is_contiguous():
                gates = gates.float().contiguous()
            self._step.gates, self._step.gates_per_group = gates.data_ptr(), gates.shape[3]
        q = dense(q_B1GRK)
        out, first = q.new_empty(self._out_shape), self._first
        if (strides := q.stride()) != self._q_strides:
            self._q_strides = strides
            self._q.batch, self._q.token, self._q.group, self._q.head, _ = strides
        self._q.data, self._out.data = q.data_ptr(), out.data_ptr()
        first.threads, first.isa = torch.get_num_threads(), library.isa_for(self._dtype)
        library.check(self._decode(self._decode_arguments))
        return out, self._idx_B1GN


def _paged(
    branch: str, pages: KeyPages, batch: int, groups: int, widths: Sequence[int], dtype: torch.dtype
) -> list[library.TensorRows]:
    if pages.k.dtype is not dtype or pages.v.dtype is not dtype or pages.k.shape[:3] != pages.v.shape[:3]:
        raise ConfigError(
            f"cached keys of the {branch} branch are {pages.k.dtype} in pages {list(pages.k.shape)}, its values "
            f"{pages.v.dtype} in {list(pages.v.shape)}: both must be {dtype} and have as many pages and states."
        )
    both = zip(("keys", "values"), pages[:2], widths, strict=True)
    return [library.page_rows(f"cached {what}", x, pages.table_BP, batch, groups, width) for what, x, width in both]


def _append_arguments_of(cache: CacheView, means: bool, geometry: Geometry, merged: bool) -> CacheAppend:
    every = dict(tail=cache.tail, selected=cache.selected.pages, window=cache.window.pages)
    k, v, table_BP = cache.selected.pages
    batch, groups, widths = len(table_BP), k.shape[1], (k.shape[-1], v.shape[-1])
    g = geometry
    arguments = CacheAppend(library.DTYPES[k.dtype], 0, batch, groups, g.l, g.d, g.w, means)
    placed = [(pages, x) for name, pages in every.items() for x in _paged(name, pages, batch, groups, widths, k.dtype)]
    for stream, (pages, x), width in zip(arguments.streams, placed, widths * len(every), strict=True):
        stream.slots, stream.n_slots, stream.width = x, pages.n_entries, width
    of_entries = (widths[0], 0) if merged else widths
    arguments.compressed[:] = _paged("compressed", cache.compressed.pages, batch, groups, of_entries, k.dtype)
    arguments.n_compressed_slots = cache.compressed.pages.n_entries
    counters = (
        cache.compressed.start_B1, cache.length_B, cache.n_compressed_B, cache.selected.pos_B1, cache.window.pos_B1
    )  # fmt: skip
    for counter in counters:
        library.require("the cache's counters", counter.flatten(), (batch,), torch.int64)
    arguments.first, arguments.length, arguments.n_compressed, arguments.pos, arguments.window_pos = (
        x.data_ptr() for x in counters
    )
    return arguments
