"""Decode check: token by token, ragged batches and CUDA graphs give the same output as the whole sequence."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from nsa.bench.case import TORCH_DTYPES
from nsa.check.gpu_check.check_result import CheckResult, CheckStatus, GpuCheck, MeasuredTable, bounded, needs_gpu
from nsa.check.gpu_check.near_ties import ForwardRecorder, RecordedForward, compared
from nsa.check.gpu_check.sizes import CheckSizes, attention, tokens
from nsa.core.kv_cache import LayerCache
from nsa.core.nsa_attention import NSAAttention

GRAPH_STEPS = 40  # more than a stride of compression, so that blocks are completed on the way


def checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    for dtype in scope.module_dtypes:
        yield GpuCheck("decode", f"token by token, {dtype}", partial(_token_by_token, scope, dtype))
        yield GpuCheck("decode", f"ragged batch, {dtype}", partial(_ragged, scope, dtype))
    dtype = scope.module_dtypes[-1]
    yield GpuCheck("decode", f"CUDA graph, {dtype}", partial(_graph, scope, dtype))


@torch.no_grad()
def _token_by_token(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    module = attention(scope, TORCH_DTYPES[dtype], ForwardRecorder())
    x = tokens(scope, TORCH_DTYPES[dtype])
    cache, prompt = module.new_cache(1, x.shape[1]), scope.module.prompt
    parts = [_record(module, part, cache) for part in x.split([prompt, *[1] * (x.shape[1] - prompt)], 1)]
    got = RecordedForward(
        torch.cat([part.out_BSD for part in parts], 1), torch.cat([part.idx_BSGN for part in parts], 1)
    )
    yield from compared(f"token by token = whole, {dtype}", module, got, _record(module, x))


@torch.no_grad()
def _ragged(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    """Each row gets its part of a first chunk, then its tokens one by one; padding has large values."""
    module = attention(scope, TORCH_DTYPES[dtype], ForwardRecorder())
    lengths = torch.tensor(scope.module.ragged, device=scope.device)
    x, prompt = tokens(scope, TORCH_DTYPES[dtype], len(lengths)), scope.module.prompt
    at_BS = torch.arange(x.shape[1], device=scope.device)
    x = torch.where((at_BS < lengths[:, None])[..., None], x, 100.0)
    cache, parts = module.new_cache(len(lengths), x.shape[1]), []
    for begin, part in zip([0, *range(prompt, x.shape[1])], x.split([prompt, *[1] * (x.shape[1] - prompt)], 1),
                           strict=True):  # fmt: skip
        new_lens = (lengths - begin).clamp(0, part.shape[1])
        out = module(part, cache=cache, new_lens_B=new_lens)
        parts.append(RecordedForward.of(module, out))
    claim, rows_of_row = f"rows of different lengths = each alone, {dtype}", []
    for row, length in enumerate(scope.module.ragged):
        got = RecordedForward(*(torch.cat([getattr(p, name)[row : row + 1] for p in parts], 1)[:, :length]
                     for name in ("out_BSD", "idx_BSGN")))  # fmt: skip
        want = _record(module, x[row : row + 1, :length])
        rows_of_row.append(list(compared(claim, module, got, want)))
    yield from (max(rows, key=_severity) for rows in zip(*rows_of_row, strict=True))


def _severity(row: CheckResult) -> tuple[bool, float]:
    assert isinstance(row.measured, float)
    return row.verdict is CheckStatus.FAILS, row.measured


def _record(module: NSAAttention, x: Tensor, cache: LayerCache | None = None) -> RecordedForward:
    out = module(x, cache=cache)
    return RecordedForward.of(module, out)


@torch.no_grad()
def _graph(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    """One step captured once and replayed: the cache's counters are on the device, so each replay is the next token."""
    claim = f"values of a replayed step that differ from the eager step, {dtype}"
    if not scope.is_gpu:
        yield needs_gpu(claim)
        return
    module = attention(scope, TORCH_DTYPES[dtype])
    x, prompt = tokens(scope, TORCH_DTYPES[dtype]), scope.module.prompt
    caches = [module.new_cache(1, x.shape[1]) for _ in range(3)]
    for cache in caches:
        module(x[:, :prompt], cache=cache)
    eager, captured, spare = caches
    token = x[:, prompt : prompt + 1].clone()
    stream = torch.cuda.Stream(scope.device)
    stream.wait_stream(torch.cuda.current_stream(scope.device))
    with torch.cuda.stream(stream):  # compile kernels and warm up libraries before capturing
        for _ in range(3):
            module(token, cache=spare)
    torch.cuda.current_stream(scope.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(token, cache=captured)
    differing = 0
    for t in range(prompt, prompt + GRAPH_STEPS):
        token.copy_(x[:, t : t + 1])
        graph.replay()
        differing += int((out != module(x[:, t : t + 1], cache=eager)).sum())
    yield bounded(claim, differing, 0)
