"""Precision under autocast, where attention, selection and φ compute in the dtype of their inputs; MKL warm-up.

Autocast applies to the thread that runs an operation: it would also change the matrix products inside a
custom operator, and those of a backward pass that is started under it. Attention accumulates in fp32 (fp64 for fp64
inputs); its queries, keys and values have one dtype. The linear projections before and after it follow autocast, as
every `nn.Linear` does.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa.errors import ConfigError

_Result = TypeVar("_Result")


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices that have no more: Apple's, and those of Intel without it."""
    if device.type == "xpu" and torch.xpu.is_available():
        return torch.float64 if torch.xpu.get_device_properties(device).has_fp64 else torch.float32
    return torch.float32 if device.type == "mps" else torch.float64


WIDE_PRODUCTS = ("cuda",)
"""Devices where torch multiplies matrices of bf16 or fp16 as they are, in fp32, and returns that."""


def multiplies_wide(x: Tensor) -> bool:
    """Whether products of tensors of this dtype and device need no operand in fp32: tensor cores lose nothing."""
    return x.device.type in WIDE_PRODUCTS and x.dtype in (torch.float16, torch.bfloat16)


def require_one_dtype(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    if q.dtype == k.dtype and (v is None or q.dtype == v.dtype):
        return
    values = "" if v is None else f", values {v.dtype}"
    raise ConfigError(
        f"queries are {q.dtype}, keys {k.dtype}{values}: attention computes in one dtype, and autocast or a cache may "
        f"make several. Cast them to one, e.g. k.to(q.dtype)."
    )


_UNCHANGED = nullcontext()


def autocast_off(x: Tensor) -> AbstractContextManager[Any]:
    """Context without autocast on x's device; entered only where autocast is on, because that takes microseconds."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return _UNCHANGED
    return torch.autocast(x.device.type, enabled=False)


def without_autocast(x: Tensor, run: Callable[..., _Result], *args: Any) -> _Result:
    """`run(*args)` without autocast on x's device."""
    with autocast_off(x):
        return run(*args)


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """`torch.einsum` of two tensors in their own dtype, and so its gradients, whatever the ambient autocast."""
    run = _FullPrecisionEinsum if torch.compiler.is_compiling() else _TransformableEinsum
    out: Tensor = run.apply(equation, a, b)
    return out


class _FullPrecisionEinsum(torch.autograd.Function):
    @staticmethod
    def forward(equation: str, a: Tensor, b: Tensor) -> Tensor:
        return without_autocast(a, torch.einsum, equation, a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[str, Tensor, Tensor], output: Tensor) -> None:
        ctx.equation, a, b = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        of_inputs, of_out = ctx.equation.split("->")
        of_a, of_b = of_inputs.split(",")
        _, needs_a, needs_b = ctx.needs_input_grad
        da = einsum(f"{of_out},{of_b}->{of_a}", dout, b) if needs_a else None
        db = einsum(f"{of_out},{of_a}->{of_b}", dout, a) if needs_b else None
        return None, da, db


class _TransformableEinsum(_FullPrecisionEinsum):
    """Supports every transform of torch.func; torch.compile traces no function that has these rules."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, _: None, da: Tensor | None, db: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        of_a = None if da is None else einsum(ctx.equation, da, b)
        of_b = None if db is None else einsum(ctx.equation, a, db)
        parts = [part for part in (of_a, of_b) if part is not None]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def warm_up_vector_math() -> None:
    """Make the first parallel `exp` of a process as accurate as all later ones.

    Measured with torch 2.13 on a CPU: in about one process of eight the first `exp` that two threads share is computed
    by one of them at low accuracy (7e-5 relative), and never again. MKL's vector math decides its accuracy on first
    use, and two first uses race. One call by one thread beforehand avoids the race; without it a resumed run is not
    bit-identical.
    """
    torch.zeros(64, device="cpu").exp()
