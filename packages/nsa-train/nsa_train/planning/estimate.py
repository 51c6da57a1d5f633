"""Memory estimate and cost of a run from its config: parameters, FLOPs, memory, checkpoint size, time, price.

Weights, gradients and optimizer states are exact. The activation memory estimate is compared with measurements in
tests/nsa_train/planning/test_activations.py.

Time and price depend on the kernel backend; none of it was measured on a GPU. Attention in Triton runs at the share of
the GPU's peak that the performance model gives for the base shape (predictions.json). Attention in the portable backend
waits for memory: it copies queries and results for every selected block and stores scores. The rest of a step runs at
the share of the peak that a published run reached.

Frozen parameters (`train.trainable`) have no gradients and no optimizer states; FLOPs and collectives are counted as if
all were trained, so that the time of such a run is an upper bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nsa.bench.predictions import gpu_of_model, predictions
from nsa.core.branches import ATTENTION_PARTS, DENSE_PART
from nsa.core.layer_pattern import kind_counts
from nsa.geometry import Geometry
from nsa.gpus import GPUS
from nsa.kernels.registry import BackendChoice
from nsa.options import SELECTING_KINDS, Checkpointing
from nsa_train.config.model_sections import KernelsConfig
from nsa_train.config.schema import RunConfig, TrainConfig
from nsa_train.planning.activations import FP32, ActivationMemory, ForwardPass, activations
from nsa_train.planning.collective_bytes import weight_shards
from nsa_train.planning.hardware import GIB, HardwareTarget
from nsa_train.planning.model_figures import ModelFigures, ParameterCounts, model_figures
from nsa_train.run_model import wanted_kernels

_BASE_HEADS, _BASE_WIDTH = 12, 64  # of the base shape, for which the times are modelled
_MODELLED_LIKE = "a100"
"""The GPU whose share of the peak stands for a GPU that is not modelled."""

BACKENDS = {True: ("triton", "portable"), False: ("cpu", "portable")}
"""Backends that an estimate compares on a GPU (True) and on a CPU (False), the fastest first."""
_SLOWEST_FIRST = ("reference", "portable", "triton", "cpu")
_CPU_EFFICIENCY = 0.1
_CPU_PORTABLE_SLOWDOWN = 4.0  # measured on two cores: 3 to 5
_REST_EFFICIENCY = {True: 0.39, False: 0.33}
"""Share of the peak at which a step runs apart from attention and optimizer, with compiled blocks and without them.

Published: MFU of torchtitan's Llama 3.1 8B on 8 and 128 H100, FSDP without float8, selective checkpointing
(github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md). There communication is part of the time,
and the peak that is counted is above that of the GPUs that were used; smaller models reach less.
"""
_BANDWIDTH_SHARE = 0.85
# Times that the portable backend moves a byte of copied rows, and of scores, through memory; counted in its code.
_ROW_PASSES, _ROW_PASSES_FORWARD = 16, 7
_SCORE_PASSES, _SCORE_PASSES_FORWARD = 18, 6
_FP32 = 4


@dataclass(frozen=True)
class _StepWork:
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
class _StepTime:
    seconds: float
    source: str
    """How the time was found, as text."""


def _backend_that_will_run(config: RunConfig, is_gpu: bool, decided: Sequence[BackendChoice] | None = None) -> str:
    """The slowest of the branches' backends: as decided on this machine, else as the settings request them.

    `auto` is the compiled backend on a CPU, and on a GPU Triton, once it has passed its check there.
    """
    names = [choice.backend for choice in decided] if decided is not None else list(wanted_kernels(config))
    backends = {BACKENDS[is_gpu][0] if name == "auto" else name for name in names}
    return next((name for name in _SLOWEST_FIRST if name in backends), BACKENDS[is_gpu][0])


def _time_at_efficiency(
    config: RunConfig, target: HardwareTarget, work: _StepWork, efficiency: float, origin: str = "given"
) -> _StepTime:
    """Time of a step whose FLOPs, those of recomputation included, run at this share of the peak."""
    flops_s = work.tokens * (sum(work.flops_per_token.values()) + work.recomputed_flops_per_token)
    flops_s /= target.count * target.flops(config.runtime.precision) * efficiency
    optimizer_s = work.optimizer_bytes / (1e9 * target.device.bandwidth_gb_s)
    return _StepTime(flops_s + optimizer_s, f"{efficiency:.0%} of peak ({origin})")


def _step_time(config: RunConfig, target: HardwareTarget, work: _StepWork, backend: str) -> _StepTime:
    """Time of a step with this backend in every branch."""
    if not target.device.is_gpu:
        compiled = _time_at_efficiency(config, target, work, _CPU_EFFICIENCY, "assumed, rounded")
        if backend == "cpu":
            return compiled
        source = f"assumed: {_CPU_PORTABLE_SLOWDOWN:.0f} times the cpu backend's (3 to 5 times measured)"
        return _StepTime(_CPU_PORTABLE_SLOWDOWN * compiled.seconds, source)
    peak = target.count * target.flops(config.runtime.precision)
    bandwidth = 1e9 * target.device.bandwidth_gb_s
    optimizer_s = work.optimizer_bytes / bandwidth
    rest_share = _REST_EFFICIENCY[config.runtime.compile != "off"]  # auto compiles on a GPU
    rest_s = work.tokens * work.other_flops / (peak * rest_share) + optimizer_s
    rest = f"the rest at {rest_share:.0%} (torchtitan's Llama 3.1 8B on H100); not measured here"
    if backend == "triton":
        share, like = _triton_share(target.device.name, config.train.seq_len)
        seconds = work.tokens * work.attention_flops / (peak * share)
        as_on = f" as on {like}" if like not in target.device.name else ""
        return _StepTime(
            seconds + rest_s, f"modelled: attention at {share:.0%} of peak{as_on}, {rest}; host time not included"
        )
    moved = _portable_bytes_per_token(config, recomputed=work.recomputes_attention)
    seconds = work.tokens * moved / (target.count * _BANDWIDTH_SHARE * bandwidth)
    least = "at least; " if backend == "reference" else ""
    source = f"{least}calculated: attention moves {moved / 1e6:.0f} MB per token through memory, {rest}"
    return _StepTime(seconds + rest_s, source)


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
    gpu = gpu_of_model(device_name) or _MODELLED_LIKE
    lengths = {n for name, n, *_ in predictions() if name == gpu}
    nearest = min(lengths, key=lambda n: max(n / length, length / n))
    reads = Geometry().total_reads(nearest)
    per_read = 2 * _BASE_HEADS * 2 * _BASE_WIDTH
    flops = 3 * per_read * sum(reads.values()) + 2 * _BASE_HEADS * _BASE_WIDTH * reads["compressed"]
    seconds = predictions()[gpu, nearest, "bf16", True]["seconds"]
    peak = next(spec.bf16_tflops for name, spec in GPUS.items() if name.startswith(gpu))
    return flops / (seconds * peak * 1e12), gpu


_ADAM_MOMENTS = 2
_ADAM_BYTES_MOVED = 28  # per parameter and step: weight, gradient and two moments read, all but the gradient written
_CONTEXT_BYTES = {True: int(0.8 * GIB), False: int(0.4 * GIB)}  # CUDA context, or a Python process with torch
_FRAGMENTATION = 0.05
_FILED_TENSOR_BYTES = 8 * 1024  # overhead per tensor in a checkpoint, rounded: headers, index, alignment


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: ActivationMemory
    gradient_checkpointing: Checkpointing
    optimizer_step: int
    """Temporary memory of the optimizer step, when activations are already freed."""
    communication: int
    reserve: int
    """Driver context and fragmentation (assumed)."""
    available: int

    @property
    def total(self) -> int:
        temporary = max(self.activations.peak(self.gradient_checkpointing), self.optimizer_step)
        return self.weights + self.gradients + self.optimizer + self.communication + temporary + self.reserve

    @property
    def fits(self) -> bool:
        return self.total <= self.available


@dataclass(frozen=True)
class _BackendEstimate:
    """A run with one kernel backend in every branch."""

    backend: str
    step_s: float
    timing: str
    memory: MemoryEstimate


@dataclass(frozen=True)
class RunEstimate:
    target: HardwareTarget
    vocab_size: int
    parameters: ParameterCounts
    flops_per_token: Mapping[str, float]
    """Forward and backward for one token, by part, summed over layers."""
    recomputed_flops_per_token: float
    """FLOPs that gradient checkpointing adds: the second forward pass of the blocks, or of all but the attention
    operators."""
    memory: MemoryEstimate
    checkpoint_bytes: int
    kept_checkpoints: int
    """Number at the end of the run: the newest, and those at multiples of train.keep_every."""
    export_bytes: int
    """Final model.pt and model.safetensors."""
    cache_bytes: int
    """KV cache of one row of train.seq_len tokens at inference, in the run's precision."""
    padding: float
    """Gathered weights as a multiple of those that are needed (`ModelFigures.padding`); 1 if they are not sharded."""
    tokens_per_step: int
    steps: int
    peak_flops: float
    """Peak FLOP/s of all devices in the run's precision."""
    step_s: float
    measured: bool
    """Whether `step_s` was measured on the target; otherwise it is modelled, calculated or assumed."""
    timing: str
    """Source of `step_s`, as text."""
    usd_per_hour: float
    """All devices together; assumed unless given."""
    backend: str
    """The kernel backend that will run, for which time, memory and price are; the slowest, if branches differ."""
    backends: tuple[_BackendEstimate, ...]
    """The backends to compare, the fastest first."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s

    @property
    def wall_s(self) -> float:
        return self.steps * self.step_s

    def mfu(self, tokens_per_s: float) -> float:
        """Model FLOPs utilization at this speed: recomputed FLOPs do not count."""
        return tokens_per_s * sum(self.flops_per_token.values()) / self.peak_flops

    @property
    def usd(self) -> float:
        return self.price_of(self.step_s)

    def price_of(self, step_s: float) -> float:
        """Price of the whole run in USD, at this time per step."""
        return self.steps * step_s / 3600 * self.usd_per_hour


def estimate(
    config: RunConfig,
    target: HardwareTarget,
    vocab_size: int,
    *,
    efficiency: float | None = None,
    price: float | None = None,
    measured_step_s: float | None = None,
    kernels: Sequence[BackendChoice] | None = None,
    figures: ModelFigures | None = None,
) -> RunEstimate:
    """`efficiency`: share of the peak that all FLOPs reach, recomputation included, in place of the backend's time;
    `price`: USD per device-hour; `kernels`: backends as decided on the target, if it is this machine;
    `figures`: of the model, if they are known."""
    train, vocab_size = config.train, config.model.vocab_size or vocab_size
    figures = figures or model_figures(config, vocab_size)
    parameters = figures.parameters
    tokens = train.global_rows * train.seq_len
    mode = config.runtime.gradient_checkpointing
    work = _StepWork(
        tokens,
        figures.flops,
        figures.recomputed[mode],
        recomputes_attention=mode == "full",
        optimizer_bytes=_ADAM_BYTES_MOVED * _trained_share(config, target, figures),
    )
    backend = _backend_that_will_run(config, target.device.is_gpu, kernels)

    def with_backend(name: str) -> _BackendEstimate:
        timing = _step_time(config, target, work, name)
        kernels = KernelsConfig(**dict.fromkeys(KernelsConfig.model_fields, name))  # in every branch
        memory = estimate_memory(config.model_copy(update={"kernels": kernels}), target, vocab_size, figures)
        return _BackendEstimate(name, timing.seconds, timing.source, memory)

    will_run = with_backend(backend)
    time = _StepTime(will_run.step_s, will_run.timing)
    if measured_step_s is not None:
        time = _StepTime(measured_step_s, "measured: one step of the dry run")
    elif efficiency is not None:
        time = _time_at_efficiency(config, target, work, efficiency)
    return RunEstimate(
        target=target,
        vocab_size=vocab_size,
        parameters=parameters,
        flops_per_token=figures.flops,
        recomputed_flops_per_token=work.recomputed_flops_per_token,
        memory=will_run.memory,
        checkpoint_bytes=_checkpoint_bytes(figures),
        kept_checkpoints=_kept_checkpoints(config.train),
        export_bytes=2 * FP32 * parameters.total,
        cache_bytes=figures.cache_bytes,
        padding=figures.padding(
            weight_shards(config.parallel, target.count, target.ranks_per_node), config.parallel.tp
        ),
        tokens_per_step=tokens,
        steps=train.steps,
        peak_flops=target.count * target.flops(config.runtime.precision),
        step_s=time.seconds,
        measured=measured_step_s is not None,
        timing=time.source,
        usd_per_hour=target.count * (target.device.usd_per_hour if price is None else price),
        backend=backend,
        backends=tuple(will_run if name == backend else with_backend(name) for name in BACKENDS[target.device.is_gpu]),
    )


def estimate_memory(
    config: RunConfig, target: HardwareTarget, vocab_size: int, figures: ModelFigures
) -> MemoryEstimate:
    """Memory of one device; `kernels` of the config are the backends that will run."""
    bf16, on_gpu = config.runtime.precision == "bf16", target.device.is_gpu
    width = 2 if bf16 else FP32
    sharded = target.count > 1 and config.parallel.data != "ddp"
    one = ForwardPass(
        rows=-(-config.train.batch_size // target.data_ranks(config.parallel.ranks_per_row)),
        seq_len=config.train.seq_len,
        vocab_size=vocab_size,
        autocast=bf16 and not sharded,
        width=width,
        on_gpu=on_gpu,
        tp=config.parallel.tp,
        cp=config.parallel.cp,
    )
    in_products = figures.parameters.products_per_layer
    activation = activations(config, one, in_products, vocab_size * config.model.dim)
    trained = _trained_share(config, target, figures)
    # Of rank 0, which has the largest share.
    held = figures.share(weight_shards(config.parallel, target.count, target.ranks_per_node), config.parallel.tp)
    weights, gradients = FP32 * held, FP32 * trained
    states = FP32 * (_ADAM_MOMENTS * trained + figures.trained_tensors)
    known = weights + gradients + states + activation.peak(config.runtime.gradient_checkpointing)
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=states,
        activations=activation,
        gradient_checkpointing=config.runtime.gradient_checkpointing,
        optimizer_step=gradients if on_gpu else 0,
        communication=_communication(config, target, figures, width),
        reserve=_CONTEXT_BYTES[on_gpu] + int(_FRAGMENTATION * known),
        available=target.memory_bytes,
    )


def _checkpoint_bytes(figures: ModelFigures) -> int:
    """Weights in fp32, and of those that are trained AdamW's two moments and a step count per tensor, with the overhead
    of the file format."""
    parameters, trained = figures.parameters, figures.trained_tensors
    tensors = parameters.tensors + (1 + _ADAM_MOMENTS) * trained
    states = FP32 * (_ADAM_MOMENTS * figures.trained_share(1) + trained)
    return FP32 * parameters.total + states + tensors * _FILED_TENSOR_BYTES


def _kept_checkpoints(train: TrainConfig) -> int:
    """Computed without a list of steps: a run may have a billion."""
    steps, every, for_good = train.steps, train.save_every, train.keep_every
    by_interval, at_the_end = (steps // every, int(steps % every > 0)) if every else (0, 1)
    newest = min(train.keep_checkpoints, by_interval + at_the_end)
    if not every or not for_good:
        return newest
    oldest_of_newest = (by_interval - (newest - at_the_end) + 1) * every
    return newest + (oldest_of_newest - 1) // for_good


def _trained_share(config: RunConfig, target: HardwareTarget, figures: ModelFigures) -> int:
    """Parameters of one device that have gradients and optimizer state."""
    return figures.trained_share(
        weight_shards(config.parallel, target.count, target.ranks_per_node), config.parallel.tp
    )


def _communication(config: RunConfig, target: HardwareTarget, figures: ModelFigures, width: int) -> int:
    """ddp: a second copy of the gradients, in buckets. Sharded: one gathered block and one prefetched, the gathered
    embedding and head, and the full gradient of one block in fp32, with their padding. Not measured."""
    if target.count == 1:
        return 0
    if config.parallel.data == "ddp":
        return FP32 * figures.trained_share(1) // config.parallel.tp
    shards, tp = weight_shards(config.parallel, target.count, target.ranks_per_node), config.parallel.tp
    block = max(shapes.padded(shards, tp) for shapes in figures.blocks.values())
    outside = sum(shapes.padded(shards, tp) for shapes in figures.outside.values())
    return width * (2 * block + outside) + FP32 * block
