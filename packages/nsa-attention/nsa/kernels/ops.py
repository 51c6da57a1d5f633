"""Custom operators (torch.library) around a backend's forward and backward functions, with the reference's signatures.

What a backend supplies (`nsa.kernels.interface.BackendKernels`) becomes one differentiable operator and one selection
operator (and, where a backend computes the compressed branch and the selection together, one for both), opaque to
`torch.compile` and known to fake tensors. Output and log-sum-exp are both differentiable. Autocast does not change them
(`nsa.kernels.precision`).
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels.custom_operator import ReverseModeFunction, custom_operator, with_gradient, without_second_gradient
from nsa.kernels.interface import BackendKernels, BranchInputs, LayerInputs, LayerOutputs, device_of, is_one_document
from nsa.kernels.precision import autocast_off, require_one_dtype
from nsa.kernels.reference import Attended

_KERNELS: dict[str, Any] = {}
"""`BackendKernels`, or `FusedBackendKernels` where something of these is bound."""
_N_SEL = [field.name for field in fields(Geometry)].index("n_sel")  # in `Geometry.ints`


class KernelFunctions(NamedTuple):
    """The four computations of NSA, each with the signature of its namesake in `reference`."""

    compressed: Callable[..., Attended]
    select: Callable[..., Tensor]
    selected: Callable[..., Attended]
    sliding: Callable[..., Attended]


class _KernelFunction(ReverseModeFunction):
    subject = "attention in kernels of our own"
    instead = "The backend 'reference' (kernels=\"reference\") is plain PyTorch and supports every transform."


def bind(name: str, kernels: BackendKernels) -> KernelFunctions:
    """Register a backend's kernels under a name and return them as differentiable, compilable functions."""
    _KERNELS[name] = kernels

    def attend(branch: str, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, start: Tensor, *, geometry: Geometry,
               scale: float, return_lse: bool = False) -> Attended:  # fmt: skip
        require_one_dtype(q, k, v)
        out, lse = _differentiable_attend.call(q, k, v, None, pos, start, branch, geometry.ints, scale, name)
        return (out, lse) if return_lse else out

    def selected_attention(q: Tensor, k: Tensor, v: Tensor, idx: Tensor, pos: Tensor, start: Tensor, *,
                           geometry: Geometry, scale: float, return_lse: bool = False) -> Attended:  # fmt: skip
        # `idx` (see `BranchInputs.idx_BSGN`) is not checked: reading it at every step would stall an accelerator.
        require_one_dtype(q, k, v)
        out, lse = _differentiable_attend.call(q, k, v, idx, pos, start, "selected", geometry.ints, scale, name)
        return (out, lse) if return_lse else out

    def select_blocks(q: Tensor, k: Tensor, pos: Tensor, first: Tensor, *, geometry: Geometry, scale: float) -> Tensor:
        require_one_dtype(q, k)
        idx: Tensor = _select(q.detach(), k.detach(), pos, first, geometry.ints, scale, name)
        return idx

    return KernelFunctions(partial(attend, "compressed"), select_blocks, selected_attention, partial(attend, "sliding"))


def bind_fused(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """A bound backend's `compressed_and_select` as one function: the compressed branch's output, the chosen blocks, and
    with `return_lse` the branch's log-sum-exps."""

    def compressed_and_select(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, *, geometry: Geometry,
                              scale: float, return_lse: bool = False) -> tuple[Tensor, ...]:  # fmt: skip
        require_one_dtype(q, k, v)
        out, lse, idx = _differentiable_compressed_and_select.call(q, k, v, pos, first, geometry.ints, scale, name)
        return (out, idx, lse) if return_lse else (out, idx)

    return compressed_and_select


def bind_mix(name: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A bound backend's `mix_forward` and `mix_backward` as one function with the signature of `reference.mix`."""

    def mix(gates: Tensor, compressed: Tensor, selected: Tensor, sliding: Tensor) -> Tensor:
        out: Tensor = _differentiable_mix.call(gates, compressed, selected, sliding, name)
        return out

    return mix


def bind_layer(name: str) -> Callable[..., LayerOutputs]:
    """A bound backend's three branches, selection and mixing as one function, of the tensors of `LayerInputs`."""

    def attend_layer(q: Tensor, gates: Tensor, *keys: Tensor, geometry: Geometry, scale: float) -> LayerOutputs:
        for k, v in zip(keys[::4], keys[1::4], strict=True):
            require_one_dtype(q, k, v)
        rest = (geometry.ints, scale, is_one_document(keys[_START_SEL]), name)
        return LayerOutputs(*_differentiable_layer.call(q, gates, *keys, *rest))

    return attend_layer


@custom_operator("nsa::attend", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, idx: Tensor | None, pos: Tensor, start: Tensor, branch: str, sizes: list[int],
    scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = BranchInputs(branch, q, k, v, idx, pos, start, Geometry.from_ints(sizes), scale)
    with device_of(q), autocast_off(q):
        return _KERNELS[backend].attend_forward(x)


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, idx: Tensor | None, pos: Tensor, start: Tensor, branch: str, sizes: list[int],
    scale: float, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=wide)


@custom_operator("nsa::attend_backward", mutates_args=())
def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, idx: Tensor | None, pos: Tensor, start: Tensor, out: Tensor,
    lse: Tensor, dlse: Tensor | None, branch: str, sizes: list[int], scale: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x = BranchInputs(branch, q, k, v, idx, pos, start, Geometry.from_ints(sizes), scale)
    with device_of(q), autocast_off(q):
        dq, dk, dv = _KERNELS[backend].attend_backward(x, out, lse, dout, dlse)
    return dq.contiguous(), dk, dv  # some backends write dq in q's own layout; the fake's is contiguous


@_attend_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, idx: Tensor | None, pos: Tensor, start: Tensor, out: Tensor,
    lse: Tensor, dlse: Tensor | None, branch: str, sizes: list[int], scale: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_attend_gradients = without_second_gradient(_attend_backward, _KernelFunction)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, idx, pos, start, *ctx.rest = inputs
    ctx.set_materialize_grads(False)  # most callers do not use the log-sum-exp: its gradient is None then, not zeros
    ctx.save_for_backward(q, k, v, idx, pos, start, *output)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, idx, pos, start, out, lse = ctx.saved_tensors
    dout, dlse = _defined(dout, dlse, out, lse)
    dq, dk, dv = _attend_gradients(dout, q, k, v, idx, pos, start, out, lse, dlse, *ctx.rest)
    return dq, dk, dv, None, None, None, None, None, None, None


def _defined(dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    return torch.zeros_like(out) if dout is None else dout, _where_seen(dlse, lse)


def _where_seen(dlse: Tensor | None, lse: Tensor) -> Tensor | None:
    """Rows that see nothing have no gradient, whatever merging their −inf with another one gave."""
    return None if dlse is None else dlse.masked_fill(lse == -torch.inf, 0)


_differentiable_attend = with_gradient(_attend, _save, _differentiate, _KernelFunction)


@custom_operator("nsa::select", mutates_args=())
def _select(q: Tensor, k: Tensor, pos: Tensor, first: Tensor, sizes: list[int], scale: float, backend: str) -> Tensor:
    with device_of(q), autocast_off(q):
        return _KERNELS[backend].select(q, k, pos, first, Geometry.from_ints(sizes), scale)


@_select.register_fake
def _(q: Tensor, k: Tensor, pos: Tensor, first: Tensor, sizes: list[int], scale: float, backend: str) -> Tensor:
    return q.new_empty((*q.shape[:-2], sizes[_N_SEL]), dtype=torch.int32)


@custom_operator("nsa::compressed_and_select", mutates_args=())
def _compressed_and_select(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, sizes: list[int], scale: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    x = BranchInputs("compressed", q, k, v, None, pos, first, Geometry.from_ints(sizes), scale)
    with device_of(q), autocast_off(q):
        return _KERNELS[backend].compressed_and_select(x)


@_compressed_and_select.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, sizes: list[int], scale: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(q.shape[:-1], dtype=wide),
        q.new_empty((*q.shape[:-2], sizes[_N_SEL]), dtype=torch.int32),
    )


def _save_fused(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, pos, first, ctx.sizes, ctx.scale, ctx.backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, pos, first, *output[:2])


def _differentiate_fused(ctx: Any, dout: Tensor | None, dlse: Tensor | None, didx: None) -> tuple[Tensor | None, ...]:
    q, k, v, pos, first, out, lse = ctx.saved_tensors
    rest = ("compressed", ctx.sizes, ctx.scale, ctx.backend)
    dout, dlse = _defined(dout, dlse, out, lse)
    dq, dk, dv = _attend_gradients(dout, q, k, v, None, pos, first, out, lse, dlse, *rest)
    return dq, dk, dv, None, None, None, None, None


_differentiable_compressed_and_select = with_gradient(
    _compressed_and_select, _save_fused, _differentiate_fused, _KernelFunction
)


@custom_operator("nsa::mix", mutates_args=())
def _mix(gates: Tensor, compressed: Tensor, selected: Tensor, sliding: Tensor, backend: str) -> Tensor:
    with device_of(gates), autocast_off(gates):
        return _KERNELS[backend].mix_forward(gates, compressed, selected, sliding)


@_mix.register_fake
def _(gates: Tensor, compressed: Tensor, selected: Tensor, sliding: Tensor, backend: str) -> Tensor:
    return compressed.new_empty(compressed.shape)


@custom_operator("nsa::mix_backward", mutates_args=())
def _mix_backward(
    dout: Tensor, gates: Tensor, compressed: Tensor, selected: Tensor, sliding: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with device_of(gates), autocast_off(gates):
        return _KERNELS[backend].mix_backward(dout, gates, compressed, selected, sliding)


@_mix_backward.register_fake
def _(
    dout: Tensor, gates: Tensor, compressed: Tensor, selected: Tensor, sliding: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dgates = gates.new_empty(gates.shape)
    return dgates, *(x.new_empty(x.shape) for x in (compressed, selected, sliding))  # type: ignore[return-value]


_mix_gradients = without_second_gradient(_mix_backward, _KernelFunction)


def _save_mix(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_mix(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return *_mix_gradients(dout, *ctx.saved_tensors, ctx.backend), None


_differentiable_mix = with_gradient(_mix, _save_mix, _differentiate_mix, _KernelFunction)


_LAYER_TENSORS = LayerInputs._fields[:-3]
_START_SEL = _LAYER_TENSORS.index("start_sel") - 2  # among keys, positions and starts
_N_INPUTS, _N_RESULTS = len(_LAYER_TENSORS), len(LayerOutputs._fields)
_OTHERS = "int[] sizes, float scale, bool one_document, str backend"
_LAYER_SCHEMA = f"{', '.join(f'Tensor {name}' for name in _LAYER_TENSORS)}, {_OTHERS}"
_GRADIENTS = f"({', '.join(['Tensor'] * 8)})"
_RESULTS = f"({', '.join(['Tensor'] * _N_RESULTS)})"


def _layer_inputs(*args: Any) -> LayerInputs:
    *tensors, sizes, scale, one_document = args
    return LayerInputs._make((*tensors, Geometry.from_ints(sizes), scale, one_document))


@custom_operator("nsa::attend_layer", mutates_args=(), schema=f"({_LAYER_SCHEMA}) -> {_RESULTS}")
def _attend_layer(*args: Any) -> tuple[Tensor, ...]:
    *inputs, backend = args
    x = _layer_inputs(*inputs)
    with device_of(x.q_BSGRK), autocast_off(x.q_BSGRK):
        return tuple(_KERNELS[backend].layer_forward(x))


@_attend_layer.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    *inputs, backend = args
    x = _layer_inputs(*inputs)
    q, heads = x.q_BSGRK, x.q_BSGRK.shape[:-1]
    mixed, *outs = (q.new_empty((*heads, x.v_sel.shape[-1])) for _ in range(4))
    lse = (q.new_empty(heads, dtype=torch.promote_types(q.dtype, torch.float32)) for _ in range(3))
    idx = q.new_empty((*heads[:-1], x.geometry.n_sel), dtype=torch.int32)
    return mixed, idx, *lse, *outs, idx.new_empty(_KERNELS[backend].index_length(x, idx))


@custom_operator(
    "nsa::attend_layer_backward", mutates_args=(),
    schema=f"(Tensor dmixed, Tensor? dlse_cmp, Tensor? dlse_sel, Tensor? dlse_win, "
    f"{', '.join(f'Tensor {name}' for name in LayerOutputs._fields[1:])}, {_LAYER_SCHEMA}) -> {_GRADIENTS}",
)  # fmt: skip
def _attend_layer_backward(*args: Any) -> tuple[Tensor, ...]:
    (dmixed, *dlse), outputs, x = args[:4], args[4 : 3 + _N_RESULTS], _layer_inputs(*args[3 + _N_RESULTS : -1])
    with device_of(x.q_BSGRK), autocast_off(x.q_BSGRK):
        return tuple(_KERNELS[args[-1]].layer_backward(x, LayerOutputs(dmixed, *outputs), *dlse))


@_attend_layer_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    x = _layer_inputs(*args[3 + _N_RESULTS : -1])
    inputs = (x.q_BSGRK, x.gates_BSGX3, x.k_cmp, x.v_cmp, x.k_sel, x.v_sel, x.k_win, x.v_win)
    return tuple(each.new_empty(each.shape) for each in inputs)


_layer_gradients = without_second_gradient(_attend_layer_backward, _KernelFunction)


def _save_layer(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.rest = inputs[:_N_INPUTS], inputs[_N_INPUTS:]
    results = LayerOutputs(*output)
    ctx.mark_non_differentiable(results.idx_BSGN, *results[5:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])


def _differentiate_layer(ctx: Any, dmixed: Tensor | None, _: None, *gradients: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: under checkpointing they are computed by this access
    y = LayerOutputs(dmixed, *saved[_N_INPUTS:])  # type: ignore[arg-type]
    pairs = zip(gradients[:3], (y.lse_cmp, y.lse_sel, y.lse_win), strict=True)
    dlse = (_where_seen(gradient, lse) for gradient, lse in pairs)
    dmixed = torch.zeros_like(y.out_cmp) if dmixed is None else dmixed
    dq, dgates, *dkeys = _layer_gradients(dmixed, *dlse, *y[1:], *saved[:_N_INPUTS], *ctx.rest)
    none = (None, None)
    return dq, dgates, *dkeys[:2], *none, *dkeys[2:4], *none, *dkeys[4:], *none, *none, *none


_differentiable_layer = with_gradient(_attend_layer, _save_layer, _differentiate_layer, _KernelFunction)
