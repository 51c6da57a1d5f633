"""Small calls of every kernel, with the reference's results: what the CLI, the tests and the fault drill emulate.

Shapes are the base model's (12 heads in 2 groups, rows of 64), lengths as short as reaches every loop several times.

B batch · S queries · T keys · G kv groups · R heads per group · K key dim · V value dim
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nsa.bench.case import SHAPES, BenchShape
from nsa.check.cases import KernelCase
from nsa.check.comparison import (
    SELECTION_LIMIT,
    CheckResult,
    blocks_error,
    bounded,
    poisoned_memory,
    relative_rms,
)
from nsa.check.decode_case import StepCase
from nsa.check.kernel_call import CPU, NAMES, KernelCall, QueryPositions
from nsa.check.kernel_checks import LayerCase
from nsa.core.positions import packed_layout, plain_layout
from nsa.geometry import Geometry
from nsa.kernels import reference
from nsa.kernels.interface import CachedKeys, CacheView, one_page_per_row
from nsa.kernels.registry import BACKENDS
from nsa.kernels.triton import block_index

LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Relative RMS error against the reference in fp64."""
BASE = SHAPES["base"]
WIDE = BenchShape(16, 1, 192, 128, BASE.geometry)
"""One group of the paper's shape: rows in two parts."""
LATE_KEYS, LATE_QUERIES = 3300, 12
"""A few queries at the end of a long row: several tiles of compressed keys, and more blocks than are chosen."""
PACKED = (0, 1, 50, 150)
"""Ends of the documents of a row of 150 tokens."""
SMALL_WINDOW = replace(BASE, geometry=replace(BASE.geometry, w=40))
"""A window that rows of 150 tokens exceed."""
THIN = BenchShape(1, 1, 16, 16, Geometry(l=32, d=16, l_sel=64, n_sel=4, w=40))
"""One narrow head, so that rows may be long: more queries than one program of `bounds` takes."""
LONG = (0, 1, 400, 1150)
WINDOWS_PER_CHUNK = 2
"""Of the case of long rows, where a program takes several chunks of queries: from 131,072 keys on otherwise."""
SHORT = (0, 1, 20, 110)
LONG_RUNS = (0, 200)
"""Four chunks of 64 queries, the last one of 8."""
PLAIN = (0, 150)
"""One document: tiles of keys and windows that every row of a tile sees, whose loops run without masks."""
LATE = ()


@cache
def _call(dtype: torch.dtype, documents: tuple[int, ...], shape: BenchShape = BASE) -> KernelCall:
    """Packed documents; without any, a few queries at the end of a long row."""
    g = shape.geometry
    if documents:
        n = documents[-1]
        of_one = plain_layout(1, n, g, CPU) if len(documents) == 2 else None
        *positions, begin, _ = of_one or packed_layout(torch.tensor(documents), n, g)
        return KernelCall(shape.kernel, QueryPositions(*positions), n, begin.shape[1], dtype)
    pos = torch.arange(LATE_KEYS - LATE_QUERIES, LATE_KEYS)[None]
    zero = torch.zeros_like(pos)
    return KernelCall(shape.kernel, QueryPositions(pos, zero, zero), LATE_KEYS, g.n_compressed(LATE_KEYS), dtype)


@cache
def _exact(call: KernelCall, branch: str) -> list[Tensor]:
    return call.truth(branch)


def _attention(
    branch: str, documents: tuple[int, ...], dtype: torch.dtype, shape: BenchShape = BASE
) -> list[CheckResult]:  # fmt: skip
    call = _call(dtype, documents, shape)
    got, want = call.by_kernel("triton", branch, CPU), _exact(call, branch)
    return [bounded(name, relative_rms(x, y), LIMITS[dtype]) for name, x, y in zip(NAMES, got, want, strict=True)]


def _layer(documents: tuple[int, ...], dtype: torch.dtype) -> list[CheckResult]:
    """The operator of a whole layer."""
    layer = LayerCase(_call(dtype, documents), "triton", CPU)
    got = layer.run()
    want = layer.by_branches("reference", CPU, torch.float64, got["blocks"])
    return [bounded(name, relative_rms(got[name], x), LIMITS[dtype]) for name, x in want.items()]


def _selection(documents: tuple[int, ...], dtype: torch.dtype) -> list[CheckResult]:
    """Alone, and with the compressed branch, whose log-sum-exp it then uses."""
    call = _call(dtype, documents)
    sizes, q, keys, where = call.choosing, call.q_BSGRK, call.compressed, (call.layout.pos_BS, call.layout.first_BS)
    together = BACKENDS["triton"].compressed_and_select
    assert together is not None
    out, with_branch = together(q, *keys, *where, **sizes)
    alone = BACKENDS["triton"].functions.select(q, keys[0], *where, **sizes)
    exact_compressed = BACKENDS["reference"].functions.compressed
    exact = exact_compressed(q.double(), *(x.double() for x in keys), *where, **sizes)
    assert isinstance(exact, Tensor)
    figures = [bounded("out", relative_rms(out, exact), LIMITS[dtype])]
    for name, idx in (("with the branch", with_branch), ("alone", alone)):
        error = blocks_error(q, keys[0], *where, idx, call.geometry, call.scale).max().item()
        figures.append(bounded(f"blocks, {name}", error, SELECTION_LIMIT))
    return figures


def _decode(dtype: torch.dtype) -> list[CheckResult]:
    """One new token for two rows of a cache, the second beyond its window."""
    lengths, g, s = torch.tensor([70, 1400]), BASE.geometry, BASE
    capacity, batch = 1408, 2
    generator = torch.Generator().manual_seed(0)

    def tensor(*sizes: int) -> Tensor:
        return torch.randn(batch, *sizes, generator=generator).to(dtype)

    def keys(n: int) -> tuple[Tensor, Tensor]:
        return tensor(n, s.n_kv_groups, s.d_k), tensor(n, s.n_kv_groups, s.d_v)

    pos = lengths[:, None] - 1
    zero = torch.zeros_like(pos)
    n_compressed = g.n_compressed(capacity)
    compressed, selected, window = keys(n_compressed), keys(g.n_blocks(capacity) * g.l_sel), keys(g.w)
    q = tensor(1, s.n_kv_groups, s.heads_per_group, s.d_k)
    gates = torch.rand(batch, 1, s.n_kv_groups, s.heads_per_group, 3, generator=generator)
    window_pos = pos.clamp(max=g.w - 1)
    done = ((lengths - g.l) // g.d + 1).clamp(min=0)
    in_cache = [
        CachedKeys(one_page_per_row(*x), at, zero)
        for x, at in ((compressed, pos), (selected, pos), (window, window_pos))
    ]
    view = CacheView(one_page_per_row(*keys(g.l)), in_cache[0], in_cache[1], in_cache[2], lengths, done)
    build = BACKENDS["triton"].decoder
    assert build is not None
    scale = float(s.d_k**-0.5)
    decoder = build(view, heads_per_group=s.heads_per_group, means=True, geometry=g, scale=scale)
    out, idx = decoder.attend(q, gates)
    exact = BACKENDS["reference"].functions
    sizes: dict[str, Any] = dict(geometry=g, scale=scale)
    wide = q.double()
    k_c, v_c, k_s, v_s, k_w, v_w = (x.double() for pair in (compressed, selected, window) for x in pair)
    branches: list[Any] = [
        exact.compressed(wide, k_c, v_c, pos, zero, **sizes),
        exact.selected(wide, k_s, v_s, idx, pos, zero, **sizes),
        exact.sliding(wide, k_w, v_w, window_pos, zero, **sizes),
    ]
    worst = blocks_error(q, compressed[0], pos, zero, idx, g, scale).max().item()
    want = reference.mix(gates.double(), *branches)
    return [
        bounded("out", relative_rms(out, want), LIMITS[dtype]),
        bounded("blocks", worst, SELECTION_LIMIT),
    ]


def _step(dtype: torch.dtype) -> list[CheckResult]:
    """A layer's new tokens, appended by the step itself; the second one ends a compressed block in both rows."""
    case = StepCase(KernelCase(BASE.kernel, (PLAIN,)), dtype)
    return case.compare(case.run("triton", CPU), CPU)


def _mix(dtype: torch.dtype) -> list[CheckResult]:
    generator = torch.Generator().manual_seed(0)
    s = BASE
    gates = torch.rand(1, 37, s.n_kv_groups, s.heads_per_group, 3, generator=generator)
    heads = (1, 37, s.n_kv_groups, s.heads_per_group, s.d_v)
    branches = [torch.randn(heads, generator=generator).to(dtype) for _ in range(3)]
    dout = torch.randn(heads, generator=generator).to(dtype)

    def run(mix: Callable[..., Tensor], to: torch.dtype | None) -> list[Tensor]:
        leaves = [x.detach().to(to or x.dtype).requires_grad_() for x in (gates, *branches)]
        out = mix(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    got, want = run(BACKENDS["triton"].mix, None), run(reference.mix, torch.float64)
    names = ("out", "dgates", "dcompressed", "dselected", "dsliding")
    return [
        bounded(n, relative_rms(x, y), LIMITS[dtype]) for n, x, y in zip(names, got, want, strict=True)
    ]  # fmt: skip


def _in_long_runs(dtype: torch.dtype) -> list[CheckResult]:
    """The block index as of a long row, where a program takes several chunks: runs of three and of one."""
    before = block_index.WINDOWS_PER_CHUNK
    block_index.WINDOWS_PER_CHUNK = WINDOWS_PER_CHUNK
    try:
        return _attention("selected", LONG_RUNS, dtype)
    finally:
        block_index.WINDOWS_PER_CHUNK = before


def run_case(name: str, dtype: torch.dtype) -> list[CheckResult]:
    """Run a case in memory that holds NaN until it is written: what a store leaves out shows in the numbers."""
    with poisoned_memory():
        return CASES[name](dtype)


CASES: dict[str, Callable[[torch.dtype], list[CheckResult]]] = {
    "sliding": lambda dtype: _attention("sliding", PACKED, dtype),
    "compressed": lambda dtype: _attention("compressed", PACKED, dtype),
    "selected": lambda dtype: _attention("selected", SHORT, dtype),
    "sliding_plain": lambda dtype: _attention("sliding", PLAIN, dtype),
    "selected_plain": lambda dtype: _attention("selected", PLAIN, dtype),
    "compressed_late": lambda dtype: _attention("compressed", LATE, dtype),
    "sliding_small_window": lambda dtype: _attention("sliding", PACKED, dtype, SMALL_WINDOW),
    "selected_long_runs": _in_long_runs,
    "sliding_long": lambda dtype: _attention("sliding", LONG, dtype, THIN),
    "compressed_long": lambda dtype: _attention("compressed", LONG, dtype, THIN),
    "selected_long": lambda dtype: _attention("selected", LONG, dtype, THIN),
    "selected_late": lambda dtype: _attention("selected", LATE, dtype),
    "select": lambda dtype: _selection(SHORT, dtype),
    "select_late": lambda dtype: _selection(LATE, dtype),
    "sliding_wide": lambda dtype: _attention("sliding", SHORT, dtype, WIDE),
    "selected_wide": lambda dtype: _attention("selected", SHORT, dtype, WIDE),
    "layer": lambda dtype: _layer(SHORT, dtype),
    "layer_plain": lambda dtype: _layer(PLAIN, dtype),
    "decode": _decode,
    "step": _step,
    "mix": _mix,
}
"""Cases by name: forward and backward where there is one."""
