"""What each kernel becomes on a GPU that is not here: registers, spills, shared memory, matrix and copy instructions.

Kernels are compiled ahead of time for the target and the machine code is read; nothing is executed. The compiler does
not check shared memory, so it is compared with the device's limit here.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nsa.kernels.triton.device import runs_backward, runs_forward, selected_backward, selected_forward
from nsa.kernels.triton.device import select as selection
from nsa.kernels.triton.selected import PIECE, block_of, tile_of
from nsa.kernels.triton.selection import select_sizes
from nsa.kernels.triton.tuning import choose
from nsa.kernels.triton.widths import split_width, widths


@dataclass(frozen=True)
class Device:
    target: GPUTarget
    shared_limit: int
    """Bytes one program may have."""
    shared_per_unit: int
    registers_per_unit: int = 65536
    warps_per_unit: int = 64


KIB = 1024
DEVICES = {
    "sm_80": Device(GPUTarget("cuda", 80, 32), 163 * KIB, 164 * KIB),
    "sm_86": Device(GPUTarget("cuda", 86, 32), 99 * KIB, 100 * KIB, warps_per_unit=48),
    "sm_89": Device(GPUTarget("cuda", 89, 32), 99 * KIB, 100 * KIB, warps_per_unit=48),
    "sm_90": Device(GPUTarget("cuda", 90, 32), 227 * KIB, 228 * KIB),
    "sm_100": Device(GPUTarget("cuda", 100, 32), 227 * KIB, 228 * KIB),
    "sm_120": Device(GPUTarget("cuda", 120, 32), 99 * KIB, 100 * KIB, warps_per_unit=48),
    "gfx942": Device(GPUTarget("hip", "gfx942", 64), 64 * KIB, 64 * KIB, 4 * 512 * 64, 32),
}


@dataclass(frozen=True)
class Model:
    """Sizes that kernels are compiled for."""

    groups: int
    heads_per_group: int
    d_k: int
    d_v: int
    l: int = 32
    d: int = 16
    l_sel: int = 64
    n_sel: int = 16


MODELS = {"seed": Model(2, 6, 64, 64), "paper": Model(4, 16, 192, 128)}


@dataclass(frozen=True)
class Job:
    kernel: str
    function: Any
    constants: dict[str, Any]
    warps: int
    stages: int


@dataclass(frozen=True)
class Passport:
    kernel: str
    model: str
    device: str
    tile: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    shared_limit: int
    matrix: dict[str, int]
    async_copies: int
    programs_per_unit: int
    """That fit on one multiprocessor or compute unit at a time."""

    def faults(self) -> list[str]:
        found = []
        if self.spilled_bytes:
            found.append(f"{self.spilled_bytes} bytes spilled")
        if self.shared_bytes > self.shared_limit:
            found.append(f"{self.shared_bytes} bytes of shared memory, the limit is {self.shared_limit}")
        if self.kernel != "add_pieces" and not self.matrix:
            found.append("no matrix instructions")
        if self.kernel != "add_pieces" and self.device.startswith("sm_") and not self.async_copies:
            found.append("no asynchronous copies: the loop over keys is not pipelined")
        return found


def jobs(model: Model) -> Iterator[Job]:
    """Every kernel with the constants its launcher gives it."""
    sizes: dict[str, Any] = dict(G=model.groups, R=model.heads_per_group, WIDE=False)
    broad: dict[str, Any] = widths(model.d_k, model.d_v)
    width = max(model.d_k, model.d_v)
    keys: dict[str, Any] = {name: broad[name] for name in ("K", "K1", "K2")}

    def job(kernel: str, function: Any, tiles_of: str = "", n: int = 0, **constants: Any) -> Job:
        tiles = choose(tiles_of or kernel, width)
        blocks = dict(BLOCK_M=constants.pop("BLOCK_M", tiles.m), BLOCK_N=n or tiles.n)
        return Job(kernel, function, {**sizes, **constants, **blocks}, tiles.warps, tiles.stages)

    block = block_of(model.l_sel)
    yield job("runs_forward", runs_forward.runs_forward_kernel, **broad)
    yield job("runs_dq", runs_backward.runs_dq_kernel, **broad)
    yield job("runs_dkv", runs_backward.runs_dkv_kernel, PARTS=4, **broad)
    for kernel, function in (
        ("selected_forward", selected_forward.selected_forward_kernel),
        ("selected_dq", selected_backward.selected_dq_kernel),
    ):
        queries, m = tile_of(choose(kernel, width), model.heads_per_group)
        yield job(kernel, function, n=block, L=model.l_sel, QUERIES=queries, BLOCK_M=m, **broad)
    yield job("selected_dkv", selected_backward.selected_dkv_kernel, L=model.l_sel, PIECE=PIECE, **broad)
    v = split_width(model.d_v)
    add = dict(G=model.groups, X=v.n, X1=v.main, X2=v.rest, L=model.l_sel, BLOCK_N=block)
    yield Job("add_pieces", selected_backward.add_pieces_kernel, add, 4, 2)
    yield job("select_lse", selection.runs_lse_kernel, "runs_forward", **keys)
    tiles = choose("select", width)
    per = select_sizes(model.l, model.d, model.l_sel, model.n_sel, tiles)
    constants = dict(G=model.groups, WIDE=False, **keys, **per)
    yield Job("select", selection.select_kernel, constants, tiles.warps, tiles.stages)


_POINTERS = {
    **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), "*bf16"),
    **dict.fromkeys(("lse", "delta", "dk_part", "dv_part", "part"), "*fp32"),
    **dict.fromkeys(
        ("lo", "hi", "pos", "first", "last", "begins", "bits", "counts", "idx", "seen_first", "seen_end", "queries",
         "offsets", "piece_window", "piece_first"), "*i32",
    ),
    "scale": "fp32",
}  # fmt: skip


def compile_for(job: Job, device: Device) -> Any:
    signature, attributes = {}, {}
    for position, name in enumerate(job.function.arg_names):
        signature[name] = "constexpr" if name in job.constants else _POINTERS.get(name, "i32")
        is_stride = name.endswith(("_b", "_s", "_g", "_r", "_t"))
        if signature[name].startswith("*") or is_stride:  # as the just-in-time compiler finds them for real tensors
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=job.function, signature=signature, constexprs=job.constants, attrs=attributes)
    return triton.compile(source, target=device.target, options=dict(num_warps=job.warps, num_stages=job.stages))


def inspect(job: Job, model: str, device_name: str) -> Passport:
    device = DEVICES[device_name]
    compiled = compile_for(job, device)
    read = _read_amd if device.target.backend == "hip" else _read_nvidia
    registers, spilled, matrix, copies = read(compiled)
    lanes = device.target.warp_size
    by_registers = device.registers_per_unit // max(1, registers * job.warps * lanes)
    by_shared = device.shared_per_unit // max(1, compiled.metadata.shared)
    shape = [str(job.constants[name]) for name in ("BLOCK_M", "BLOCK_Q", "BLOCK_N", "KEEP") if name in job.constants]
    tile = f"{'×'.join(shape)}, {job.warps} warps, {job.stages} stages"
    return Passport(
        job.kernel, model, device_name, tile, registers, spilled,
        compiled.metadata.shared, device.shared_limit, matrix, copies,
        min(by_registers, by_shared, device.warps_per_unit // job.warps),
    )  # fmt: skip


def _read_nvidia(compiled: Any) -> tuple[int, int, dict[str, int], int]:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = _output(tools / "nvdisasm", file.name)
    registers, stack = (
        int(found[1]) for found in (re.search(r"REG:(\d+)", usage), re.search(r"STACK:(\d+)", usage)) if found
    )
    kinds = {kind: len(re.findall(rf"\b{kind}\b", code)) for kind in ("HMMA", "HGMMA", "QGMMA", "UTCHMMA", "DMMA")}
    copies = len(re.findall(r"\b(?:LDGSTS|UTMALDG|UBLKCP)\b", code))
    return registers, stack, {kind: n for kind, n in kinds.items() if n}, copies


def _read_amd(compiled: Any) -> tuple[int, int, dict[str, int], int]:
    code = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", code)
        return int(found[1]) if found else 0

    kinds = len(re.findall(r"\bv_mfma_", code))
    registers = number("vgpr_count")
    spilled = 4 * (number("vgpr_spill_count") + number("sgpr_spill_count"))
    return registers, spilled, {"MFMA": kinds} if kinds else {}, len(re.findall(r"load_lds|_lds_", code))


def _output(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout
