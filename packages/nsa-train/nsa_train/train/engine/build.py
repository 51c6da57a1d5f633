"""Builds model, parallelism (ddp, fsdp, hsdp, tp, cp), optimizer and learning-rate schedule from a `RunConfig`."""

import fnmatch
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.config import DType
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import Transformer
from olmo_core.optim import AdamWConfig, ConstantWithWarmup, CosWithWarmup, LinearWithWarmup, OptimGroupOverride
from olmo_core.optim.scheduler import Scheduler
from olmo_core.train import Duration, LoadStrategy
from olmo_core.train.callbacks import ConsoleLoggerCallback, GarbageCollectorCallback
from olmo_core.train.train_module.transformer.config import (
    TransformerActivationCheckpointingConfig,
    TransformerContextParallelConfig,
    TransformerDataParallelConfig,
    TransformerTensorParallelConfig,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import AdamW

from nsa.core.pooling import undecayed_parameters
from nsa.errors import ConfigError, require_rules
from nsa_train.config.rules import broken_parallel_rules, hsdp_shard_ranks
from nsa_train.config.schema import RunConfig
from nsa_train.planning.preflight_rules import NOT_FP16, why_no_fp16
from nsa_train.record.run_folder import RunFolder
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine import Callback
from nsa_train.train.engine.checkpointer import VerifiedCheckpointer
from nsa_train.train.engine.data_loader import RowLoader
from nsa_train.train.engine.nan_guard import RollbackTrainer
from nsa_train.train.engine.train_module import StepSkippingTrainModule
from nsa_train.train.engine.transformer import build_transformer

_BETAS = (0.9, 0.95)
_NEVER = 2**62
_NOT_DECAYED = [
    "*norm.weight",
    "*.bias",
    *(f"*.{name}" for name in undecayed_parameters()),
    "embeddings.weight",
]

_FROM_THE_CONFIG = ("initial_lr", "weight_decay", "fused")
"""Optimizer settings not restored from a checkpoint: a run may be resumed with other values."""


def choose_device(config: RunConfig, ranks: RankInfo) -> torch.device:
    """The device of this rank."""
    wanted = config.runtime.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"runtime.device is {wanted} and torch finds no GPU. Set runtime.device=cpu or auto.")
    if ranks.distributed:
        return torch.device("cuda", ranks.local_rank)
    return torch.device("cuda" if wanted == "auto" else wanted)


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Whether the blocks are compiled: `auto` is on for a GPU."""
    wanted = config.runtime.compile
    return wanted == "on" or (wanted == "auto" and device.type == "cuda")


def build_train_module(
    config: RunConfig,
    vocab_size: int,
    ranks: RankInfo,
    device: torch.device,
    without_values: FakeTensorMode | None = None,
) -> StepSkippingTrainModule:
    """The engine's train module around an NSA model; weights are the same for every number of ranks, or fake."""
    require_rules(broken_parallel_rules(config, ranks.world, ranks.local_world))
    if problem := why_no_fp16(config.runtime.precision):
        raise ConfigError(f"precision_fp16: {problem}. {NOT_FP16}")
    train, bf16 = config.train, config.runtime.precision == "bf16"
    checkpointing = config.runtime.gradient_checkpointing
    sharded = ranks.distributed and config.parallel.data != "ddp"
    model = build_transformer(config, vocab_size, without_values)
    compiled = compiles(config, device)
    if compiled:
        model.compile_blocks()
    return StepSkippingTrainModule(
        model=model,
        optim=_EagerAdamWConfig(
            lr=train.lr,
            betas=_BETAS,
            weight_decay=train.weight_decay,
            fixed_fields=_FROM_THE_CONFIG,
            fused=True if device.type == "cuda" else None,  # skips a step without asking the host
            group_overrides=[OptimGroupOverride(params=_not_decayed(model), opts={"weight_decay": 0.0})],
        ),
        rank_microbatch_size=train.batch_size // ranks.data_world * train.seq_len,
        max_sequence_length=train.seq_len,
        dp_config=_data_parallel(config, ranks, bf16) if ranks.distributed else None,
        cp_config=_context_parallel(config) if ranks.distributed else None,
        tp_config=TransformerTensorParallelConfig(degree=config.parallel.tp) if config.parallel.tp > 1 else None,
        ac_config=TransformerActivationCheckpointingConfig() if checkpointing == "full" else None,
        # Sharded weights are cast as they are gathered; whole ones, kept in fp32, at each use.
        autocast_precision=torch.bfloat16 if bf16 and not sharded else None,
        max_grad_norm=train.grad_clip or float("inf"),  # the norm is logged even if nothing is clipped
        scheduler=_schedule(config),
        device=device,
    )


def build_trainer(
    config: RunConfig,
    folder: RunFolder,
    module: StepSkippingTrainModule,
    loader: RowLoader,
    checkpointer: VerifiedCheckpointer,
    callbacks: dict[str, Callback],
) -> RollbackTrainer:
    """The trainer, with our callbacks in place of the engine's console output and metric reduction."""
    return RollbackTrainer(
        work_dir=folder.path,
        train_module=module,
        data_loader=loader,
        device=module.device,
        save_folder=str(folder.checkpoints),
        checkpointer=checkpointer,
        callbacks={
            **callbacks,
            "console_logger": ConsoleLoggerCallback(log_interval=_NEVER, metrics_log_interval=_NEVER),
            "garbage_collector": GarbageCollectorCallback(),
        },
        max_duration=Duration.steps(config.train.steps),
        load_strategy=LoadStrategy.never,
        metrics_collect_interval=config.train.log_every,
        # The engine's check may stop ranks at different steps; `StopRequestCallback` does not.
        cancel_check_interval=_NEVER,
    )


def _not_decayed(model: Transformer) -> list[str]:
    """The patterns that match a trained parameter of this model: the engine refuses a pattern without a match."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [pattern for pattern in _NOT_DECAYED if fnmatch.filter(names, pattern)]


def _data_parallel(config: RunConfig, ranks: RankInfo, bf16: bool) -> TransformerDataParallelConfig:
    name = DataParallelType(config.parallel.data)
    if name == DataParallelType.ddp:
        return TransformerDataParallelConfig(name=name)
    return TransformerDataParallelConfig(
        name=name,
        param_dtype=DType.bfloat16 if bf16 else None,
        shard_degree=hsdp_shard_ranks(config.parallel, ranks.local_world) if name == DataParallelType.hsdp else None,
    )


def _context_parallel(config: RunConfig) -> TransformerContextParallelConfig | None:
    """The engine's style names the split of rows alone; `nsa_train.train.parallel` does the rest."""
    if config.parallel.cp == 1:
        return None
    if config.parallel.cp_split == "zigzag":
        return TransformerContextParallelConfig.zig_zag(config.parallel.cp)
    return TransformerContextParallelConfig.ulysses(config.parallel.cp)


def _schedule(config: RunConfig) -> Scheduler:
    train = config.train
    if train.lr_schedule == "constant":
        return ConstantWithWarmup(warmup=train.warmup_steps)
    shape = CosWithWarmup if train.lr_schedule == "cosine" else LinearWithWarmup
    return shape(warmup=train.warmup_steps, alpha_f=train.final_lr_ratio)


_uncompiled_step: Callable[..., Any] = inspect.unwrap(AdamW.step)


class _EagerAdamW(AdamW):
    """torch's AdamW, bit for bit, for steps that are never compiled.

    torch hides these methods from its compiler, and imports the compiler for it by the first call: almost as much CPU
    time as the import of torch. The engine compiles a step only if `AdamWConfig.compile` is set, which it never is.
    """

    add_param_group = inspect.unwrap(AdamW.add_param_group)
    zero_grad = inspect.unwrap(AdamW.zero_grad)
    state_dict = inspect.unwrap(AdamW.state_dict)
    load_state_dict = inspect.unwrap(AdamW.load_state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        return _uncompiled_step(self, closure)


@dataclass
class _EagerAdamWConfig(AdamWConfig):
    """Settings of `_EagerAdamW`."""

    @classmethod
    def optimizer(cls) -> type[AdamW]:
        return _EagerAdamW
