"""Report on this installation: versions, device, the backend of each branch with reasons, warnings."""

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nsa import __version__
from nsa.bench.case import TORCH_DTYPES
from nsa.core.nsa_attention import NSAAttention
from nsa.kernel_variables import requested_backends
from nsa.kernels.choice_text import kernels_text, slow_kernels_warning
from nsa.kernels.cpu import describe
from nsa.kernels.registry import BACKENDS, BRANCHES, BackendChoice
from nsa.kernels.triton_environment import triton_facts, triton_faults, version_warning


def installation_facts(
    where: torch.device, dtype_name: str, n_heads: int, n_kv_groups: int, d_k: int, d_v: int
) -> dict[str, Any]:
    """Versions, device, and each branch's backends with reasons, ready for JSON."""
    dtype = TORCH_DTYPES[dtype_name]
    with torch.device("meta"):  # only its shape is needed
        attention = NSAAttention(n_heads * d_k, n_heads, n_kv_groups, d_k, d_v)
    choices = attention.plan(where, dtype).choices
    accelerator = torch.cuda.get_device_name(where) if where.type == "cuda" else "no GPU" if where.type == "cpu" else ""
    return {
        "nsa": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(where),
        "device_name": accelerator or where.type,
        "threads": torch.get_num_threads(),
        "dtype": dtype_name,
        "cpu_kernels": describe() if where.type == "cpu" else None,
        "triton": _triton_facts(where),
        "kernels": kernels_text(choices),
        "triton_check": _verdict_text(attention, where, dtype, choices) if where.type == "cuda" else None,
        "backends": [
            dict(zip(("branch", "backend", "here", "why"), row, strict=True))
            for row in _rows(attention, where, dtype, choices)
        ],
        "warnings": [
            text
            for text in (slow_kernels_warning(choices, where.type), version_warning(), _slow_start_warning())
            if text
        ],
    }


def triton_lines(facts: dict[str, Any]) -> list[str]:
    """What `installation_facts` say about Triton's environment: one line, or one for each fault with its fix."""
    triton = facts["triton"]
    if triton is None:
        return []
    if triton["faults"]:
        return [f"Triton cannot run here: {fault['problem']}\n  fix: {fault['fix']}" for fault in triton["faults"]]
    used = f"cache {triton['cache']}, C compiler {triton['compiler']}, {triton['headers']}"
    return [f"Triton {triton['version']} can build and load its launcher here: {used}"]


def _triton_facts(where: torch.device) -> dict[str, Any] | None:
    """What Triton needs here and lacks; None on other devices than GPUs where it is not installed."""
    if where.type != "cuda" and importlib.util.find_spec("triton") is None:
        return None
    faults = triton_faults("cuda" if where.type == "cuda" and torch.cuda.is_available() else "cpu")
    return {**triton_facts(), "faults": [fault._asdict() for fault in faults]}


def _slow_start_warning() -> str | None:
    """If torch is compiled anew by every process: its byte code is not there and will not be kept."""
    compiled = importlib.util.cache_from_source(torch.__file__)
    if os.path.exists(compiled):
        return None
    folder = os.path.dirname(torch.__file__)
    if sys.dont_write_bytecode:
        why = "PYTHONDONTWRITEBYTECODE is set (or python -B)"
    elif not os.access(folder, os.W_OK):
        why = f"{folder} cannot be written"
    else:
        return None
    return (
        f"every start compiles torch and the training engine from source, some 15 s of CPU time per rank and per "
        f"restart: they were installed without byte code, and it is not kept because {why}. Run once, where it may be "
        f"written, e.g. in the image: python -m compileall -q {os.path.dirname(folder)}"
    )


def _verdict_text(
    attention: NSAAttention, device: torch.device, dtype: torch.dtype, choices: Sequence[BackendChoice]
) -> str:
    """Whether the Triton kernels passed their check, and the file of the record; without a check if none was needed."""

    verify = BACKENDS["triton"].verify
    if verify is None or all(choice.requested for choice in choices):
        return "not needed: every branch was requested by name"
    if reason := BACKENDS["triton"].why_not("selected", device, dtype, attention.strategy.shape):
        return f"not possible: {reason}"
    verdict = verify(device, dtype, attention.strategy.shape)  # known by now
    if not verdict.checked:
        return f"not done: {verdict.reason}"
    record = f", record in {verdict.evidence}" if verdict.evidence else ", no record could be kept"
    passed = f"passed, and slower than the portable backend ({verdict.slower})" if verdict.slower else "passed"
    return (passed if verdict.passed else f"FAILED ({verdict.reason})") + record


def _rows(
    attention: NSAAttention, device: torch.device, dtype: torch.dtype, choices: Sequence[BackendChoice]
) -> Iterator[tuple[str, str, str, str]]:
    """Branch, backend, whether it is chosen, can or cannot run here, and why."""

    requested = requested_backends(BRANCHES)
    for choice in choices:
        by = requested.get(choice.branch)
        for backend in BACKENDS.values():
            if backend.name == choice.backend:
                why = f"requested by {by.variable}" if by is not None and by.name == backend.name else choice.reason
                yield choice.branch, backend.name, "chosen", why
            elif reason := backend.why_not(choice.branch, device, dtype, attention.strategy.shape):
                yield choice.branch, backend.name, "cannot", reason
            else:
                yield choice.branch, backend.name, "can", _why_not_chosen(backend.name, device, choice)


def _why_not_chosen(backend: str, device: torch.device, choice: "BackendChoice") -> str:
    """Say why a backend that can run was not chosen."""
    if backend == "reference":
        return "only by name: plain PyTorch, for checking, slow"
    if backend == "triton" and device.type == "cpu":
        return "only by name: interpreted, for checking, slow"
    if why := choice.why_not(backend):
        return why
    if BACKENDS[backend].verify is not None and not choice.verified:
        return "only by name, until it is checked on this GPU"
    return "not requested" if choice.requested else f"after {choice.backend} in preference"
