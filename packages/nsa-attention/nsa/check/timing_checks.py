"""Timings of the GPU check: host time of a layer, each kernel beside the model, generation, two GPUs, dense attention.

A layer here is its attention without projections, as `nsa bench attention` times it. On a CPU every path runs on tiny
sizes; kernels are interpreted there, and their times say nothing.
"""

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from nsa.bench import nsa_backends, report
from nsa.bench.case import TORCH_DTYPES, BenchCase, BenchShape, BenchTask
from nsa.bench.implementations import all_implementations
from nsa.bench.machine import available_cores, describe_device, pinned, wait_for
from nsa.bench.measurement import BenchMeasurement, choose_implementations, measure
from nsa.bench.memory import measure_memory
from nsa.bench.predictions import gpu_of_model, kernel_predictions, predictions
from nsa.bench.roofline import MachinePeaks, measure_peaks
from nsa.check.cases import BACKEND, CheckSizes, GenerationSizes, on_gpu, rehearsal
from nsa.check.comparison import CheckResult, CheckStatus, Results, bounded, differing, fact, needs_gpu
from nsa.check.gpu_check_report import GpuCheck, MeasuredTable
from nsa.check.module_checks import second_stream
from nsa.child_process import ChildFailed, ChildProcess, answer_parent
from nsa.core.model_layers import NSACache
from nsa.kernels import flash
from nsa.kernels.self_check import clean_environment
from nsa.model.transformer import NSATransformer
from nsa.options import AttentionKind
from nsa.token_counts import spell

Timed = Iterator[CheckResult | MeasuredTable]

_MEMORY_TIMEOUT_S = 600.0
_RANKS_TIMEOUT_S = 300.0
_CALLS, _REPEATS = 20, 5
"""Calls in a row, so few that a GPU's queue of launches does not fill; how often; the fastest counts."""
_LAUNCHES_IN_GRAPH, _WARM_CALLS = 100, 3
_REDUCED_BYTES = {"cpu": 1 << 20, "cuda": 1 << 28}
_NOT_TIMED = "interpreted kernels are not timed"
_OURS = re.compile(r"(\w+)_kernel")
"""A kernel of Triton; PyTorch's have names of C++."""


@triton.jit
def trivial_kernel(x: Any, n: int, BLOCK: tl.constexpr) -> None:
    i = tl.arange(0, BLOCK)
    tl.store(x + i, i.to(tl.float32), mask=i < n)


# Host time and captured graphs.


def host(sizes: CheckSizes) -> Iterator[GpuCheck]:
    """What Python and the driver add to a layer: eager, and replayed from a CUDA graph."""
    if not sizes.full:
        return
    yield GpuCheck("host", "peaks", partial(_peaks, sizes))
    yield GpuCheck("host", "a launch", partial(_launch_cost, sizes))
    for name, shape in sizes.speed.layers:
        for length in sizes.speed.host_lengths:
            run = partial(_layer_host_time, sizes, name, shape, length)
            yield GpuCheck("host", f"layer {name}, {spell(length)}", run)


@cache
def _measured_peaks(sizes: CheckSizes) -> MachinePeaks:
    return measure_peaks(len(available_cores()), sizes.device)


def _peaks(sizes: CheckSizes) -> Timed:
    peaks = _measured_peaks(sizes)
    line = report.peaks_line(peaks)
    yield fact("peaks", line.partition(": ")[2])
    yield MeasuredTable(asdict(peaks), [], [line], "peaks")


def _launch_cost(sizes: CheckSizes) -> Timed:
    """A kernel that does nothing: what a launch costs at least."""
    x = torch.zeros(64, device=sizes.device)

    def launch(times: int = 1) -> None:
        for _ in range(times):
            trivial_kernel[(1,)](x, 64, BLOCK=64)

    yield from _host_time(sizes, "trivial launch", 64, launch)
    if sizes.is_gpu:
        took = _replayed_s(partial(launch, _LAUNCHES_IN_GRAPH), sizes.device) / _LAUNCHES_IN_GRAPH
        yield MeasuredTable({"call": "trivial launch", "tokens": 64, "launches": 1, "captured_s": took},
                            [("trivial launch", "", "1", "", report.seconds(took))], [], "host")  # fmt: skip
        yield fact("trivial launch, in a graph", report.seconds(took))
    else:
        yield needs_gpu("trivial launch, in a graph")


def _layer_host_time(sizes: CheckSizes, name: str, shape: BenchShape, length: int) -> Timed:
    for call, run in _layer_calls(sizes, shape, length).items():
        yield from _host_time(sizes, f"{call}, layer {name}", length, run)
    for call, run in _layer_calls(sizes, shape, length).items():
        claim = f"{call}, layer {name}, {spell(length)}, in a graph"
        if not sizes.is_gpu:
            yield needs_gpu(claim)
            continue
        took = _replayed_s(run, sizes.device)
        what = f"{call}, layer {name}"
        record = {"call": what, "tokens": length, "captured_s": took}
        row = (what, spell(length), "", "", report.seconds(took))
        yield MeasuredTable(record, [row], [], "host")
        yield fact(claim, report.seconds(took))


def _layer_calls(sizes: CheckSizes, shape: BenchShape, length: int) -> dict[str, Callable[[], object]]:
    dtype = sizes.speed.dtypes[0]
    case = BenchCase(shape, length, TORCH_DTYPES[dtype], device=sizes.device)
    task = BenchTask("attention", shape, length, dtype, True, device=sizes.device.type)
    runner = nsa_backends.attention(BACKEND, case, task)
    return {"forward": runner.forward_only, "forward + backward": runner.forward_backward}


def _host_time(sizes: CheckSizes, call: str, tokens: int, run: Callable[[], object]) -> Timed:
    """A call as Python makes it: until it returns, and until the device is done."""
    device, calls = sizes.device, _CALLS if sizes.is_gpu else 1
    launches = sum(count for count, _ in kernel_times(run, device).values())
    host_s = wall_s = float("inf")
    for _ in range(_REPEATS if sizes.is_gpu else 1):
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        issued = time.perf_counter()
        wait_for(device)
        host_s, wall_s = min(host_s, (issued - begin) / calls), min(wall_s, (time.perf_counter() - begin) / calls)
    record = {"call": call, "tokens": tokens, "launches": launches, "host_s": host_s, "eager_s": wall_s}
    row = (call, spell(tokens), str(launches), f"{report.seconds(wall_s)}, host {report.seconds(host_s)}", "")
    yield MeasuredTable(record, [row], [], "host")
    summary = f"host {report.seconds(host_s)}, until done {report.seconds(wall_s)}, {launches} launches"
    yield fact(f"{call}, {spell(tokens)}, eager", summary if sizes.is_gpu else _NOT_TIMED)


def _captured(
    run: Callable[[], object], device: torch.device, warm: Callable[[], object] | None = None
) -> torch.cuda.CUDAGraph:
    with second_stream(device):  # compile kernels and warm up libraries before capturing
        for _ in range(_WARM_CALLS):
            (warm or run)()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _replayed_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one replay of this call, many in a row."""
    graph, best = _captured(run, device), float("inf")
    for _ in range(_REPEATS + 1):
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(_CALLS):
            graph.replay()
        wait_for(device)
        best = min(best, (time.perf_counter() - begin) / _CALLS)
    return best


# Time per kernel.


def kernels(sizes: CheckSizes) -> Iterator[GpuCheck]:
    """Each kernel of a layer beside its modelled time."""
    for name, shape in sizes.speed.layers if sizes.full else ():
        for length in sizes.speed.kernel_lengths:
            run = partial(_layer_kernels, sizes, name, shape, length)
            yield GpuCheck("kernels", f"layer {name}, {spell(length)}", run)


def _layer_kernels(sizes: CheckSizes, name: str, shape: BenchShape, length: int) -> Timed:
    dtype = sizes.speed.dtypes[0]
    times = kernel_times(_layer_calls(sizes, shape, length)["forward + backward"], sizes.device)
    gpu = describe_device(sizes.device)["name"] if sizes.is_gpu else ""
    modelled = kernel_predictions().get((gpu_of_model(gpu), name, length), {})
    if not times:
        yield CheckResult(f"kernels that the profiler shows, layer {name}", CheckStatus.FAILS, 0, note="none")
        return
    record = {
        "shape": name, "length": length, "dtype": dtype, "backward": True, "modelled": modelled,
        "kernels": {kernel: {"launches": count, "seconds": took} for kernel, (count, took) in times.items()},
    }  # fmt: skip
    what = f"layer {name}, fwd+bwd, {dtype}, {spell(length)}"
    rows: list[tuple[str, ...]] = []
    for kernel, (count, took) in sorted(times.items(), key=lambda item: -item[1][1]):
        prediction = report.seconds(modelled[kernel]) if kernel in modelled else "–"
        rows.append((what, kernel, str(count), report.seconds(took), prediction))
    yield MeasuredTable(record, rows, [], "kernels")
    total, launches = sum(took for _, took in times.values()), sum(count for count, _ in times.values())
    beside = f"modelled {report.seconds(sum(modelled.values()))}" if modelled else "not modelled"
    summary = f"{report.seconds(total)} in {launches} launches, {beside}"
    yield fact(f"kernels of {what}", summary if sizes.is_gpu else _NOT_TIMED)


def kernel_times(run: Callable[[], object], device: torch.device) -> dict[str, tuple[int, float]]:
    """Launches and seconds of one call by kernel, all of PyTorch's as `torch`; on a CPU those of our operators."""
    on_cuda = device.type == "cuda"
    run()  # compiles
    wait_for(device)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as profiled:
        run()
        wait_for(device)
    times: dict[str, tuple[int, float]] = {}
    for event in profiled.events():
        if on_cuda:
            if event.device_type != DeviceType.CUDA or event.is_user_annotation:
                continue
            ours = _OURS.fullmatch(event.name)
            kernel = ours[1] if ours else "torch"
        elif event.name.startswith("nsa::"):
            kernel = event.name
        else:
            continue
        count, took = times.get(kernel, (0, 0.0))
        times[kernel] = count + 1, took + event.time_range.elapsed_us() * 1e-6
    return times


# Generation.


def generation(sizes: CheckSizes) -> Iterator[GpuCheck]:
    """Tokens per second of a whole model, eager and with one token captured as a CUDA graph."""
    kinds: tuple[AttentionKind, ...] = ("nsa", "dense")
    for kind in kinds if sizes.full else ():
        yield GpuCheck("generation", f"{kind} model", partial(_generate, sizes, kind))


@torch.no_grad()
def _generate(sizes: CheckSizes, kind: AttentionKind) -> Timed:
    wanted, device = sizes.speed.generation, sizes.device
    model = _model(wanted, kind).to(device, TORCH_DTYPES[sizes.speed.dtypes[0]]).eval()
    prompt = torch.randint(wanted.vocabulary, (1, wanted.prompt), generator=torch.Generator().manual_seed(0)).to(device)
    what = f"{kind} model of {model.num_params() / 1e6:.0f}M, prompt of {spell(wanted.prompt)}"
    eager, eager_s = _continued(model, prompt, wanted.tokens, device, captured=False)
    record = {
        "model": kind,
        "parameters": model.num_params(),
        "prompt": wanted.prompt,
        "eager_tokens_per_s": 1 / eager_s,
    }
    yield fact(f"{what}, eager", f"{1 / eager_s:,.0f} tokens/s" if sizes.is_gpu else _NOT_TIMED)
    cell = ""
    if sizes.is_gpu:
        captured, captured_s = _continued(model, prompt, wanted.tokens, device, captured=True)
        record["captured_tokens_per_s"] = 1 / captured_s
        cell = f"{1 / captured_s:,.0f} tokens/s"
        yield fact(f"{what}, captured", cell)
        yield bounded(f"tokens of the captured {kind} model that differ", int((captured != eager).sum()), 0)
    else:
        yield needs_gpu(f"{what}, captured")
    row = (what.partition(",")[0], spell(wanted.prompt), f"{1 / eager_s:,.0f} tokens/s", cell)
    yield MeasuredTable(record, [row], [], "generation")


def _model(wanted: GenerationSizes, kind: AttentionKind) -> NSATransformer:
    torch.manual_seed(0)
    s = wanted.shape
    return NSATransformer(
        wanted.vocabulary, wanted.dim, wanted.layers, n_heads=s.n_heads, n_kv_groups=s.n_kv_groups, d_k=s.d_k,
        d_v=s.d_v, **vars(s.geometry), layers=(kind,), kernels=BACKEND,
    )  # fmt: skip


def _continued(
    model: NSATransformer, prompt_BS: torch.Tensor, tokens: int, device: torch.device, *, captured: bool
) -> tuple[torch.Tensor, float]:
    """The most likely tokens after the prompt, and seconds per token."""
    caches = [model.new_cache(1, prompt_BS.shape[1] + tokens + _WARM_CALLS) for _ in range(2)]
    for filled in caches:
        first_B1 = model(prompt_BS, cache=filled)[:, -1:].argmax(-1)
    token_B1 = first_B1.clone()

    def step(cache: NSACache) -> None:
        token_B1.copy_(model(token_B1, cache=cache).argmax(-1))

    once, warm = (partial(step, cache) for cache in caches)
    replay: Callable[[], object] = once
    if captured:  # which changes no tensor: warming does, on a cache of its own
        replay = _captured(once, device, warm).replay
    else:
        warm()
    token_B1.copy_(first_B1)
    seen = []
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(tokens):
        replay()
        seen.append(token_B1.clone())
    wait_for(device)
    return torch.cat(seen, 1), (time.perf_counter() - begin) / tokens


# Two processes.


def two_ranks(sizes: CheckSizes) -> Iterator[GpuCheck]:
    """Gradients averaged over two GPUs by NCCL; in a rehearsal over two processes by gloo."""
    yield GpuCheck("devices", "two processes", partial(_in_two_processes, sizes))


def _in_two_processes(sizes: CheckSizes) -> Timed:
    library = "NCCL" if sizes.is_gpu else "gloo"
    claim = f"gradients averaged over two processes by {library} that differ from one's"
    if sizes.is_gpu and torch.cuda.device_count() < 2:
        yield fact(claim, "not checked: needs two GPUs")
        return
    environ = clean_environment(interpret=not sizes.is_gpu) | ({} if sizes.is_gpu else {"GLOO_SOCKET_IFNAME": "lo"})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ranks = [
            stack.enter_context(ChildProcess(f"rank {rank}", ("-m", "nsa.check.timing_checks"), environ))
            for rank in range(2)
        ]
        for rank, child in enumerate(ranks):
            child.send(rank=rank, rendezvous=str(Path(folder) / "store"), rehearse=not sizes.is_gpu)
        try:
            answers = [answer for child in ranks for answer in child.messages(limit_s=_RANKS_TIMEOUT_S)]
        except ChildFailed as error:
            yield CheckResult(claim, CheckStatus.FAILS, note=str(error))
            return
    yield bounded(claim, sum(answer["differing"] for answer in answers), 0)
    speed = min(answer["gb_s"] for answer in answers)
    yield fact(f"all-reduce between two processes, {library}", f"{speed:.1f} GB/s" if sizes.is_gpu else "not timed")


def _answer_as_rank(write: Callable[..., None], rank: int, rendezvous: str, *, rehearse: bool) -> None:
    """Average the gradients of two inputs over two processes, and compute the same alone."""
    device = torch.device("cpu") if rehearse else torch.device("cuda", rank)
    if not rehearse:
        torch.cuda.set_device(device)
    case = (rehearsal(full=False) if rehearse else on_gpu(device, full=False)).module
    case = replace(case, device=device)
    dist.init_process_group("gloo" if rehearse else "nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    module = case.attention()

    def gradients(seed: int) -> Results:
        out = module(case.tokens(seed=seed))
        names, weights = zip(*module.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(out.float().square().sum(), weights), strict=True))

    mine, others = gradients(rank), gradients(1 - rank)
    alone = {name: mine[name] + others[name] for name in mine}
    for gradient in mine.values():
        dist.all_reduce(gradient)
    buffer = torch.ones(_REDUCED_BYTES[device.type] // 4, device=device)
    best = float("inf")
    for _ in range(_REPEATS):
        wait_for(device)
        begin = time.perf_counter()
        dist.all_reduce(buffer)
        wait_for(device)
        best = min(best, time.perf_counter() - begin)
    write(differing=differing("", mine, alone).measured, gb_s=buffer.nbytes / best / 1e9)
    dist.destroy_process_group()


# Speed beside dense attention.


def speed(sizes: CheckSizes) -> Iterator[GpuCheck]:
    if not sizes.full:
        return
    s, device = sizes.speed, sizes.device.type
    tasks = [
        BenchTask("attention", s.shape, length, dtype, backward, device=device)
        for dtype in s.dtypes
        for length in s.lengths
        for backward in s.backward
    ]
    tasks += [BenchTask("decode", s.shape, n, dtype, device=device) for dtype in s.dtypes for n in s.decode_lengths]
    tasks += [
        BenchTask("attention", shape, length, s.dtypes[0], True, part, device=device)
        for shape, part in s.parts
        for length in s.kernel_lengths
    ]
    tasks.sort(key=lambda task: (task.dtype != s.dtypes[0], task.length not in s.kernel_lengths))  # the telling ones
    for task in tasks:
        yield GpuCheck("speed", _described(task), partial(_measure, sizes, task))
    for length in s.memory_lengths:
        task = BenchTask("attention", s.shape, length, s.dtypes[0], True, device=device)
        yield GpuCheck("speed", f"memory, {_described(task)}", partial(_memory, sizes, task))


def _described(task: BenchTask) -> str:
    of = f" {task.part}, {task.shape.n_heads} heads, {task.shape.n_kv_groups} groups" if task.part != "all" else ""
    wide = f", width {task.shape.d_k}" if task.part == "all" and task.shape.d_k > 64 else ""
    return f"{task.op}{of}{wide}{' fwd+bwd' * task.backward}, {task.dtype}, {spell(task.length)}"


def _measure(sizes: CheckSizes, task: BenchTask) -> Timed:
    threads = len(available_cores())
    peaks = _measured_peaks(sizes) if sizes.is_gpu else None
    ours = [BACKEND, "flash"] if task.part in flash.SERVED else [BACKEND]
    with pinned(threads):
        measurement = measure(
            task, choose_implementations(ours, with_peers=task.op == "attention"), data="random", threads=threads,
            budget_s=sizes.speed.budget_s, peaks=peaks, log=lambda text: None,
        )  # fmt: skip
    model = modelled(sizes, task, describe_device(sizes.device)["name"]) if sizes.is_gpu else None
    record = measurement.to_json() | {"modelled": model}
    rows = [(*row, _modelled_cell(model) if row[3] == BACKEND else "") for row in report.rows(measurement)]
    yield MeasuredTable(record, rows, report.notes(measurement))
    yield _result(measurement, model, sizes)


def _result(measurement: BenchMeasurement, model: dict[str, float] | None, sizes: CheckSizes) -> CheckResult:
    """Holds if the timed implementation is correct; the ratio itself has no limit."""
    ours = next(entry for entry in measurement.entries if entry.name == BACKEND)
    claim = f"{_described(measurement.task)}, × dense"
    if ours.absent or not ours.agreement.agrees:
        return CheckResult(claim, CheckStatus.FAILS, None, None, ours.absent or ours.agreement.reason)
    if not sizes.is_gpu:
        return CheckResult(claim, CheckStatus.HOLDS, None, None, f"the output is correct; {_NOT_TIMED}")
    took = report.seconds(ours.time_s.median) if ours.time_s else "–"
    prediction = f"modelled {_modelled_cell(model)} without host time" if model else "not modelled"
    ratio = ours.ratio.median if ours.ratio else None
    return CheckResult(claim, CheckStatus.HOLDS, ratio, None, "; ".join(filter(None, (took, prediction, ours.refused))))


def _modelled_cell(model: dict[str, float] | None) -> str:
    return f"{report.seconds(model['seconds'])}, {model['ratio']:.2f}×" if model else "–"


def _memory(sizes: CheckSizes, task: BenchTask) -> Timed:
    measured = measure_memory(
        all_implementations()[BACKEND], task, sizes.speed.shape_name, threads=len(available_cores()),
        timeout_s=_MEMORY_TIMEOUT_S,
    )  # fmt: skip
    yield MeasuredTable(measured, [report.memory_row(measured)], [], "memory")
    claim = f"memory above the inputs, {_described(task)}, MiB"
    verdict = CheckStatus.FAILS if measured["absent"] else CheckStatus.HOLDS
    yield CheckResult(claim, verdict, measured["peak_mib"], None, measured["absent"])


def modelled(sizes: CheckSizes, task: BenchTask, gpu_name: str) -> dict[str, float] | None:
    """Modelled seconds, dense seconds and ratio from the table; None for a GPU, shape or operation not in it."""
    if (task.op, task.part, task.shape) != ("attention", "all", sizes.speed.shape):
        return None
    return predictions().get((gpu_of_model(gpu_name), task.length, task.dtype, task.backward))


if __name__ == "__main__":
    answer_parent(_answer_as_rank)
