"""Kernel autotuning: the first use of a kernel times candidate tile sizes, and the fastest is stored on disk.

Off by default (runtime.tune_kernels). Tiles decide the order of additions, hence the last bits of every result, and
timing varies from run to run. The table of `nsa.kernels.triton.tuning` gives the same bits on every GPU of a kind;
tuning gives that up for speed. A choice never changes within a process, nor, while the file is kept, in a later one. A
candidate that spills or takes more shared memory than there is, according to its machine code, is never run: the
compiler does not check shared memory.
"""

import logging
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nsa.gpus import GpuArchitecture
from nsa.kernels.cpu.build import cache_folder
from nsa.kernels.triton.launch import Launch, launch_all
from nsa.kernels.triton.tile_store import TileStore, tunes
from nsa.kernels.triton.tuning import TileSizes, candidates, choose, limits_here


@dataclass(frozen=True)
class KernelResources:
    registers: int
    spilled_bytes: int
    """To memory, for each lane."""
    vector_spills: int
    """Registers moved to the matrix units' (AMD only)."""
    scalar_spills: int
    """Scalar registers kept in lanes of vector registers (AMD only): an instruction each way, no memory."""
    shared_bytes: int

    def over_limits(self, gpu: GpuArchitecture) -> list[str]:
        """Resources the kernel takes and should not."""
        reasons = []
        if self.spilled_bytes:
            reasons.append(f"{self.spilled_bytes} bytes spilled")
        if self.vector_spills or self.scalar_spills:
            reasons.append(f"{self.vector_spills} vector and {self.scalar_spills} scalar registers spilled")
        if self.shared_bytes > gpu.shared_limit:
            reasons.append(f"{self.shared_bytes} bytes of shared memory, the limit is {gpu.shared_limit}")
        return reasons


def resources(compiled: Any, gpu: GpuArchitecture) -> KernelResources:
    if gpu.backend == "cuda":
        usage = read_by("cuobjdump", compiled.asm, "--dump-resource-usage")
        registers, spilled, vector, scalar = _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage), 0, 0
    else:
        registers, spilled, vector, scalar = (
            _number(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])
            for name in ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count")
        )
    return KernelResources(registers, spilled, vector, scalar, compiled.metadata.shared)


def read_by(tool: str, asm: Any, *options: str) -> str:
    """What a tool of NVIDIA's prints of a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
        command = [str(program), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's output has no {pattern!r}: another version writes it differently")
    return int(match[1])


_log = logging.getLogger(__name__)


class Work(NamedTuple):
    """What one choice of tiles computes."""

    launches: Sequence[Launch]
    """In order; the first one is that of the kernel whose tiles are chosen."""
    results: tuple[Tensor, ...] = ()
    """Tensors that depend on the tiles and that the launches write."""


Prepare = Callable[[TileSizes], Work]
"""Everything that depends on the tiles, up to the launch."""

_LONG_QUERIES = 1024
"""Calls with at least this many queries are timed separately: decoding and training need different tiles."""
_KEEP_TABLE_ABOVE = 0.97
"""Share of the table's time: a candidate that is not faster than this is within noise, and the table's tiles stay."""


def tuned(kernel: str, q_BSGRK: Tensor, d_v: int, prepare: Prepare, **constants: int) -> Work:
    """What `prepare` returns for the kernel's tiles: the table's, or those that were fastest on this GPU."""
    tiles = choose(kernel, max(q_BSGRK.shape[-1], d_v), element_size=q_BSGRK.dtype.itemsize)
    # Not under the interpreter, and not in fp32: without matrix units everything spills and takes minutes to compile.
    if tunes() and q_BSGRK.device.type == "cuda" and q_BSGRK.dtype != torch.float32:
        tuner = _tuner(torch.cuda.get_device_name(q_BSGRK.device))
        every = (tiles, *candidates(kernel))
        may_time = not torch.cuda.is_current_stream_capturing()
        tiles = tuner.choose(key_of(kernel, q_BSGRK, d_v=d_v, **constants), every, prepare, may_time=may_time)
    return prepare(tiles)


def key_of(kernel: str, q_BSGRK: Tensor, **constants: int) -> str:
    _, S, G, R, d_k = q_BSGRK.shape
    sizes = " ".join(f"{name}={n}" for name, n in dict(G=G, R=R, d_k=d_k, **constants).items())
    return f"{kernel} {str(q_BSGRK.dtype).removeprefix('torch.')} {sizes} {'long' if S >= _LONG_QUERIES else 'short'}"


def _compiled(work: Work) -> Any:
    """The kernel whose tiles are chosen, compiled and not run."""
    kernel, grid, arguments, constants = work.launches[0]
    return kernel.warmup(*arguments, grid=grid, **constants)


class TileTuner:
    """Choices of one kind of GPU. `refusals`: why a compiled kernel may not run; `measure`: how long a call takes."""

    def __init__(
        self, store: TileStore, refusals: Callable[[Any], list[str]], measure: Callable[[Callable[[], Any]], float]
    ) -> None:
        self._store, self._refusals, self._measure = store, refusals, measure
        self._made: dict[str, TileSizes] = {}
        self._lock = threading.Lock()  # backward runs in threads of autograd

    def choose(
        self, key: str, candidates: Sequence[TileSizes], prepare: Prepare, *, may_time: bool = True
    ) -> TileSizes:
        """The first candidate is the table's: it stays where nothing is clearly faster, or timing is not allowed."""
        with self._lock:
            if key not in self._made:
                self._made[key] = self._find(key, candidates, prepare) if may_time else candidates[0]
            return self._made[key]

    def _find(self, key: str, candidates: Sequence[TileSizes], prepare: Prepare) -> TileSizes:
        try:
            with self._store.locked():
                known = self._store.read()
                if known.get(key) not in candidates:
                    known[key] = self._fastest(key, candidates, prepare)
                    self._store.write(known)
                return known[key]
        except OSError as error:
            _log.warning(
                "tiles of %s are the table's: what is timed could not be kept in %s (%s), and another process might "
                "choose differently. Set runtime.kernel_cache.", key, self._store.path.parent, error,
            )  # fmt: skip
            return candidates[0]

    def _fastest(self, key: str, candidates: Sequence[TileSizes], prepare: Prepare) -> TileSizes:
        times: dict[TileSizes, float] = {}
        for tiles in dict.fromkeys(candidates):
            if reasons := self._refusals(_compiled(prepare(tiles))):
                _log.info("%s: %s refused, %s", key, tiles, "; ".join(reasons))
                continue
            times[tiles] = self._measure(lambda tiles=tiles: launch_all(prepare(tiles).launches))  # type: ignore[misc]
        table = candidates[0]
        if not times:
            _log.warning("%s: every candidate was refused; the table's tiles stay.", key)
            return table
        best = min(times, key=times.__getitem__)
        winner = table if times.get(table, float("inf")) * _KEEP_TABLE_ABOVE <= times[best] else best
        _log.info("%s: %s in %.3g ms, of %d timed", key, winner, times[winner], len(times))
        return winner


@cache
def _tuner(gpu_name: str) -> TileTuner:
    return TileTuner(TileStore(cache_folder(), gpu_name, triton.__version__), _over_limits, _milliseconds)


def _over_limits(compiled: Any) -> list[str]:
    gpu = limits_here()
    return resources(compiled, gpu).over_limits(gpu)


def _milliseconds(call: Callable[[], Any]) -> float:
    return float(triton.testing.do_bench(call, return_mode="median"))
