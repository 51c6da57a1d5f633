"""Implementations to benchmark: dense SDPA, every registered backend, and installed third-party packages."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nsa.bench import dense, nsa_backends, peers
from nsa.bench.case import TORCH_DTYPES, BenchCase, BenchRunner, BenchTask
from nsa.bench.machine import free_bytes
from nsa.kernels.registry import BACKENDS, BRANCHES
from nsa.token_counts import spell

DENSE = "dense SDPA"


@dataclass(frozen=True)
class BenchImplementation:
    name: str
    kind: str
    """`dense`, `nsa`, or `other`: computes a different function, so it is timed and gets no ratio."""
    make: dict[str, Callable[[BenchCase, BenchTask], BenchRunner]]
    """By operation: case and task → runner. A decode case has the task's length plus room to grow."""
    why_not: Callable[[BenchTask], str | None]
    needs_bytes: Callable[[BenchTask], int]
    differs: str = ""

    def refusal(self, task: BenchTask) -> str | None:
        """Why it cannot be timed here, or None. Memory counts: a benchmark must not exhaust the machine."""
        if reason := self.why_not(task):
            return reason
        if task.op not in self.make:
            return f"it has no {task.op}"
        needed, available = self.needs_bytes(task), free_bytes(torch.device(task.device))
        if needed > 0.8 * available:
            return (
                f"about {needed / 2**30:.0f} GiB would be needed at {spell(task.length)} and "
                f"{available / 2**30:.0f} GiB are free"
            )
        return None


def _backend_why_not(name: str) -> Callable[[BenchTask], str | None]:
    def why_not(task: BenchTask) -> str | None:
        for branch in BRANCHES if task.part == "all" else (task.part,):
            if reason := BACKENDS[name].why_not(
                branch, torch.device(task.device), TORCH_DTYPES[task.dtype], task.shape.kernel
            ):
                return f"{branch}: {reason}"
        return "selection has no gradient" if task.part == "select" and task.backward else None

    return why_not


def _dense_why_not(task: BenchTask) -> str | None:
    return None if task.shape.d_v <= task.shape.d_k else "it has no kernel for d_v above d_k"


def all_implementations() -> dict[str, BenchImplementation]:
    """Dense first; backends in the registry's order of preference."""
    dense_ops: dict[str, Callable[[BenchCase, BenchTask], BenchRunner]] = {
        "attention": dense.attention,
        "prefill": dense.prefill,
    }
    dense_ops["decode"] = dense.decode
    every = [BenchImplementation(DENSE, "dense", dense_ops, _dense_why_not, dense.needs_bytes)]
    for name in BACKENDS:
        ops = {
            "attention": nsa_backends.attention(name),
            "prefill": nsa_backends.prefill(name),
            "decode": nsa_backends.decode(name),
        }
        every.append(BenchImplementation(name, "nsa", ops, _backend_why_not(name), nsa_backends.needs_bytes(name)))
    every.append(
        BenchImplementation("lucidrains", "other", {"attention": peers.lucidrains}, peers.lucidrains_why_not,
                  peers.lucidrains_needs_bytes, differs=peers.LUCIDRAINS_DIFFERS)
    )  # fmt: skip
    every.append(
        BenchImplementation("fla naive", "nsa", {"attention": peers.fla}, peers.fla_why_not, peers.fla_needs_bytes)
    )
    return {implementation.name: implementation for implementation in every}
