"""Step time of a run by kernel backend: modelled for Triton, calculated for the portable backend, assumed for the rest.

None of it was measured on a GPU. Attention in Triton runs at the share of the GPU's peak that the performance model
gives for the base shape (predictions.json). Attention in the portable backend waits for memory: it copies queries and
results for every selected block and stores scores. The rest of a step runs at an assumed share of the peak.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nsa.bench.predictions import predictions
from nsa.core.branches import ATTENTION_PARTS, DENSE_PART
from nsa.core.layer_pattern import kind_counts
from nsa.geometry import Geometry
from nsa.gpus import GPUS
from nsa.kernels.registry import BackendChoice
from nsa.options import SELECTING_KINDS
from nsa_train.config.schema import RunConfig
from nsa_train.planning.hardware import HardwareTarget
from nsa_train.run_model import wanted_kernels

_BASE_HEADS, _BASE_WIDTH = 12, 64  # of the base shape, for which the times are modelled
_MODELLED_LIKE = "a100"
"""The GPU whose share of the peak stands for a GPU that is not modelled."""

BACKENDS = {True: ("triton", "portable"), False: ("cpu", "portable")}
"""Backends that an estimate compares on a GPU (True) and on a CPU (False), the fastest first."""
_SLOWEST_FIRST = ("reference", "portable", "triton", "cpu")
_CPU_EFFICIENCY = 0.1
_CPU_PORTABLE_SLOWDOWN = 4.0  # measured on two cores: 3 to 5
_REST_EFFICIENCY = 0.25  # matrix products of a 125M model on an A100
_BANDWIDTH_SHARE = 0.85
# Times that the portable backend moves a byte of copied rows, and of scores, through memory; counted in its code.
_ROW_PASSES, _ROW_PASSES_FORWARD = 16, 7
_SCORE_PASSES, _SCORE_PASSES_FORWARD = 18, 6
_FP32 = 4


@dataclass(frozen=True)
class StepWork:
    """Work of one optimizer step, all devices together."""

    tokens: int
    flops_per_token: Mapping[str, float]
    """Forward and backward, by part."""
    recomputed_flops_per_token: float
    """FLOPs that gradient checkpointing adds; 0 without it."""
    recomputes_attention: bool
    """Whether the attention operators are among that."""
    optimizer_bytes: float
    """Bytes that the optimizer step of one device moves."""

    @property
    def attention_flops(self) -> float:
        """FLOPs of the branches, the selection and dense layers, recomputation included."""
        parts = {part: self.flops_per_token.get(part, 0.0) for part in (*ATTENTION_PARTS, DENSE_PART)}
        again = sum(count if part == "select" else count / 3 for part, count in parts.items())
        return sum(parts.values()) + (again if self.recomputes_attention else 0.0)

    @property
    def other_flops(self) -> float:
        return sum(self.flops_per_token.values()) + self.recomputed_flops_per_token - self.attention_flops


@dataclass(frozen=True)
class StepTime:
    seconds: float
    source: str
    """How the time was found, as text."""


def backend_that_will_run(config: RunConfig, is_gpu: bool, decided: Sequence[BackendChoice] | None = None) -> str:
    """The slowest of the branches' backends: as decided on this machine, else as the settings request them.

    `auto` is the compiled backend on a CPU, and on a GPU Triton, once it has passed its check there.
    """
    names = [choice.backend for choice in decided] if decided is not None else list(wanted_kernels(config))
    backends = {BACKENDS[is_gpu][0] if name == "auto" else name for name in names}
    return next((name for name in _SLOWEST_FIRST if name in backends), BACKENDS[is_gpu][0])


def time_at_efficiency(
    config: RunConfig, target: HardwareTarget, work: StepWork, efficiency: float, origin: str = "given"
) -> StepTime:
    """Time of a step at this share of the peak, which counts the model's own FLOPs and no recomputation."""
    flops_s = work.tokens * sum(work.flops_per_token.values())
    flops_s /= target.count * target.flops(config.runtime.precision) * efficiency
    optimizer_s = work.optimizer_bytes / (1e9 * target.device.bandwidth_gb_s)
    return StepTime(flops_s + optimizer_s, f"{efficiency:.0%} of peak ({origin})")


def step_time(config: RunConfig, target: HardwareTarget, work: StepWork, backend: str) -> StepTime:
    """Time of a step with this backend in every branch."""
    if not target.device.is_gpu:
        compiled = time_at_efficiency(config, target, work, _CPU_EFFICIENCY, "assumed, rounded")
        if backend == "cpu":
            return compiled
        source = f"assumed: {_CPU_PORTABLE_SLOWDOWN:.0f} times the cpu backend's (3 to 5 times measured)"
        return StepTime(_CPU_PORTABLE_SLOWDOWN * compiled.seconds, source)
    peak = target.count * target.flops(config.runtime.precision)
    bandwidth = 1e9 * target.device.bandwidth_gb_s
    optimizer_s = work.optimizer_bytes / bandwidth
    rest_s = work.tokens * work.other_flops / (peak * _REST_EFFICIENCY) + optimizer_s
    rest = f"the rest at {_REST_EFFICIENCY:.0%} (assumed); not measured on a GPU"
    if backend == "triton":
        share, like = _triton_share(target.device.name, config.train.seq_len)
        seconds = work.tokens * work.attention_flops / (peak * share)
        as_on = f" as on {like}" if like not in target.device.name else ""
        return StepTime(seconds + rest_s, f"modelled: attention at {share:.0%} of peak{as_on}, {rest}")
    moved = _portable_bytes_per_token(config, recomputed=work.recomputes_attention)
    seconds = work.tokens * moved / (target.count * _BANDWIDTH_SHARE * bandwidth)
    least = "at least; " if backend == "reference" else ""
    source = f"{least}calculated: attention moves {moved / 1e6:.0f} MB per token through memory, {rest}"
    return StepTime(seconds + rest_s, source)


def _portable_bytes_per_token(config: RunConfig, *, recomputed: bool) -> float:
    """Bytes per token that the portable backend moves through memory: passes × copied rows + passes × scores, in fp32.

    In packed rows a selected block lies across two windows of keys, each with a copy of the query and its result. A
    query scores all compressed keys, and up to two windows of the sliding branch; in a dense layer every key.
    """
    model, geometry, length = config.model, config.nsa.geometry, config.train.seq_len
    windows = 2 * geometry.n_sel
    row_passes = _ROW_PASSES + (_ROW_PASSES_FORWARD if recomputed else 0)
    score_passes = _SCORE_PASSES + (_SCORE_PASSES_FORWARD if recomputed else 0)
    selecting = windows * geometry.l_sel + geometry.n_compressed(length)
    in_window, in_window_layer = (2 * min(w, length) for w in (geometry.w, config.window))
    both = selecting + in_window
    scores = {"nsa": both, "merged": both, "global": selecting, "window": in_window_layer, "dense": length}
    total = 0
    for kind, count in kind_counts(model.attention, model.n_layers).items():
        rows = windows * (model.d_k + model.d_v) if kind in SELECTING_KINDS else 0
        total += count * (rows * row_passes + scores[kind] * score_passes)
    return model.n_heads * _FP32 * total


def _triton_share(device_name: str, length: int) -> tuple[float, str]:
    """Share of the bf16 peak that attention reaches by the model, and the GPU it is modelled for."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    gpu = next((word for word in words if word in {gpu for gpu, *_ in predictions()}), _MODELLED_LIKE)
    lengths = {n for name, n, *_ in predictions() if name == gpu}
    nearest = min(lengths, key=lambda n: max(n / length, length / n))
    reads = Geometry().total_reads(nearest)
    per_read = 2 * _BASE_HEADS * 2 * _BASE_WIDTH
    flops = 3 * per_read * sum(reads.values()) + 2 * _BASE_HEADS * _BASE_WIDTH * reads["compressed"]
    seconds = predictions()[gpu, nearest, "bf16", True]["seconds"]
    peak = next(spec.bf16_tflops for name, spec in GPUS.items() if name.startswith(gpu))
    return flops / (seconds * peak * 1e12), gpu
