"""Triton driver that runs kernels in the emulator: `kernel[grid](cpu_tensors)` compiles for a GPU and executes here.

The last stage of Triton's compiler, ptxas, is left out: the "binary" is the PTX text.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from nsa.gpus import ARCHITECTURES
from proofs.ptx_emulator.findings import FindingLog
from proofs.ptx_emulator.global_memory import arenas_of
from proofs.ptx_emulator.machine import Machine, ProgramOrder, instruction_totals
from proofs.ptx_emulator.parser import parse

PtxEdit = Callable[[str, str], str]
"""Changes the PTX of a kernel before it runs: (kernel name, text) → text."""

_TYPES = {
    "i1": "u1", "i8": "i1", "i16": "i2", "i32": "i4", "i64": "i8",
    "u1": "u1", "u8": "u1", "u16": "u2", "u32": "u4", "u64": "u8", "fp32": "f4", "f32": "f4", "fp64": "f8",
}  # fmt: skip


_devices = itertools.count(1000)


class EmulatorUtils:
    """`driver.utils` as Triton's runtime uses it."""

    def __init__(self, driver: "EmulatorDriver") -> None:
        self._driver = driver

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        text = binary.decode() if isinstance(binary, bytes) else binary
        machine = self._driver.machine(name, text)
        return machine, machine, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        limits = ARCHITECTURES[self._driver.gpu]
        return {"max_shared_mem": limits.shared_limit, "multiprocessor_count": 108, "warpSize": 32}


class EmulatorLauncher:
    def __init__(self, source: Any, metadata: Any) -> None:
        self._types = list(source.signature.values())
        self._shared = metadata.shared
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise NotImplementedError("kernels with scratch memory")

    def __call__(
        self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: Machine, packed: Any, launch_metadata: Any,
        enter_hook: Any, exit_hook: Any, *args: Any,
    ) -> None:  # fmt: skip
        values, ranges = [], []
        for kind, value in zip(self._types, args, strict=True):
            if kind == "constexpr":
                continue
            if isinstance(value, torch.Tensor):
                ranges.append(tensor_range(value))
                value, kind = value.data_ptr(), "u64"
            elif kind.startswith("*"):
                value, kind = 0 if value is None else value, "u64"
            values.append(_bits(value, _TYPES[kind]))
        parameters = np.array([*values, 0, 0], np.uint64)  # the last two: scratch memory, of which there is none
        began = time.process_time()
        driver = EmulatorDriver.current()
        grid, arenas = (grid_x, grid_y, grid_z), arenas_of(ranges)
        shared = self._shared - driver.less_shared.get(function.kernel.name, 0)
        driver.ran += function.launch(grid, parameters, shared, arenas, driver.order)
        driver.seconds += time.process_time() - began


def tensor_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first to its last element."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _bits(value: float, dtype: str) -> int:
    return int(np.array(value, dtype).view(f"u{np.dtype(dtype).itemsize}"))


class EmulatorDriver(DriverBase):
    """Emulate one GPU architecture, e.g. sm_80. `edit` changes PTX before it is parsed."""

    launcher_cls = EmulatorLauncher

    def __init__(self, gpu: str, edit: PtxEdit | None = None) -> None:
        super().__init__()
        self.gpu, self.edit = gpu, edit
        self.utils = EmulatorUtils(self)
        self.log = FindingLog()
        self.machines: dict[tuple[str, str], Machine] = {}
        self._device = next(_devices)
        self.order: ProgramOrder | None = None
        self.less_shared: dict[str, int] = {}
        """Bytes by which the shared memory of a kernel is smaller than it asks for: to plant a fault."""
        self.ran: list[int] = []
        """Programs of all launches, in the order in which they ran."""
        self.seconds = 0.0
        """Seconds of CPU time spent in launches."""

    @staticmethod
    def current() -> "EmulatorDriver":
        driver = triton.runtime.driver.active
        assert isinstance(driver, EmulatorDriver)
        return driver

    def machine(self, name: str, ptx: str) -> Machine:
        text = self.edit(name, ptx) if self.edit else ptx
        if (name, text) not in self.machines:
            self.machines[name, text] = Machine(parse(text), self.log)
        return self.machines[name, text]

    def replace_edit(self, edit: PtxEdit | None) -> None:
        """Triton loads its kernels again, through this edit."""
        self.edit, self._device = edit, next(_devices)

    def instruction_counts(self) -> dict[str, dict[str, int]]:
        """Warp instructions executed so far, by kernel and opcode."""
        by_name: dict[str, list[Machine]] = {}
        for (name, _), machine in self.machines.items():
            by_name.setdefault(name, []).append(machine)
        return {name: instruction_totals(machines) for name, machines in by_name.items()}

    # what Triton's runtime asks of a driver

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(self.gpu.removeprefix("sm_")), 32)

    def get_current_device(self) -> int:
        """Another one for each driver: Triton keeps what it compiled by device."""
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("the emulator measures no time")


def _ptx_is_the_binary(*arguments: Any) -> tuple[str, str] | None:
    """Triton's hook for compiler stages: without arguments it asks for a cache key, with them it passes the stages."""
    if not arguments:
        return "ptx_emulator", "ptx_emulator"
    stages = arguments[1]
    stages["cubin"] = lambda ptx, metadata: ptx.encode()
    return None


@contextmanager
def emulated(gpu: str, edit: PtxEdit | None = None) -> Iterator[EmulatorDriver]:
    """Inside, Triton kernels run in the emulator, compiled for `gpu`, with that GPU's tile sizes."""
    import nsa.kernels.triton as backend
    from nsa.kernels.triton import launch, tuning

    runtime, knobs = triton.runtime.driver, triton.knobs.runtime
    if knobs.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels would be interpreted, not compiled.")
    before = runtime._active, knobs.add_stages_inspection_hook, backend._interpreted, tuning.gpu_here
    small, launch.SMALL_BYTES = launch.SMALL_BYTES, 0  # accesses are compared with the bounds of each tensor
    driver = EmulatorDriver(gpu, edit)
    runtime.set_active(driver)
    knobs.add_stages_inspection_hook = _ptx_is_the_binary
    backend._interpreted = lambda: True  # CPU tensors are admitted
    tuning.gpu_here = lambda: gpu
    try:
        yield driver
    finally:
        launch.SMALL_BYTES = small
        runtime._active, knobs.add_stages_inspection_hook, backend._interpreted, tuning.gpu_here = before
