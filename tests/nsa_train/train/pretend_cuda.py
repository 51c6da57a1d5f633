"""Pretended CUDA tensors: they report `cuda` as their device, hold real values on the CPU, and record every host wait.

A host wait is an operation for which the host must wait for the device: reading a value, a result whose size depends on
values, or a blocking copy between host and device. Each is recorded with the line of ours (or of the engine) that
asked for it.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten
READS_VALUES = {
    _aten._local_scalar_dense, _aten.item, _aten.is_nonzero, _aten.equal, _aten.nonzero, _aten.masked_select,
    _aten._unique2, _aten.unique_dim, _aten.unique_consecutive, _aten.repeat_interleave, _aten.bincount, _aten.allclose,
}  # fmt: skip
COPIES = {_aten._to_copy, _aten.copy_, _aten.copy}


class CudaTensor(torch.Tensor):
    """Meta tensor as torch's fake tensors are: a meta tensor for its sizes, the keys of a CUDA tensor, and here the
    values too."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "CudaTensor":
        keys = dict(dispatch_device=True, device_for_backend_keys=CUDA)
        tensor = torch.Tensor._make_subclass(cls, values.detach().to("meta"), values.requires_grad, **keys)
        tensor.values = values.detach()
        return tensor

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_cpu(self) -> bool:
        return False

    def cpu(self, *_: Any) -> torch.Tensor:
        return self.to("cpu")

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(
            *args, **{k: v for k, v in kwargs.items() if k != "copy"}
        )
        tensor = self if dtype is None else torch.Tensor.to(self, dtype)
        if device is None or device.type == "cuda":
            return tensor
        return torch.ops.aten._to_copy(tensor, device=device, non_blocking=non_blocking)

    def tolist(self) -> Any:
        return [self[i].tolist() for i in range(len(self))] if self.dim() else self.item()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with PretendedCuda():  # outside of one: nobody listens
            return func(*args, **(kwargs or {}))


@dataclass
class HostWait:
    operator: str
    where: str

    def __str__(self) -> str:
        return f"{self.operator} at {self.where}"


@dataclass
class PretendedCuda(TorchDispatchMode):
    """While active, `device="cuda"` makes pretended tensors, and host waits are appended to `waits`."""

    waits: list[HostWait] = field(default_factory=list)
    launched: int = 0
    """Operators that ran on the device so far."""
    dtypes: set[torch.dtype] = field(default_factory=set)
    """Of the tensors they made."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")  # to the C++ side, which has no streams of a GPU
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        from_device = any(isinstance(x, CudaTensor) for x in inputs)
        to_device = from_device
        if kwargs.get("device") is not None:
            to_device = torch.device(kwargs["device"]).type == "cuda"
            kwargs["device"] = "cpu" if to_device else kwargs["device"]
        self.launched += to_device
        packet = func.overloadpacket
        if from_device and (packet in READS_VALUES or _indexes_by_mask(packet, args)):
            self._record(func)
        if packet in COPIES and len({isinstance(x, CudaTensor) for x in inputs} | {to_device}) > 1:
            blocking = not kwargs.get("non_blocking", args[2] if packet is _aten.copy_ and len(args) > 2 else False)
            if blocking:
                self._record(func)
        values, kwargs = tree_map_only(CudaTensor, lambda x: x.values, (args, kwargs))
        out = func(*values, **kwargs)
        return self._wrapped(out, args, to_device)

    def _wrapped(self, out: Any, args: Any, to_device: bool) -> Any:
        if not to_device:
            return out
        self.dtypes |= {x.dtype for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)}
        known = {id(x.values): x for x in tree_flatten(args)[0] if isinstance(x, CudaTensor)}
        return tree_map_only(torch.Tensor, lambda x: known.get(id(x)) if id(x) in known else CudaTensor(x), out)

    def _record(self, func: Any) -> None:
        self.waits.append(HostWait(str(func), _origin()))


def _indexes_by_mask(packet: Any, args: Any) -> bool:
    if packet not in (_aten.index, _aten.index_put, _aten.index_put_):
        return False
    return any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _origin() -> str:
    """The innermost frame in our package or in the engine."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename == __file__:
            continue
        path = Path(frame.filename).as_posix()
        for root in ("/olmo_core/", "/nsa_train/", "/nsa/"):
            if root in path:
                return f"{root[1:]}{path.rsplit(root, 1)[1]} {frame.name}"
    return "elsewhere"


def on_pretended_cuda(module: Any) -> None:
    """Move a train module's weights to the pretended device, with the optimizer that it has on a GPU."""
    for owner in module.model.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            moved = torch.nn.Parameter(CudaTensor(parameter.detach()))
            owner._parameters[name] = moved
            for group in module.optim.param_groups:
                group["params"] = [moved if p is parameter else p for p in group["params"]]
    module.device = CUDA
    for group in (*module.optim.param_groups, module.optim.defaults):
        group["fused"] = True
    module.optim._step_supports_amp_scaling = True


class CudaEvent:
    """Waiting for it is a host wait if little was queued behind it: the device would run out of work."""

    device: PretendedCuda
    BEHIND = 50

    def __init__(self, **_: Any) -> None:
        self._at = 0

    def record(self) -> None:
        self._at = self.device.launched

    def synchronize(self) -> None:
        if self.device.launched - self._at < self.BEHIND:
            self.device.waits.append(HostWait("event", _origin()))

    def elapsed_time(self, _: "CudaEvent") -> float:
        return 1.0


@contextmanager
def pretended_cuda() -> Iterator[PretendedCuda]:
    """Pretend a CUDA device with the parts of torch.cuda that a run uses."""
    grouped = clip_grad._group_tensors_by_device_and_dtype

    def groups(tensors: Any) -> Any:
        """C++ calls the device of a pretended tensor `cpu`."""
        return {
            (CUDA if isinstance(group[0][0][0], CudaTensor) else device, dtype): group
            for (device, dtype), group in grouped(tensors).items()
        }

    device = PretendedCuda()
    with (
        mock.patch.object(CudaEvent, "device", device, create=True),
        mock.patch.multiple(
            torch.cuda,
            Event=CudaEvent,
            _lazy_init=lambda: None,
            get_device_name=lambda *_: "NVIDIA A100-SXM4-80GB",
            memory_allocated=lambda *_: 0,
            memory_reserved=lambda *_: 0,
        ),
        mock.patch.object(clip_grad, "_group_tensors_by_device_and_dtype", groups),
        device,
    ):
        yield device
