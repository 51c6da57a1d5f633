"""Backend registry: selects a kernel backend per branch at construction and records why. Never substitutes one."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.errors import KernelUnavailable
from nsa.geometry import Geometry
from nsa.kernel_variables import requested_backends
from nsa.kernels import cpu, flash, ops, portable, reference, triton
from nsa.kernels.interface import KernelShape as KernelShape
from nsa.kernels.interface import LayerOutputs, TokenDecoder, constant_when_traced
from nsa.kernels.ops import KernelFunctions
from nsa.kernels.precision import warm_up_vector_math
from nsa.kernels.self_check import KernelVerdict, flash_verdict, triton_verdict

warm_up_vector_math()

BRANCHES = KernelFunctions._fields

_VERIFIED_ON = ("cuda",)
"""Kinds of device on which 'auto' takes a backend that passes its check."""

Mixing = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class BackendRequest(NamedTuple):
    """A backend name, or 'auto', for each branch."""

    compressed: str = "auto"
    select: str = "auto"
    selected: str = "auto"
    sliding: str = "auto"


RequestedKernels = str | Mapping[str, str] | BackendRequest
"""One backend for all branches, or a backend for some of them."""


@dataclass(frozen=True)
class KernelBackend:
    name: str
    functions: KernelFunctions
    why_not: Callable[[str, torch.device, torch.dtype, KernelShape], str | None]
    """The reason it cannot compute this branch for this device, dtype and shape; None if it can."""
    by_default: bool = True
    """Whether 'auto' takes it without a check."""
    verify: Callable[[torch.device, torch.dtype, KernelShape], KernelVerdict] | None = None
    """Checks it on the device at hand: on a GPU, 'auto' also takes a backend that passes."""
    compressed_and_select: Callable[..., tuple[Tensor, ...]] | None = None
    """Both in one pass: they need the same probabilities."""
    decoder: Callable[..., TokenDecoder] | None = None
    """Builds a decoder of one new token per row over a `CacheView`, all branches at once, without gradients; with
    `merged` for layers of that kind: selected blocks before the window, and one softmax over both."""
    mix: Mixing = reference.mix
    layer: Callable[..., LayerOutputs] | None = None
    """The three branches, the selection and the mixing as one operator."""
    branches: tuple[str, ...] = BRANCHES
    """What it computes. One that does not compute all is taken beside one that does, which also decodes and mixes."""

    @property
    def is_whole(self) -> bool:
        return self.branches == BRANCHES


class PassedOver(NamedTuple):
    """A backend that 'auto' prefers and did not take."""

    backend: str
    why: str
    slower: bool = False
    """It is right, and took longer than the one that is used, on this GPU."""


@dataclass(frozen=True)
class BackendChoice:
    branch: str
    backend: str
    passed_over: tuple[PassedOver, ...] = ()
    requested: bool = False
    """By name, instead of 'auto'."""
    verified: bool = False
    """Whether the backend passed its check on this GPU, with this dtype and shape."""

    @property
    def reason(self) -> str:
        if self.requested:
            return "requested by name"
        if self.verified:
            return "verified on this GPU"
        refused = (one for one in self.passed_over if BACKENDS[one.backend].is_whole)
        return "; ".join(f"{one.backend}: {one.why}" for one in refused) or "first choice"

    @property
    def is_fastest(self) -> bool:
        """Whether it is there for its speed: it completes another backend, or one that is faster on other GPUs took
        longer here."""
        return not BACKENDS[self.backend].is_whole or any(refused.slower for refused in self.passed_over)

    def why_not(self, backend: str) -> str | None:
        """Why this backend was passed over; None if it was not."""
        return next((refused.why for refused in self.passed_over if refused.backend == backend), None)


class KernelPlan(NamedTuple):
    functions: KernelFunctions
    choices: tuple[BackendChoice, ...]
    compressed_and_select: Callable[..., tuple[Tensor, ...]]
    """The compressed branch's output and the selected blocks, with `return_lse` also the branch's log-sum-exps: in one
    pass if one backend computes both and can."""
    decoder: Callable[..., TokenDecoder] | None
    """Decoder of one new token per row; None unless one backend computes all branches and offers one. Backends of some
    branches do not count here and in `mix`: the one that they complete computes all in both."""
    mix: Mixing
    """Gated sum of the branches, by the backend that computes them all, else by tensor operations."""
    layer: Callable[..., LayerOutputs] | None
    """All of it as one operator; None unless one backend computes all branches and offers one."""


def _any_floating_point(branch: str, device: torch.device, dtype: torch.dtype, shape: KernelShape) -> str | None:
    return None if dtype.is_floating_point else f"it computes floating point, not {dtype}"


# In order of preference.
BACKENDS: dict[str, KernelBackend] = {
    backend.name: backend
    for backend in (
        KernelBackend(
            "cpu",
            ops.bind("cpu", cpu),
            cpu.why_not,
            compressed_and_select=ops.bind_fused("cpu"),
            decoder=cpu.CpuDecoder,
            mix=ops.bind_mix("cpu"),
        ),
        KernelBackend(
            "flash",
            flash.functions(ops.bind("flash", flash)),
            flash.why_not,
            by_default=False,
            verify=flash_verdict,
            branches=flash.SERVED,
        ),
        KernelBackend(
            "triton",
            ops.bind("triton", triton),
            triton.why_not,
            by_default=False,
            verify=triton_verdict,
            compressed_and_select=ops.bind_fused("triton"),
            decoder=lambda *args, **kwargs: triton.TritonDecoder(*args, **kwargs),  # looking it up imports Triton
            mix=ops.bind_mix("triton"),
            layer=ops.bind_layer("triton"),
        ),
        KernelBackend("portable", ops.bind("portable", portable), _any_floating_point),
        KernelBackend(
            "reference",
            KernelFunctions(
                reference.compressed_attention,
                reference.select_blocks,
                reference.selected_attention,
                reference.sliding_attention,
            ),
            _any_floating_point,
            by_default=False,
        ),
    )
}


def plan(request: BackendRequest, device: torch.device, dtype: torch.dtype, shape: KernelShape) -> KernelPlan:
    """One backend per branch; raises if a named one cannot run."""
    planned = _plan if torch.compiler.is_compiling() else _plan_once
    return planned(request, device, dtype, shape)


def _plan(request: BackendRequest, device: torch.device, dtype: torch.dtype, shape: KernelShape) -> KernelPlan:
    g = shape.geometry
    choices = _choose_all(device, dtype, *request, *shape[:4], g.l, g.d, g.l_sel, g.n_sel, g.w)
    compressed, select, selected, sliding = [BACKENDS[choice.backend] for choice in choices]
    functions = KernelFunctions(
        compressed.functions.compressed, select.functions.select, selected.functions.selected, sliding.functions.sliding
    )
    both = (compressed.compressed_and_select if compressed is select else None) or partial(
        _compressed_then_select, functions
    )
    chosen = (compressed, select, selected, sliding)
    if any(backend is not select for backend in chosen if backend.is_whole):
        return KernelPlan(functions, choices, both, None, reference.mix, None)
    layer = select.layer if all(backend is select for backend in chosen) else None
    return KernelPlan(functions, choices, both, select.decoder, select.mix, layer)


_plan_once = functools.cache(_plan)  # called by every layer at every step


def _compressed_then_select(
    run: KernelFunctions, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, first: Tensor, *, geometry: Geometry,
    scale: float, return_lse: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    out, lse = run.compressed(q, k, v, pos, first, geometry=geometry, scale=scale, return_lse=True)
    idx = run.select(q, k, pos, first, geometry=geometry, scale=scale)
    return (out, idx, lse) if return_lse else (out, idx)


def backend_request(requested: RequestedKernels) -> BackendRequest:
    """One name for all branches, or a name for some of them, as a `BackendRequest` of names that backends have.

    Branches without a name take the one of NSA_KERNEL or NSA_KERNEL_<BRANCH>; a `BackendRequest` is returned unchanged.
    """
    if isinstance(requested, BackendRequest):
        check_names(requested)
        return requested
    if isinstance(requested, str):
        requested = BackendRequest(*[requested] * len(BRANCHES))
    elif isinstance(requested, Mapping):
        if unknown := set(requested) - set(BRANCHES):
            raise KernelUnavailable(
                f"kernels names {', '.join(map(repr, unknown))}, which is not a branch. Use: {', '.join(BRANCHES)}."
            )
        requested = BackendRequest(**requested)
    else:
        raise KernelUnavailable(
            f"kernels is {requested!r}: it must be a backend's name, a mapping of branches to names, or a "
            f"BackendRequest. Pass e.g. kernels='portable'."
        )
    check_names(requested)
    named = zip(requested, _from_environment(), strict=True)
    return BackendRequest(*(requested if name == "auto" else name for name, requested in named))


@constant_when_traced  # tracing cannot read the environment
def _from_environment() -> BackendRequest:
    named = requested_backends(BRANCHES)
    for name, variable in named.values():
        _check_name(f"environment {variable}", name)
    return BackendRequest(**{branch: requested.name for branch, requested in named.items()})


def check_names(request: BackendRequest) -> None:
    """Raise for a name that no backend has; whether a backend can run is checked once device and dtype are known."""
    for branch, name in request._asdict().items():
        _check_name(f"kernels.{branch}", name)


def _check_name(origin: str, name: str) -> None:
    if name != "auto" and name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise KernelUnavailable(f"{origin} is {name!r}, which is not a backend. Use one of: {known}.")


@constant_when_traced  # a check starts a process, and a graph has no place for the text of reasons
def _choose_all(
    device: torch.device, dtype: torch.dtype, compressed: str, select: str, selected: str, sliding: str,
    n_kv_groups: int, heads_per_group: int, d_k: int, d_v: int, *block_sizes: int,
) -> tuple[BackendChoice, ...]:  # fmt: skip
    """Takes plain values: named tuples that are made while tracing arrive empty."""
    shape = KernelShape(n_kv_groups, heads_per_group, d_k, d_v, Geometry(*block_sizes))
    request = BackendRequest(compressed, select, selected, sliding)
    return tuple(_select_backend(branch, name, device, dtype, shape) for branch, name in request._asdict().items())


def _select_backend(
    branch: str, name: str, device: torch.device, dtype: torch.dtype, shape: KernelShape
) -> BackendChoice:
    if name != "auto":
        if reason := BACKENDS[name].why_not(branch, device, dtype, shape):
            origin = requested_backends([branch]).get(branch)
            by = f" (environment {origin.variable})" if origin is not None and origin.name == name else ""
            raise KernelUnavailable(f"kernels.{branch}={name!r}{by} cannot run here: {reason}. Set it to 'auto'.")
        return BackendChoice(branch, name, requested=True)
    refused: list[PassedOver] = []
    for backend in BACKENDS.values():
        verify = backend.verify if device.type in _VERIFIED_ON else None
        if (not backend.by_default and verify is None) or branch not in backend.branches:
            continue
        if reason := backend.why_not(branch, device, dtype, shape):
            refused.append(PassedOver(backend.name, reason))
        elif verify is None:
            return BackendChoice(branch, backend.name, tuple(refused))
        elif (verdict := verify(device, dtype, shape)).usable_in(branch):
            return BackendChoice(branch, backend.name, tuple(refused), verified=True)
        else:
            refused.append(PassedOver(backend.name, verdict.summary, slower=bool(verdict.slower)))
    reasons = "; ".join(f"{one.backend}: {one.why}" for one in refused)
    raise KernelUnavailable(
        f"kernels.{branch}='auto' finds no backend for {dtype} on {device} ({reasons}). Use a floating-point dtype."
    )
