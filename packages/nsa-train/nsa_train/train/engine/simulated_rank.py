"""One rank of a run of any world size in one process, on fake tensors and a fake process group: a step is counted.

The train module is the run's own, from `build_train_module`. Fake tensors have shapes and no values; the fake process
group answers every collective at once. The second step is counted: the optimizer's moments exist from then on, and
DTensor's shape propagation, which makes tensors of its own, is done.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from olmo_core.distributed import parallel
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa.core.nsa_attention import NSAAttention
from nsa.core.selector_loss import row_sample
from nsa.errors import ConfigError
from nsa_train.config.schema import RunConfig
from nsa_train.planning.step_counts import StepCounts
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.bad_step_hook import StepSkippingTrainModule
from nsa_train.train.engine.build import build_train_module
from nsa_train.train.engine.engine_log import quiet_engine_log
from nsa_train.train.engine.step_counters import CollectiveCounter, FlopCounter, MemoryCounter
from nsa_train.train.engine.transformer import EngineTransformer
from nsa_train.train.parallel import context_layout
from nsa_train.train.parallel.row_split import RowSplit

FEW_LAYERS = (3, 4, 5)
"""Layers that are simulated if all are alike. From about three on every layer adds as much to each count; with two, the
peak may lie at another moment of the step. The third model shows whether they are on a line."""
_LINE_TOLERANCE = 1e-3  # of the peak


def simulate_step(
    config: RunConfig,
    vocab_size: int,
    world: int,
    local_world: int,
    *,
    all_layers: bool = False,
    kernel_workspace: int = 0,
    log: Callable[[str], None] = lambda text: None,
) -> StepCounts:
    """One step of rank 0 of `world` ranks; if all layers are alike, from models of a few of them.

    `kernel_workspace`: see `MemoryCounter`. Uses the default process group, so a process simulates and does nothing
    else.
    """
    if config.parallel.data == "ddp" and world > 1:
        raise ConfigError(
            "parallel.data is ddp, whose reducer needs tensors with values. Set parallel.data=hsdp "
            "parallel.shard_ranks=1: it holds and sends the same."
        )
    layers = config.model.n_layers
    patterns = config.model.attention, config.model.rope_layers
    alike = all(len(set(pattern)) == 1 for pattern in patterns) and layers > FEW_LAYERS[-1]

    def with_layers(number: int) -> StepCounts:
        log(f"rank 0 of {world:,}, {number} of {layers} layers")
        model = config.model.model_copy(update={"n_layers": number})
        return _simulate(config.model_copy(update={"model": model}), vocab_size, world, local_world, kernel_workspace)

    with _fake_process_group(world), quiet_engine_log():
        if alike and not all_layers:
            few = [with_layers(number) for number in FEW_LAYERS]
            if on_a_line(few):
                return few[-2].extended(few[-1], layers)
            log("their peaks are not on a line: all layers")
        return with_layers(layers)


def on_a_line(counts: Sequence[StepCounts]) -> bool:
    """Whether the peak grows by the same for each of these models, which have one layer more than the one before."""
    growth = [longer.peak_bytes - shorter.peak_bytes for shorter, longer in pairwise(counts)]
    return max(growth) - min(growth) <= _LINE_TOLERANCE * counts[-1].peak_bytes


def count_step(
    module: StepSkippingTrainModule, config: RunConfig, tokens: Tensor, *, kernel_workspace: int = 0
) -> StepCounts:
    """Count the second of two steps on these rows. A step has two micro-batches if the run accumulates gradients."""
    passes = min(2, config.train.accumulate_grad_batches)

    def step() -> None:
        batches = [{"input_ids": tokens, "labels": tokens} for _ in range(passes)]
        module.step_without_trainer(batches, config.train.grad_clip or float("inf"))

    step()
    memory, collectives = MemoryCounter(kernel_workspace), CollectiveCounter()
    flops = FlopCounter(config.train.seq_len)
    memory.hold(_held(module))
    held = memory.now
    with memory, collectives, flops:
        step()
    return StepCounts(config.model.n_layers, passes, held, memory.peak, flops.total, collectives.totals())


def _held(module: StepSkippingTrainModule) -> Iterator[Tensor]:
    """Tensors that live from step to step."""
    yield from module.model.parameters()
    yield from module.model.buffers()
    for state in module.optim.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _simulate(config: RunConfig, vocab_size: int, world: int, local_world: int, kernel_workspace: int) -> StepCounts:
    ranks = RankInfo(world=world, local_world=local_world, distributed=world > 1).divided(config.parallel)
    runtime = config.runtime.model_copy(update={"compile": "off"})
    config = config.model_copy(update={"runtime": runtime})
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # A fake tensor that stands for one on a GPU aborts a process of torch without CUDA: all stand for the host's.
    # The engine makes the world's mesh once per process.
    with patch.object(parallel, "_WORLD_MESH", None), patch.object(EngineTransformer, "init_weights", _fake(mode)):
        module = build_train_module(config, vocab_size, ranks, torch.device("cpu"))
    with mode, patch.object(context_layout, "_own_sample", _average_sample):
        rows = config.train.batch_size // ranks.data_world
        tokens = torch.zeros(rows, config.train.seq_len, dtype=torch.long)
        return count_step(module, config, tokens, kernel_workspace=kernel_workspace)


def _fake(mode: FakeTensorMode) -> Callable[..., None]:
    """In place of `init_weights`, which draws a seed: weights without values."""

    def init_weights(model: EngineTransformer, *, device: torch.device | None = None, **_: Any) -> None:
        with mode:
            model.to_empty(device=device or torch.device("cpu"))

    return init_weights


def _average_sample(
    split: RowSplit, layer: NSAAttention, rows: int, n_tokens: int, device: torch.device, *, packed: bool
) -> Tensor | None:
    """In place of a rank's share of the sampled queries, whose size depends on values: as many for every rank."""
    sampled_Q = row_sample(layer, rows, n_tokens, device, packed=packed)
    return None if sampled_Q is None else sampled_Q[: -(-len(sampled_Q) // split.ranks)]


@contextmanager
def _fake_process_group(world: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
