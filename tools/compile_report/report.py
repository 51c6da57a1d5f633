"""What each kernel becomes on a GPU that is not here: compiled ahead of time, its machine code read, nothing run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.compiler import ASTSource

from nsa.geometry import Geometry
from nsa.gpus import ARCHITECTURES as GPUS
from nsa.gpus import GpuArchitecture
from nsa.kernels.triton import PIECE, block_index, bounds, mix
from nsa.kernels.triton import decode as launch_decode
from nsa.kernels.triton.device import decode, range_backward, range_forward, selected_backward, selected_forward
from nsa.kernels.triton.device import select as selection
from nsa.kernels.triton.head_dims import split_width, widths
from nsa.kernels.triton.machine_code import MachineCode, compile_target, read
from nsa.kernels.triton.selected import block_of, columns, keys_of, rows_of
from nsa.kernels.triton.selection import select_sizes
from nsa.kernels.triton.tuning import TileSizes, choose

PAPER_GEOMETRY = Geometry(l=32, d=16, l_sel=64, n_sel=16, w=512)


@dataclass(frozen=True)
class CompiledShape:
    """Sizes that kernels are compiled for."""

    groups: int
    heads_per_group: int
    d_k: int
    d_v: int
    geometry: Geometry = PAPER_GEOMETRY
    dtype: str = "bf16"

    @property
    def element_size(self) -> int:
        return 4 if self.dtype == "fp32" else 2


MODELS = {"base": CompiledShape(2, 6, 64, 64), "paper": CompiledShape(4, 16, 192, 128)}
FP32_MODELS = {
    "base": CompiledShape(2, 6, 64, 64, dtype="fp32"),
    "128": CompiledShape(2, 6, 128, 128, dtype="fp32"),
    "paper": CompiledShape(4, 16, 192, 128, dtype="fp32"),
}
"""For checking, not for speed: they have to fit, and may spill."""


@dataclass(frozen=True)
class CompileJob:
    kernel: str
    function: Any
    constants: dict[str, Any]
    warps: int
    stages: int
    dtype: str
    """Of the tensors that come from outside and go back there."""


@dataclass(frozen=True)
class CompileReport:
    kernel: str
    model: str
    gpu: str
    tile: str
    code: MachineCode
    programs_per_unit: int
    """That fit on one multiprocessor or compute unit at a time."""

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "CompileReport":
        return cls(**{**entry, "code": MachineCode(**entry["code"])})

    def faults(self) -> list[str]:
        return self.code.faults(GPUS[self.gpu])


def jobs(
    model: CompiledShape, gpu: str, tiles_by_kernel: Mapping[str, TileSizes] | None = None
) -> Iterator[CompileJob]:
    """Every kernel with the constants its launcher gives it, and the table's tiles, but for those that are given."""
    sizes: dict[str, Any] = dict(G=model.groups, R=model.heads_per_group, WIDE=False)
    broad: dict[str, Any] = widths(model.d_k, model.d_v)
    width = max(model.d_k, model.d_v)
    keys: dict[str, Any] = {name: broad[name] for name in ("K", "K1", "K2")}

    def tiles_for(kernel: str) -> TileSizes:
        return (tiles_by_kernel or {}).get(kernel) or choose(kernel, width, gpu, element_size=model.element_size)

    def job(kernel: str, function: Any, tiles_of: str = "", n: int = 0, **constants: Any) -> CompileJob:
        tiles = tiles_for(tiles_of or kernel)
        blocks = dict(BLOCK_M=constants.pop("BLOCK_M", tiles.m), BLOCK_N=n or tiles.n)
        return CompileJob(kernel, function, {**sizes, **constants, **blocks}, tiles.warps, tiles.stages, model.dtype)

    yield job("runs_forward", range_forward.runs_forward_kernel, **broad)
    yield job("runs_dq", range_backward.runs_dq_kernel, dlse=None, **broad)
    yield job("runs_dkv", range_backward.runs_dkv_kernel, PARTS=4, **broad)
    chosen: dict[str, Any] = dict(N=model.geometry.n_sel, L=model.geometry.l_sel)
    for kernel, function in (
        ("selected_forward", selected_forward.selected_forward_kernel),
        ("selected_backward", selected_backward.selected_backward_kernel),
    ):
        n, cuts = keys_of(tiles_for(kernel), model.geometry.l_sel)
        yield job(kernel, function, n=n, PIECE=PIECE, **chosen, **broad)
    k, v, x = columns("K", model.d_k), columns("V", model.d_v), columns("X", model.d_v)
    of_k, of_v = (
        dict(G=model.groups, R=model.heads_per_group, BLOCK_M=rows_of(width)) for width in (model.d_k, model.d_v)
    )
    for kernel, function, constants in (
        ("merge_slots", selected_forward.merge_slots_kernel, dict(**of_v, **v, **chosen, CUTS=cuts)),
        ("delta", selected_backward.delta_kernel, dict(**of_v, **v)),
        ("add_slots", selected_backward.add_slots_kernel, dict(**of_k, **k, **chosen, CUTS=cuts)),
        ("add_pieces", selected_backward.add_pieces_kernel,
         dict(G=model.groups, **x, L=model.geometry.l_sel, BLOCK_N=block_of(model.geometry.l_sel), MORE=False)),
    ):  # fmt: skip
        yield CompileJob(kernel, function, constants, 4, 2, model.dtype)
    yield job("select_lse", selection.runs_lse_kernel, "runs_forward", **keys)
    tiles = tiles_for("select")
    per = select_sizes(model.geometry, tiles)
    constants = dict(G=model.groups, WIDE=False, **keys, **per)
    yield CompileJob("select", selection.select_kernel, constants, tiles.warps, tiles.stages, model.dtype)
    tiles = tiles_for("decode")
    step = launch_decode.constants(
        model.groups, model.heads_per_group, model.d_k, model.d_v, model.geometry, tiles, wide=False
    )
    for kernel, function, constants, options in (
        ("decode_compressed", decode.decode_compressed_kernel, step.compressed, (tiles.warps, tiles.stages)),
        ("decode_score", decode.decode_score_kernel, step.score, (4, 2)),
        ("decode_raw", decode.decode_raw_kernel, step.raw, (tiles.warps, tiles.stages)),
        ("decode_merge", decode.decode_merge_kernel, step.merge, (4, 2)),
    ):
        yield CompileJob(kernel, function, constants, *options, model.dtype)
    yield from _around(model, tiles_for("runs_dkv").n)


def _around(model: CompiledShape, keys_of_dkv: int) -> Iterator[CompileJob]:
    """Bounds, indices and the gate mix, as their launchers call them."""

    def job(function: Any, warps: int = 4, **constants: int) -> CompileJob:
        return CompileJob(function.fn.__name__.removesuffix("_kernel"), function, constants, warps, 2, model.dtype)

    yield job(bounds.bounds_kernel, W=0, L=model.geometry.l, D=model.geometry.d, CHUNK=bounds.CHUNK)
    yield job(bounds.seen_by_kernel, N=keys_of_dkv, CHUNK=bounds.CHUNK, BLOCK=bounds.CHUNKS)
    sizes = block_index.chunk_sizes(model.geometry.n_sel, model.geometry.l_sel)
    warps = block_index.sorting_warps(sizes)
    yield job(block_index.sort_chunks_kernel, warps, G=model.groups, **sizes)
    yield job(block_index.place_chunks_kernel, CHUNKS=block_index.CHUNKS, BINS=block_index.BINS)
    yield job(block_index.place_windows_kernel, PIECE=PIECE, BLOCK=block_index.PLACES)
    yield job(block_index.fill_kernel, warps, G=model.groups, **sizes)
    yield job(block_index.find_pieces_kernel, BLOCK=block_index.PLACES)
    v = split_width(model.d_v)
    for function in (mix.mix_forward_kernel, mix.mix_backward_kernel):
        yield job(function, HEADS=1, V=v.n, V1=v.main, V2=v.rest, BLOCK=mix.block_of(v.n))


_ROWS = ("q", "k", "v", "window_k", "window_v", "out", "dout", "dq", "dk", "dv", "mixed", "compressed", "selected",
         "sliding", "dmixed", "dcompressed", "dselected", "dsliding", "slot", "total")  # fmt: skip
_POINTERS = {
    **dict.fromkeys(
        ("lse", "delta", "dk_part", "dv_part", "part", "part_lse", "slot_lse", "scores", "gates", "dgates"), "*fp32",
    ),
    **dict.fromkeys(("position", "origin", "window_position", "window_origin", "best"), "*i64"),
    **dict.fromkeys(
        ("lo", "hi", "pos", "first", "last", "begins", "idx", "seen_first", "seen_end", "pairs",
         "offsets", "piece_window", "piece_first", "reach", "ahead", "entries", "run_begins", "run_ends", "before",
         "totals"), "*i32",
    ),
    "scale": "fp32",
}  # fmt: skip


def compile_for(job: CompileJob, gpu: GpuArchitecture) -> Any:
    types = {**dict.fromkeys(_ROWS, f"*{job.dtype}"), **_POINTERS}
    signature, attributes = {}, {}
    for position, name in enumerate(job.function.arg_names):
        signature[name] = "constexpr" if name in job.constants else types.get(name, "i32")
        is_stride = name.endswith(("_b", "_s", "_g", "_r", "_t"))
        if signature[name].startswith("*") or is_stride:  # as the just-in-time compiler finds them for real tensors
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=job.function, signature=signature, constexprs=job.constants, attrs=attributes)
    return triton.compile(source, target=compile_target(gpu), options=dict(num_warps=job.warps, num_stages=job.stages))


def inspect(job: CompileJob, model: str, gpu_name: str) -> CompileReport:
    gpu = GPUS[gpu_name]
    code = read(compile_for(job, gpu), gpu)
    by_registers = gpu.registers_per_unit // max(1, code.registers * job.warps * gpu.warp_size)
    by_shared = gpu.shared_per_unit // max(1, code.shared_bytes)
    programs = min(by_registers, by_shared, gpu.warps_per_unit // job.warps)
    shape = [str(job.constants[name]) for name in ("BLOCK_M", "BLOCK_Q", "BLOCK_N", "KEEP") if name in job.constants]
    tile = ", ".join(filter(None, ("×".join(shape), f"{job.warps} warps", f"{job.stages} stages")))
    return CompileReport(job.kernel, model, gpu_name, tile, code, programs)
