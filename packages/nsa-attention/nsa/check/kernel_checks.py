"""Checks of every function of a kernel backend, forward and backward, on a case of the table.

Each part runs once, compared with the reference on the CPU; again in memory that held NaN, and again under autocast,
where every bit must be the same.

B batch · S queries · G kv groups · R heads per group · X gates per group · V value dim
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.check.cases import BACKEND, SMALL_PIECE, KernelCase, self_check_case
from nsa.check.comparison import (
    SELECTION_LIMIT,
    CheckResult,
    Results,
    blocks_error,
    bounded,
    compare,
    differing,
    poisoned_memory,
)
from nsa.check.decode_case import DecodeCase, MergedDecodeCase, StepCase
from nsa.check.kernel_call import ALL_NAMES, CPU, NAMES, KernelCall
from nsa.child_process import answer_parent
from nsa.core.positions import DocumentLayout, packed_layout, plain_layout
from nsa.geometry import Geometry
from nsa.kernels import flash, reference
from nsa.kernels.cpu.build import set_cache_folder
from nsa.kernels.interface import KernelShape
from nsa.kernels.registry import BACKENDS, BRANCHES, BackendRequest, KernelPlan, Mixing, plan
from nsa.kernels.triton.tile_store import set_tuning

ATTENTION = ("compressed", "selected", "sliding")
_MOST_THREADS = 16  # of the compiler and of the reference
TIMED = "layer time"


class _CheckedPart(NamedTuple):
    """One group of kernels: `run` returns all results, `compare` checks them against the reference."""

    name: str
    run: Callable[[], Results]
    compare: Callable[[Results], list[CheckResult]]


def parts(
    case: KernelCase, device: torch.device, dtype: torch.dtype, backend: str, *, exact: torch.dtype = torch.float32
) -> Iterator[_CheckedPart]:
    """Yield the groups in the order in which they are checked. exact: the dtype that the reference computes attention
    in."""
    call, functions, together = case.call(dtype), BACKENDS[backend].functions, BACKENDS[backend].compressed_and_select
    for branch in [branch for branch in ATTENTION if branch in BACKENDS[backend].branches]:
        run = partial(_attention, call, branch, device, backend)
        comparison = partial(_compare_branch, call, branch, ALL_NAMES, device, exact)
        yield _CheckedPart(branch, run, partial(comparison, branch))
        if branch == "selected" and backend == "triton":
            yield _CheckedPart("selected in spans", partial(_in_spans, run), partial(comparison, "selected in spans"))
    if not BACKENDS[backend].is_whole:
        return
    if together is not None:
        name, comparison = "compressed_and_select", partial(_compare_branch, call, "compressed", NAMES, device, exact)
        yield _CheckedPart(name, partial(_compressed_and_select, call, device, together), partial(comparison, name))
    yield _CheckedPart(
        "select", partial(_select, call, device, functions.select), partial(_compare_blocks, call, "select")
    )
    if BACKENDS[backend].layer is not None:
        layer = LayerCase(call, backend, device)
        yield _CheckedPart("layer", layer.run, layer.compare)
    heads = case.shape.heads_per_group
    for n_gates, gate_dtype in dict.fromkeys(((heads, torch.float32), (heads, dtype), (1, torch.float32))):
        mix = _MixCase(case, dtype, n_gates, gate_dtype)
        name = f"mix, {n_gates} gates per group in {str(gate_dtype).removeprefix('torch.')}"
        yield _CheckedPart(name, partial(mix.run, BACKENDS[backend].mix, device), partial(mix.compare, name, device))
    for decode in (DecodeCase(case, dtype), MergedDecodeCase(case, dtype), StepCase(case, dtype)):
        yield _CheckedPart(decode.name, partial(decode.run, backend, device), partial(decode.compare, device=device))


def _check_part(part: _CheckedPart, device: torch.device) -> list[CheckResult]:
    """Compared with the reference; if that holds, again, bit by bit."""
    first = part.run()
    results = part.compare(first)
    if not all(result.holds for result in results):
        return results
    with poisoned_memory():
        again = part.run()
    with torch.autocast(device.type, torch.bfloat16):
        cast = part.run()
    for how, got in (("again in memory that held NaN", again), ("under autocast", cast)):
        result = differing(f"{part.name}, values that differ {how}", got, first)
        results.append(replace(result, claim=f"{result.claim} ({result.note})" if result.note else result.claim))
    return results


def _attention(call: KernelCall, branch: str, device: torch.device, backend: str) -> Results:
    return dict(zip(ALL_NAMES, call.by_kernel(backend, branch, device, ALL_NAMES), strict=True))


def _compare_branch(
    call: KernelCall, branch: str, names: tuple[str, ...], device: torch.device, exact: torch.dtype, label: str,
    got: Results,
) -> list[CheckResult]:  # fmt: skip
    truth = plain = dict(zip(names, call.truth(branch, exact, names), strict=True))
    if call.dtype != torch.float32:
        plain = dict(zip(names, call.by_plain_pytorch(branch, device, names), strict=True))
    results = compare(label, call.dtype, got, truth, plain)
    return [*results, *(_compare_blocks(call, label, got) if "blocks" in got else ())]


def _compare_blocks(call: KernelCall, label: str, got: Results) -> list[CheckResult]:
    where = (call.layout.pos_BS, call.layout.first_BS)
    error = blocks_error(call.q_BSGRK, call.compressed[0], *where, got["blocks"], call.geometry, call.scale)
    return [bounded(f"{label} blocks", float(error.max()), SELECTION_LIMIT)]


def _compressed_and_select(call: KernelCall, device: torch.device, together: Callable[..., Any]) -> Results:
    """Call both as the model does: in one pass."""
    leaves = call.leaves("compressed", device)
    pos, _, first = call.positions(device)
    out, idx = together(*leaves, pos, first, **call.choosing)
    gradients = torch.autograd.grad(out, leaves, call.dout_BSGRV.to(device))
    return dict(zip((*NAMES, "blocks"), (out.detach(), *gradients, idx), strict=True))


def _select(call: KernelCall, device: torch.device, select: Callable[..., Any]) -> Results:
    q, k, _ = call.leaves("compressed", device)
    pos, _, first = call.positions(device)
    return {"blocks": select(q, k, pos, first, **call.choosing)}


def _in_spans(run: Callable[[], Results]) -> Results:
    """Run while the selected branch takes the queries in spans, as it does where rows are long."""
    from nsa.kernels.triton import selected
    from nsa.kernels.triton.launch import unplanned

    before = selected.SLOT_BYTES, selected.QUERIES_OF_SLOTS
    selected.SLOT_BYTES, selected.QUERIES_OF_SLOTS = 1, 1  # room for one block of each query
    try:
        with unplanned():
            return run()
    finally:
        selected.SLOT_BYTES, selected.QUERIES_OF_SLOTS = before


class LayerCase:
    """The three branches, the selection and the mix as one operator, as the model calls them."""

    def __init__(self, call: KernelCall, backend: str, device: torch.device) -> None:
        self.call, self.backend, self.device = call, backend, device
        gates = torch.rand(*call.q_BSGRK.shape[:-1], 3, generator=torch.Generator().manual_seed(3))
        self._inputs = (call.q_BSGRK, gates, *call.compressed, *call.raw, *call.raw)

    def _leaves(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Copies: keys and values of the selected and of the sliding branch have gradients of their own."""
        dtypes = (torch.float32 if x is self._inputs[1] else dtype for x in self._inputs)  # of the gates
        return [x.to(device, to, copy=True).requires_grad_() for x, to in zip(self._inputs, dtypes, strict=True)]

    def run(self) -> Results:
        layer, leaves = BACKENDS[self.backend].layer, self._leaves(self.device, self.call.dtype)
        assert layer is not None
        pos, start, first = self.call.positions(self.device)
        q, gates, *keys = leaves
        places = ((pos, first), (pos, start), (pos, start))
        tensors = [x for i, place in enumerate(places) for x in (*keys[2 * i : 2 * i + 2], *place)]
        y = layer(q, gates, *tensors, **self.call.choosing)
        return {**self._results(y.mixed_BSGRV, leaves), "blocks": y.idx_BSGN}

    def by_branches(self, backend: str, device: torch.device, dtype: torch.dtype, blocks: Tensor) -> Results:
        q, gates, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = leaves = self._leaves(device, dtype)
        (pos, start, first), functions = self.call.positions(device), BACKENDS[backend].functions
        outs: list[Any] = [
            functions.compressed(q, k_cmp, v_cmp, pos, first, **self.call.choosing),
            functions.selected(q, k_sel, v_sel, blocks.to(device), pos, start, **self.call.choosing),
            functions.sliding(q, k_win, v_win, pos, start, **self.call.choosing),
        ]
        return self._results(reference.mix(gates, *outs), leaves)

    def _results(self, out: Tensor, leaves: list[Tensor]) -> Results:
        gradients = torch.autograd.grad(out, leaves, self.call.dout_BSGRV.to(out.device, out.dtype))
        keys = [f"d{x} {branch}" for branch in ATTENTION for x in "kv"]
        return dict(zip(("out", "dq", "dgates", *keys), (out.detach(), *gradients), strict=True))

    def compare(self, got: Results) -> list[CheckResult]:
        """With the reference, within the tolerance that the branches one by one give."""
        truth = self.by_branches("reference", CPU, torch.float32, got["blocks"])
        plain = self.by_branches(self.backend, self.device, self.call.dtype, got["blocks"])
        return [*compare("layer", self.call.dtype, got, truth, plain), *_compare_blocks(self.call, "layer", got)]


class _MixCase:
    def __init__(self, case: KernelCase, dtype: torch.dtype, n_gates: int, gate_dtype: torch.dtype) -> None:
        s, generator = case.shape, torch.Generator().manual_seed(2)
        self.dtype, length = dtype, min(case.length, 101)
        gates = torch.rand(2, length, s.n_kv_groups, n_gates, 3, generator=generator).to(gate_dtype)
        heads = (2, length, s.n_kv_groups, s.heads_per_group, s.d_v)
        branches = [torch.randn(heads, generator=generator).to(dtype) for _ in ATTENTION]
        self.inputs, self.dout = (gates, *branches), torch.randn(heads, generator=generator).to(dtype)

    def run(self, mix: Mixing, device: torch.device, to: torch.dtype | None = None) -> Results:
        leaves = [x.to(device, to or x.dtype).requires_grad_() for x in self.inputs]
        out = mix(*leaves)
        gradients = torch.autograd.grad(out, leaves, self.dout.to(device, out.dtype))
        names = ("out", "dgates", *(f"d{branch}" for branch in ATTENTION))
        return dict(zip(names, (out.detach(), *gradients), strict=True))

    def compare(self, name: str, device: torch.device, got: Results) -> list[CheckResult]:
        truth, plain = self.run(reference.mix, CPU, torch.float32), self.run(reference.mix, device)
        return compare(name, self.dtype, got, truth, plain)


def _layer_seconds(
    run: KernelPlan, shape: KernelShape, layout: DocumentLayout, runs: int, device: torch.device, dtype: torch.dtype
) -> float:
    """The shortest time of a layer, forward and backward, on a row, as the model computes it; without `runs` that of
    the first one, which compiles."""
    g, groups = shape.geometry, shape.n_kv_groups
    pos, start, first, begin, _ = layout
    drawn = partial(torch.randn, device=device, dtype=dtype, requires_grad=True)
    heads = (1, pos.shape[1], groups, shape.heads_per_group)
    q, dout = drawn(*heads, shape.d_k), torch.randn(*heads, shape.d_v, device=device, dtype=dtype)
    lengths = (begin.shape[1], pos.shape[1])
    compressed, raw = ([drawn(1, n, groups, width) for width in (shape.d_k, shape.d_v)] for n in lengths)
    gates = torch.rand(*heads, 3, device=device, requires_grad=True)
    choosing: dict[str, Any] = dict(geometry=g, scale=float(shape.d_k**-0.5))

    def timed() -> float:
        began = time.perf_counter()
        if run.layer is not None:
            places = (*compressed, pos, first, *raw, pos, start, *raw, pos, start)
            out = run.layer(q, gates, *places, **choosing).mixed_BSGRV
        else:
            compressed_out, idx = run.compressed_and_select(q, *compressed, pos, first, **choosing)
            selected: Any = run.functions.selected(q, *raw, idx, pos, start, **choosing)
            sliding: Any = run.functions.sliding(q, *raw, pos, start, **choosing)
            out = run.mix(gates, compressed_out, selected, sliding)
        torch.autograd.grad(out, (q, gates, *compressed, *raw), dout)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    seconds = [timed() for _ in range(1 + runs)]
    return min(seconds[1:] or seconds)


def _layer_times(shape: KernelShape, device: torch.device, dtype: torch.dtype, backend: str) -> dict[str, float]:
    """Time of a layer: by Triton and the portable backend; of the backend `flash` by Triton, and with each of its
    branches, on a row of one document and a packed row together. Without what the GPU's memory has no room for."""
    g = shape.geometry
    length, runs = (4096, 3) if device.type == "cuda" else (g.l_sel + 1, 0)
    layouts = [plain_layout(1, length, g, device)]
    plans = {name: BackendRequest(*[name] * len(BRANCHES)) for name in (BACKEND, "portable")}
    if backend == "flash":
        documents = torch.tensor([0, length // 8, length // 2, length], device=device)
        layouts.append(packed_layout(documents, length, g))
        of_triton = plans.pop(BACKEND)
        plans = {BACKEND: of_triton} | {branch: of_triton._replace(**{branch: "flash"}) for branch in flash.SERVED}
    times = {}
    for name, request in plans.items():
        with suppress(torch.OutOfMemoryError):
            run = plan(request, device, dtype, shape)
            times[name] = sum(_layer_seconds(run, shape, layout, runs, device, dtype) for layout in layouts)
    return times


def compile_ahead(parts: Iterable[_CheckedPart], threads: int) -> None:
    """Compile the kernels of these parts in several threads, before any of them runs.

    Launchers read no data, so a pass in which every launch compiles and nothing runs meets the same kernels. Backward
    passes stay in this thread: those of autograd would compile one kernel after the other.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    from nsa.kernels.triton.launch import unplanned

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    one_thread = torch.autograd.set_multithreading_enabled(False)
    with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool), one_thread, unplanned():
        JITFunction.run = compile_only
        try:
            for part in parts:
                part.run()
        finally:
            JITFunction.run = launch


def main() -> None:
    """Run as the child of `nsa.kernels.self_check`: compile the kernels, compare them, and send each figure at once."""
    answer_parent(_check_kernels)


def _check_kernels(write: Callable[..., None], **request: Any) -> None:
    """`request`: `CheckRequest.arguments`."""
    try:
        _check_and_time(write, **request)
    except (OSError, ImportError, subprocess.SubprocessError):  # a full disk, a compiler that failed: no kernel's fault
        write(kind="environment")
        raise


def _check_and_time(write: Callable[..., None], **request: Any) -> None:
    began = time.perf_counter()
    device, dtype = torch.device(request["device"]), getattr(torch, request["dtype"])
    set_cache_folder(Path(request["folder"]))
    set_tuning(request["tuned"])
    torch.set_float32_matmul_precision("highest")  # no TF32 in what kernels are compared with
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.set_num_threads(min(_MOST_THREADS, len(os.sched_getaffinity(0))))  # the other processes of a node wait
        torch.cuda.set_device(device)
        seen = torch.cuda.get_device_name(device)
        if seen != request["gpu"]:
            raise RuntimeError(f"{device} is {seen} in the child process and {request['gpu']} in its parent")
    else:
        from nsa.kernels.triton import block_index

        block_index.PIECE = SMALL_PIECE
    groups, heads, d_k, d_v = request["shape"]
    shape = KernelShape(groups, heads, d_k, d_v, Geometry.from_ints(request["geometry"]))
    case, backend = self_check_case(shape, small=not on_gpu), request["backend"]
    write(kind="seconds", what="start", seconds=time.perf_counter() - began)
    every = list(parts(case, device, dtype, backend))
    if backend == "flash":  # rows of one document are computed by other kernels
        alone = parts(case._replace(documents=case.documents[:1]), device, dtype, backend)
        every += [part._replace(name=f"{part.name}, one document") for part in alone]
    chosen = [part for part in every if not request["parts"] or part.name in request["parts"]]
    if on_gpu and backend == BACKEND and not request["tuned"]:
        began = time.perf_counter()
        write(kind="begin", part="compiling")
        compile_ahead(chosen, _MOST_THREADS)
        write(kind="seconds", what="compiling", seconds=time.perf_counter() - began)
    for part in chosen:
        began = time.perf_counter()
        write(kind="begin", part=part.name)
        results = _check_part(part, device)
        write(kind="figures", figures=[dict(name=r.claim, error=r.measured, limit=r.limit) for r in results])
        write(kind="seconds", what=part.name, seconds=time.perf_counter() - began)
    if (on_gpu and not request["parts"]) or TIMED in request["parts"]:
        write(kind="begin", part=TIMED)
        write(kind="times", times=_layer_times(shape, device, dtype, backend))
    write(kind="done")
