"""Memory estimate and cost of a run from its config: parameters, FLOPs, memory, checkpoint size, time, price.

Weights, gradients and optimizer states are exact. The activation memory estimate is compared with measurements in
tests/nsa_train/planning/test_activations.py. Time and price depend on the kernel backend
(`nsa_train.planning.step_time`).
Frozen parameters (`train.trainable`) have no gradients and no optimizer states; FLOPs and collectives are counted as if
all were trained, so that the time of such a run is an upper bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nsa.kernels.registry import BackendChoice
from nsa.options import Checkpointing
from nsa_train.config.model_sections import KernelsConfig
from nsa_train.config.schema import RunConfig, TrainConfig
from nsa_train.planning.activations import FP32, ActivationMemory, ForwardPass, activations
from nsa_train.planning.collective_bytes import weight_shards
from nsa_train.planning.hardware import GIB, RANKS_PER_NODE, HardwareTarget
from nsa_train.planning.model_figures import ModelFigures, ParameterCounts, model_figures
from nsa_train.planning.step_time import (
    BACKENDS,
    StepTime,
    StepWork,
    backend_that_will_run,
    step_time,
    time_at_efficiency,
)

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
class BackendEstimate:
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
    tokens_per_step: int
    steps: int
    step_s: float
    measured: bool
    """Whether `step_s` was measured on the target; otherwise it is modelled, calculated or assumed."""
    timing: str
    """Source of `step_s`, as text."""
    usd_per_hour: float
    """All devices together; assumed unless given."""
    backend: str
    """The kernel backend that will run, for which time, memory and price are; the slowest, if branches differ."""
    backends: tuple[BackendEstimate, ...]
    """The backends to compare, the fastest first."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s

    @property
    def wall_s(self) -> float:
        return self.steps * self.step_s

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
    """`efficiency`: model FLOPs utilization (fraction of the peak), in place of the backend's time; `price`: USD per
    device-hour; `kernels`: backends as decided on the target, if it is this machine;
    `figures`: of the model, if they are known."""
    train, vocab_size = config.train, config.model.vocab_size or vocab_size
    figures = figures or model_figures(config, vocab_size)
    parameters = figures.parameters
    tokens = train.batch_size * train.accumulate_grad_batches * train.seq_len
    mode = config.runtime.gradient_checkpointing
    work = StepWork(
        tokens,
        figures.flops,
        figures.recomputed[mode],
        recomputes_attention=mode == "full",
        optimizer_bytes=_ADAM_BYTES_MOVED * _trained_share(config, target, figures),
    )
    backend = backend_that_will_run(config, target.device.is_gpu, kernels)

    def with_backend(name: str) -> BackendEstimate:
        timing = step_time(config, target, work, name)
        memory = _memory(_with_kernels(config, name), target, vocab_size, figures)
        return BackendEstimate(name, timing.seconds, timing.source, memory)

    will_run = with_backend(backend)
    time = StepTime(will_run.step_s, will_run.timing)
    if measured_step_s is not None:
        time = StepTime(measured_step_s, "measured: one step of the dry run")
    elif efficiency is not None:
        time = time_at_efficiency(config, target, work, efficiency)
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
        tokens_per_step=tokens,
        steps=train.steps,
        step_s=time.seconds,
        measured=measured_step_s is not None,
        timing=time.source,
        usd_per_hour=target.count * (target.device.usd_per_hour if price is None else price),
        backend=backend,
        backends=tuple(will_run if name == backend else with_backend(name) for name in BACKENDS[target.device.is_gpu]),
    )


def _with_kernels(config: RunConfig, backend: str) -> RunConfig:
    """The run with this backend in every branch."""
    kernels = KernelsConfig(**dict.fromkeys(KernelsConfig.model_fields, backend))
    return config.model_copy(update={"kernels": kernels})


def _memory(config: RunConfig, target: HardwareTarget, vocab_size: int, figures: ModelFigures) -> MemoryEstimate:
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
    weights, gradients = FP32 * _share(config, target, figures), FP32 * trained
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


def _share(config: RunConfig, target: HardwareTarget, figures: ModelFigures) -> int:
    """Parameters that one device holds, counted for rank 0, which has the largest share."""
    return figures.share(weight_shards(config.parallel, target.count, RANKS_PER_NODE), config.parallel.tp)


def _trained_share(config: RunConfig, target: HardwareTarget, figures: ModelFigures) -> int:
    """Parameters of one device that have gradients and optimizer state."""
    return figures.trained_share(weight_shards(config.parallel, target.count, RANKS_PER_NODE), config.parallel.tp)


def _communication(config: RunConfig, target: HardwareTarget, figures: ModelFigures, width: int) -> int:
    """ddp: a second copy of the gradients, in buckets. Sharded: one gathered block and one prefetched, the gathered
    embedding and head, and the full gradient of one block in fp32, with their padding. Not measured."""
    if target.count == 1:
        return 0
    if config.parallel.data == "ddp":
        return FP32 * figures.trained_share(1) // config.parallel.tp
    shards, tp = weight_shards(config.parallel, target.count, RANKS_PER_NODE), config.parallel.tp
    block = max(shapes.padded(shards, tp) for shapes in figures.blocks.values())
    outside = sum(shapes.padded(shards, tp) for shapes in figures.outside.values())
    return width * (2 * block + outside) + FP32 * block
