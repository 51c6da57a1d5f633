"""Compile report of one kernel: compiled ahead of time for a GPU that is not present, its machine code inspected."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import triton
from triton.compiler import ASTSource

from nsa.bench.case import BASE_GEOMETRY, SHAPES, BenchShape
from nsa.gpus import ARCHITECTURES as GPUS
from nsa.gpus import GpuArchitecture
from nsa.kernels.triton import (
    PIECE,
    append,
    block_index,
    bounds,
    decode,
    mix,
    range_attention,
    selected,
    selected_backward,
    selection,
)
from nsa.kernels.triton.range_attention import ROWS_ADDED
from nsa.kernels.triton.selected import block_of, columns, keys_of, rows_of
from nsa.kernels.triton.selected_backward import adding_warps
from nsa.kernels.triton.selection import select_sizes
from nsa.kernels.triton.tile import VARYING
from nsa.kernels.triton.tuning import TileSizes, choose, split_width, widths
from proofs.compile_report.machine_code import MachineCode, compile_target, read


@dataclass(frozen=True)
class CompiledShape:
    """Sizes and dtype that kernels are compiled for."""

    shape: BenchShape
    dtype: str = "bf16"

    @property
    def element_size(self) -> int:
        return 4 if self.dtype == "fp32" else 2


MODELS = {
    **{name: CompiledShape(SHAPES[name]) for name in ("base", "gqa16", "paper")},
    "width128": CompiledShape(BenchShape(32, 4, 128, 128, BASE_GEOMETRY)),
    "n_sel32": CompiledShape(BenchShape(12, 2, 64, 64, replace(BASE_GEOMETRY, n_sel=32))),
}
FP32_MODELS = {
    "base": CompiledShape(SHAPES["base"], "fp32"),
    "128": CompiledShape(BenchShape(12, 2, 128, 128, BASE_GEOMETRY), "fp32"),
    "paper": CompiledShape(SHAPES["paper"], "fp32"),
}
"""Kernels for checking, not for speed: they must fit into shared memory, and may spill."""


@dataclass(frozen=True)
class CompileJob:
    kernel: str
    function: Any
    constants: dict[str, Any]
    warps: int
    stages: int
    dtype: str
    """Element types of the input and output tensors."""


@dataclass(frozen=True)
class CompileReport:
    kernel: str
    model: str
    gpu: str
    tile: str
    code: MachineCode
    programs_per_unit: int
    """Programs that fit on one multiprocessor or compute unit at a time."""

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "CompileReport":
        return cls(**{**entry, "code": MachineCode(**entry["code"])})

    def faults(self) -> list[str]:
        return self.code.faults(GPUS[self.gpu])


def jobs(
    model: CompiledShape, gpu: str, tiles_by_kernel: Mapping[str, TileSizes] | None = None
) -> Iterator[CompileJob]:
    """Every kernel with its launcher's constants and its tiles: of `tiles_by_kernel`, else of the tuning table."""
    s, g = model.shape, model.shape.geometry
    sizes: dict[str, Any] = dict(G=s.n_kv_groups, R=s.heads_per_group, WIDE=False)
    broad: dict[str, Any] = widths(s.d_k, s.d_v)
    width = max(s.d_k, s.d_v)
    keys: dict[str, Any] = {name: broad[name] for name in ("K", "K1", "K2")}
    of_keys: dict[str, Any] = widths(s.d_k, s.d_k)

    def tiles_for(kernel: str) -> TileSizes:
        return (tiles_by_kernel or {}).get(kernel) or choose(kernel, width, gpu, element_size=model.element_size)

    def job(kernel: str, function: Any, tiles_of: str = "", n: int = 0, **constants: Any) -> CompileJob:
        tiles = tiles_for(tiles_of or kernel)
        blocks = dict(BLOCK_M=constants.pop("BLOCK_M", tiles.m), BLOCK_N=n or tiles.n)
        return CompileJob(kernel, function, {**sizes, **constants, **blocks}, tiles.warps, tiles.stages, model.dtype)

    yield job("range_forward", range_attention.range_forward_kernel, **broad, VALUES=True)
    yield job("range_dq", range_attention.range_dq_kernel, dlse=None, **broad)
    yield job("range_dkv", range_attention.range_dkv_kernel, **broad)
    chosen: dict[str, Any] = dict(N=g.n_sel, L=g.l_sel)
    for kernel, function in (
        ("selected_forward", selected.selected_forward_kernel),
        ("selected_backward", selected_backward.selected_backward_kernel),
    ):
        n, cuts = keys_of(tiles_for(kernel), g.l_sel)
        yield job(kernel, function, n=n, PIECE=PIECE, **chosen, **broad)
    k, v = columns("K", s.d_k), columns("V", s.d_v)
    of_k, of_v = (dict(G=s.n_kv_groups, R=s.heads_per_group, BLOCK_M=rows_of(width)) for width in (s.d_k, s.d_v))
    for kernel, function, constants in (
        ("merge_slots", selected.merge_slots_kernel, dict(**of_v, **v, **chosen, CUTS=cuts, HEADS=1)),
        ("delta", selected_backward.delta_kernel, dict(**of_v, **v, dlse=None)),
        ("add_slots", selected_backward.add_slots_kernel, dict(**of_k, **k, **chosen, CUTS=cuts)),
        ("add_parts", range_attention.add_parts_kernel, dict(**broad, BLOCK_M=ROWS_ADDED)),
        ("add_pieces", selected_backward.add_pieces_kernel,
         dict(G=s.n_kv_groups, **broad, L=g.l_sel, BLOCK_N=block_of(g.l_sel))),
    ):  # fmt: skip
        warps = adding_warps(s.d_k, s.d_v) if kernel == "add_pieces" else 4
        yield CompileJob(kernel, function, constants, warps, 2, model.dtype)
    yield job("select_lse", range_attention.range_forward_kernel, "range_forward", **of_keys, VALUES=False)
    tiles = tiles_for("select")
    per = select_sizes(g, tiles)
    constants = dict(G=s.n_kv_groups, WIDE=False, **keys, **per)
    yield CompileJob("select", selection.select_kernel, constants, tiles.warps, tiles.stages, model.dtype)
    tiles = tiles_for("decode")
    sizes_of_step = (s.n_kv_groups, s.heads_per_group, s.d_k, s.d_v, g, tiles)
    step, merged = (decode.constants(*sizes_of_step, wide=False, merged=one) for one in (False, True))
    by_tiles, small = (tiles.warps, tiles.stages), (4, 2)
    entries = dict(PAGE=g.l_sel // g.d)
    for kernel, function, constants, options in (
        ("decode_compressed", decode.decode_compressed_kernel, {**step.compressed, **entries}, by_tiles),
        ("decode_append", decode.decode_append_kernel, {**step.compressed, **entries, **_appending(s)}, by_tiles),
        ("decode_score", decode.decode_score_kernel, step.score, small),
        ("decode_raw", decode.decode_raw_kernel, {**step.raw, "PAGE": g.l_sel, "WINDOW_PAGE": g.w}, by_tiles),
        ("decode_merge", decode.decode_merge_kernel, {**step.merge, **_counting(s)}, small),
        ("decode_merged_compressed", decode.decode_compressed_kernel, {**merged.compressed, **entries}, by_tiles),
        ("decode_merged_merge", decode.decode_merge_kernel, {**merged.merge, **_counting(s)}, small),
    ):
        yield CompileJob(kernel, function, constants, *options, model.dtype)
    yield from _around(model, tiles_for("range_dkv").n)


def _appending(s: BenchShape) -> dict[str, int]:
    """Constants of an append to streams of their own, φ as by default."""
    g = s.geometry
    return dict(
        TAIL_PAGE=g.l, TOKEN_PAGE=g.l_sel, WINDOW_PAGE=g.w, KEY_STREAMS=3, VALUE_STREAMS=3, HALF=s.d_k // 2,
        NORMED=True, POOLING=append.SOFTMAX.value, TURNS_ENTRIES=True, OWN_TAIL=True, OWN_WINDOW=True, ATTENDS=True,
    )  # fmt: skip


def _counting(s: BenchShape) -> dict[str, int]:
    """Constants of a merge at the end of a step, gates as by default."""
    return dict(GATE=decode.SOFTMAX_GATES.value, GATES=s.heads_per_group, BRANCHES=3, COUNTS=True)


def _around(model: CompiledShape, keys_of_dkv: int) -> Iterator[CompileJob]:
    """Bounds, indices and the gate mix, as their launchers call them."""
    s, g = model.shape, model.shape.geometry

    def job(function: Any, warps: int = 4, **constants: int | None) -> CompileJob:
        return CompileJob(function.fn.__name__.removesuffix("_kernel"), function, constants, warps, 2, model.dtype)

    yield job(bounds.bounds_kernel, W=g.w, L=g.l, D=g.d, CHUNK=bounds.CHUNK)
    yield job(bounds.seen_by_kernel, N=keys_of_dkv, CHUNK=bounds.CHUNK, BLOCK=bounds.CHUNKS)
    sizes = block_index.chunk_sizes(g.n_sel, g.l_sel)
    warps = block_index.sorting_warps(sizes)
    yield job(block_index.sort_chunks_kernel, warps, G=s.n_kv_groups, **sizes)
    yield job(block_index.place_chunks_kernel, RUNS=block_index.RUNS, BINS=block_index.BINS)
    yield job(block_index.place_windows_kernel, PIECE=PIECE, BLOCK=block_index.PLACES)
    yield job(block_index.fill_kernel, warps, G=s.n_kv_groups, **sizes, BLOCK=block_index.PLACES)
    v = split_width(s.d_v)
    yield job(mix.mix_forward_kernel, HEADS=1, V=v.n, V1=v.main, V2=v.rest, BLOCK=mix.block_of(v.n))
    yield job(mix.mix_backward_kernel, dlse=None, HEADS=1, V=v.n, V1=v.main, V2=v.rest, BLOCK=mix.block_of(v.n))


_ROWS = ("new_q", "new_k", "new_v", "q_weight", "k_weight", "phi_k", "phi_k2", "phi_v", "phi_v2", "tail_k", "tail_v",
         "token_k", "token_v",
         "q", "k", "v", "window_k", "window_v", "out", "dout", "dq", "dk", "dv", "mixed", "compressed", "selected",
         "sliding", "dmixed", "dcompressed", "dselected", "dsliding", "slot", "dq_other",
         "window_dk", "window_dv")  # fmt: skip
_POINTERS = {
    **dict.fromkeys(
        ("lse", "delta", "dk_part", "dv_part", "part", "part_lse", "slot_lse", "scores", "gates", "dgates",
         "window_dk_part", "window_dv_part", "cos", "sin"), "*fp32",
    ),
    **dict.fromkeys(("position", "origin", "window_position", "window_origin", "best", "length",
                    "done"), "*i64"),
    **dict.fromkeys(
        ("lo", "hi", "last", "begins", "idx", "seen_first", "seen_end", "pairs",
         "offsets", "piece_window", "piece_first", "reach", "ahead", "entries", "ranks", "counts", "before",
         "totals", "table", "window_table", "window_lo", "window_hi", "window_reach", "window_ahead",
         "window_seen_first", "window_seen_end", "tail_table", "token_table"), "*i32",
    ),
    **dict.fromkeys(("scale", "eps", "temperature"), "fp32"),
}  # fmt: skip


def source_of(job: CompileJob) -> ASTSource:
    """The kernel with the types and the divisibility that its launcher's arguments have."""
    types = {**dict.fromkeys(_ROWS, f"*{job.dtype}"), **_POINTERS}
    signature, attributes = {}, {}
    for position, name in enumerate(job.function.arg_names):
        signature[name] = "constexpr" if name in job.constants else types.get(name, "i32")
        is_stride = name.endswith(("_b", "_s", "_g", "_r", "_t", "_p"))
        # As the JIT compiler specializes on real tensors.
        if (signature[name].startswith("*") or is_stride) and name not in VARYING:
            attributes[(position,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=job.function, signature=signature, constexprs=job.constants, attrs=attributes)


def compile_for(job: CompileJob, gpu: GpuArchitecture) -> Any:
    options = dict(num_warps=job.warps, num_stages=job.stages)
    return triton.compile(source_of(job), target=compile_target(gpu), options=options)


def inspect(job: CompileJob, model: str, gpu_name: str) -> CompileReport:
    gpu = GPUS[gpu_name]
    code = read(compile_for(job, gpu), gpu)
    by_registers = gpu.registers_per_unit // max(1, code.registers * job.warps * gpu.warp_size)
    by_shared = gpu.shared_per_unit // max(1, code.shared_bytes)
    programs = min(by_registers, by_shared, gpu.warps_per_unit // job.warps)
    shape = [str(job.constants[name]) for name in ("BLOCK_M", "BLOCK_Q", "BLOCK_N", "KEEP") if name in job.constants]
    tile = ", ".join(filter(None, ("×".join(shape), f"{job.warps} warps", f"{job.stages} stages")))
    return CompileReport(job.kernel, model, gpu_name, tile, code, programs)
