"""Memory estimate and cost of a run from its config: parameters, FLOPs, memory, checkpoint size, time, price.

Weights, gradients and optimizer states are exact. The activation memory estimate is compared with measurements in
tests/planning/test_activations.py. Time and price depend on the kernel backend (`nsa.planning.step_time`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nsa.attention_rules import kind_counts
from nsa.config.schema import KernelsConfig, RunConfig, TrainConfig, settings
from nsa.core.branches import ATTENTION_PARTS, DENSE_PART
from nsa.errors import ConfigError
from nsa.kernels.registry import BackendChoice
from nsa.model.build import build_model
from nsa.model.llama_block_nsa import LlamaBlockNSA
from nsa.model.transformer import NSATransformer
from nsa.options import AttentionKind, Checkpointing
from nsa.planning.activations import FP32, ActivationMemory, ForwardPass, activations
from nsa.planning.hardware import GIB, RANKS_PER_NODE, HardwareTarget
from nsa.planning.step_time import BACKENDS, StepTime, StepWork, backend_that_will_run, step_time, time_at_efficiency

_ADAM_MOMENTS = 2
_ADAM_BYTES_MOVED = 28  # per parameter and step: weight, gradient and two moments read, all but the gradient written
_CONTEXT_BYTES = {True: int(0.8 * GIB), False: int(0.4 * GIB)}  # CUDA context, or a Python process with torch
_FRAGMENTATION = 0.05
_POSSIBLE_SIZE = 2**24
_FILED_TENSOR_BYTES = 8 * 1024  # overhead per tensor in a checkpoint, rounded: headers, index, alignment


@dataclass(frozen=True)
class ParameterCounts:
    embeddings: int
    attention: int
    feed_forward: int
    norms: int
    head: int
    """0 if the head shares the embedding."""
    tensors: int
    attention_per_layer: Mapping[AttentionKind, int]
    """By the kind of attention; of one layer."""
    feed_forward_per_layer: int

    @property
    def total(self) -> int:
        return self.embeddings + self.attention + self.feed_forward + self.norms + self.head

    @property
    def in_blocks(self) -> int:
        return self.attention + self.feed_forward + self.norms

    @property
    def products_per_layer(self) -> dict[AttentionKind, int]:
        """Weights of one block's attention and feed-forward."""
        return {kind: count + self.feed_forward_per_layer for kind, count in self.attention_per_layer.items()}


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
    """Assumed: driver context and fragmentation."""
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
    """In addition, with gradient checkpointing: the second forward pass of the blocks, or of all but the attention
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
        """Of the whole run in USD, at this time per step."""
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
) -> RunEstimate:
    """`efficiency`: model FLOPs utilization (fraction of the peak), in place of the backend's time; `price`: USD per
    device-hour; `kernels`: backends as decided on the target, if it is this machine."""
    train, vocab_size = config.train, config.model.vocab_size or vocab_size
    try:
        models = _models_of_one_layer(config, vocab_size)
        cache_bytes = _cache_bytes(config, models)
    except (RuntimeError, OverflowError, TypeError) as error:  # raised by torch for a size that does not fit in 64 bits
        raise _explain_impossible_size(config, error) from error
    parameters = _parameters(config, models)
    flops, recomputed_by_mode = _flops(config, models)
    tokens = train.batch_size * train.accumulate_grad_batches * train.seq_len
    mode = config.runtime.gradient_checkpointing
    moved = _ADAM_BYTES_MOVED * parameters.total / _shards(config, target)
    work = StepWork(tokens, flops, recomputed_by_mode[mode], recomputes_attention=mode == "full", optimizer_bytes=moved)
    backend = backend_that_will_run(config, target.device.is_gpu, kernels)

    def with_backend(name: str) -> BackendEstimate:
        found = step_time(config, target, work, name)
        memory = _memory(_with_kernels(config, name), target, vocab_size, parameters)
        return BackendEstimate(name, found.seconds, found.source, memory)

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
        flops_per_token=flops,
        recomputed_flops_per_token=work.recomputed_flops_per_token,
        memory=will_run.memory,
        checkpoint_bytes=_checkpoint_bytes(parameters),
        kept_checkpoints=_kept_checkpoints(config.train),
        export_bytes=2 * FP32 * parameters.total,
        cache_bytes=cache_bytes,
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


def _models_of_one_layer(config: RunConfig, vocab_size: int) -> dict[AttentionKind, NSATransformer]:
    """The model with one block of each kind that it has, on the meta device: real shapes, no memory."""
    models = {}
    for kind in _kind_counts(config):
        one_layer = config.model.model_copy(update={"n_layers": 1, "attention": (kind,)})
        with torch.device("meta"):
            models[kind] = build_model(config.model_copy(update={"model": one_layer}), vocab_size)
    return models


def _kind_counts(config: RunConfig) -> Counter[AttentionKind]:
    """How many layers of each kind the model has."""
    return kind_counts(config.model.attention, config.model.n_layers)


def _explain_impossible_size(config: RunConfig, error: Exception) -> Exception:
    """Names the largest size as the cause; if no size is large, returns the original error."""
    keys = [key for key in settings() if key.startswith(("model.", "nsa.")) or key == "train.seq_len"]
    sizes = {key: value for key in keys if isinstance(value := config.value(key), int)}
    key = max(sizes, key=lambda name: sizes[name])
    if sizes[key] < _POSSIBLE_SIZE:
        return error
    return ConfigError(f"{key} is {sizes[key]}: no tensor can be that large. Set a smaller value.")


def _parameters(config: RunConfig, models: Mapping[AttentionKind, NSATransformer]) -> ParameterCounts:
    counts = _kind_counts(config)
    sizes = {kind: {name: p.numel() for name, p in model.named_parameters()} for kind, model in models.items()}
    in_block = {kind: {n: size for n, size in of.items() if n.startswith("blocks.")} for kind, of in sizes.items()}
    outside = {name: size for name, size in sizes[next(iter(sizes))].items() if not name.startswith("blocks.")}

    def per_layer(part: str) -> dict[AttentionKind, int]:
        return {kind: sum(size for name, size in of.items() if part in name) for kind, of in in_block.items()}

    def of_blocks(part: str) -> int:
        return sum(counts[kind] * size for kind, size in per_layer(part).items())

    return ParameterCounts(
        embeddings=outside["embeddings.weight"],
        attention=of_blocks(".attention."),
        feed_forward=of_blocks(".feed_forward."),
        norms=of_blocks(".attention_norm.") + of_blocks(".feed_forward_norm.") + outside["lm_head.norm.weight"],
        head=outside.get("lm_head.w_out.weight", 0),
        tensors=sum(counts[kind] * len(of) for kind, of in in_block.items()) + len(outside),
        attention_per_layer=per_layer(".attention."),
        feed_forward_per_layer=next(iter(per_layer(".feed_forward.").values())),
    )


def _flops(
    config: RunConfig, models: Mapping[AttentionKind, NSATransformer]
) -> tuple[dict[str, float], dict[Checkpointing, float]]:
    """FLOPs per token by part, forward and backward, over all layers; and those repeated by gradient checkpointing."""
    forward: Counter[str] = Counter()
    for kind, layers in _kind_counts(config).items():
        block = models[kind].blocks[0]
        assert isinstance(block, LlamaBlockNSA)
        feed_forward = 2.0 * sum(p.numel() for p in block.feed_forward.parameters())
        for part, count in {"feed_forward": feed_forward, **block.attention.flops(config.train.seq_len)}.items():
            forward[part] += layers * count  # type: ignore[assignment]
    # Backward costs twice the forward pass; block selection has no backward.
    flops = {part: count * (1.0 if part == "select" else 3.0) for part, count in forward.items()}
    full = float(sum(forward.values()))
    operators = sum(forward[part] for part in (*ATTENTION_PARTS, DENSE_PART))
    repeated: dict[Checkpointing, float] = {"off": 0.0, "selective": full - operators, "full": full}
    head = next(iter(models.values())).lm_head.w_out.weight.numel()
    return {**flops, "head": 6.0 * head}, repeated


def _memory(config: RunConfig, target: HardwareTarget, vocab_size: int, parameters: ParameterCounts) -> MemoryEstimate:
    bf16, on_gpu = config.runtime.precision == "bf16", target.device.is_gpu
    shards, width = _shards(config, target), 2 if bf16 else FP32
    sharded = target.count > 1 and config.parallel.data != "ddp"
    one = ForwardPass(
        rows=-(-config.train.batch_size // target.count),
        seq_len=config.train.seq_len,
        vocab_size=vocab_size,
        autocast=bf16 and not sharded,
        width=width,
        on_gpu=on_gpu,
    )
    in_products = parameters.products_per_layer
    activation = activations(config, one, in_products, vocab_size * config.model.dim)
    weights, states = FP32 * parameters.total // shards, _state_bytes(parameters) // shards
    known = weights * 2 + states + activation.peak(config.runtime.gradient_checkpointing)
    return MemoryEstimate(
        weights=weights,
        gradients=weights,
        optimizer=states,
        activations=activation,
        gradient_checkpointing=config.runtime.gradient_checkpointing,
        optimizer_step=weights if on_gpu else 0,
        communication=_communication(config, target, parameters, width, max(in_products.values())),
        reserve=_CONTEXT_BYTES[on_gpu] + int(_FRAGMENTATION * known),
        available=target.memory_bytes,
    )


def _state_bytes(parameters: ParameterCounts) -> int:
    """AdamW: two moments in fp32, and a step count per tensor."""
    return FP32 * (_ADAM_MOMENTS * parameters.total + parameters.tensors)


def _checkpoint_bytes(parameters: ParameterCounts) -> int:
    """Weights, two moments and step counts, with the overhead of the file format."""
    tensors = (2 + _ADAM_MOMENTS) * parameters.tensors
    return FP32 * parameters.total + _state_bytes(parameters) + tensors * _FILED_TENSOR_BYTES


def _kept_checkpoints(train: TrainConfig) -> int:
    """Computed without a list of steps: a run may have a billion."""
    steps, every, for_good = train.steps, train.save_every, train.keep_every
    by_interval, at_the_end = (steps // every, int(steps % every > 0)) if every else (0, 1)
    newest = min(train.keep_checkpoints, by_interval + at_the_end)
    if not every or not for_good:
        return newest
    oldest_of_newest = (by_interval - (newest - at_the_end) + 1) * every
    return newest + (oldest_of_newest - 1) // for_good


def _shards(config: RunConfig, target: HardwareTarget) -> int:
    """Number of devices that share one copy of the weights."""
    if config.parallel.data == "ddp":
        return 1
    if config.parallel.data == "fsdp":
        return target.count
    return min(target.count, config.parallel.shard_ranks or RANKS_PER_NODE)


def _communication(
    config: RunConfig, target: HardwareTarget, parameters: ParameterCounts, width: int, in_block: int
) -> int:
    """ddp: a second copy of the gradients, in buckets. Sharded: one gathered block and one prefetched, the gathered
    embedding and head, and the full gradient of one block in fp32. Not measured."""
    if target.count == 1:
        return 0
    if config.parallel.data == "ddp":
        return FP32 * parameters.total
    return width * (2 * in_block + parameters.embeddings + parameters.head) + FP32 * in_block


def _cache_bytes(config: RunConfig, models: Mapping[AttentionKind, NSATransformer]) -> int:
    width = FP32 if config.runtime.precision == "fp32" else 2
    of_kind = {kind: model.new_cache(1, config.train.seq_len).n_bytes() for kind, model in models.items()}
    return sum(layers * of_kind[kind] for kind, layers in _kind_counts(config).items()) * width // FP32
