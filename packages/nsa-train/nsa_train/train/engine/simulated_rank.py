"""Simulates a step of one rank of any world size on fake tensors: its memory, FLOPs and collectives.

The train module is the run's own, from `build_train_module`. Fake tensors have shapes and no values; the fake process
group answers every collective at once. The second step is counted: the optimizer's moments exist from then on, and
DTensor's shape propagation, which makes tensors of its own, is done.

The counters are dispatch modes: they see every operator of the forward and backward pass and of the optimizer, also
those that DTensor's operators are made of. A simulated rank and a rank of a real run are counted by the same code.

As a program (`nsa.child_process`) it is a child of `nsa plan`: an abort of torch ends the child alone.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.distributed import parallel
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from nsa.child_process import answer_parent
from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa_train.config.schema import RunConfig
from nsa_train.planning.collective_bytes import CollectiveGroup, CollectiveKind, CollectiveTotal, StepCounts
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.build import build_train_module
from nsa_train.train.engine.engine_log import quiet_engine_log
from nsa_train.train.engine.train_module import StepSkippingTrainModule

_FEW_LAYERS = (3, 4, 5)
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

    `kernel_workspace`: see `_MemoryCounter`. Uses the default process group, so a process simulates and does nothing
    else.
    """
    if config.parallel.data == "ddp" and world > 1:
        raise ConfigError(
            "parallel.data is ddp, whose reducer needs tensors with values. Set parallel.data=hsdp "
            "parallel.shard_ranks=1: it holds and sends the same."
        )
    layers = config.model.n_layers
    patterns = config.model.attention, config.model.rope_layers
    alike = all(len(set(pattern)) == 1 for pattern in patterns) and layers > _FEW_LAYERS[-1]

    def with_layers(number: int) -> StepCounts:
        log(f"rank 0 of {world:,}, {number} of {layers} layers")
        model = config.model.model_copy(update={"n_layers": number})
        return _simulate(config.model_copy(update={"model": model}), vocab_size, world, local_world, kernel_workspace)

    with _fake_process_group(world), quiet_engine_log():
        if alike and not all_layers:
            few = [with_layers(number) for number in _FEW_LAYERS]
            if _on_a_line(few):
                return few[-2].extended(few[-1], layers)
            log("their peaks are not on a line: all layers")
        return with_layers(layers)


def _on_a_line(counts: Sequence[StepCounts]) -> bool:
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
    memory, collectives = _MemoryCounter(kernel_workspace), _CollectiveCounter()
    flops = _FlopCounter(config.train.seq_len)
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
    parallel._WORLD_MESH = None  # the engine makes it once per process
    module, mode = fake_train_module(config, vocab_size, ranks)
    with mode:
        rows = config.train.batch_size // ranks.data_world
        tokens = torch.zeros(rows, config.train.seq_len, dtype=torch.long)
        return count_step(module, config, tokens, kernel_workspace=kernel_workspace)


def fake_train_module(
    config: RunConfig, vocab_size: int, ranks: RankInfo
) -> tuple[StepSkippingTrainModule, FakeTensorMode]:
    """The run's train module with weights that are fake tensors, and the mode in which it runs."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    runtime = config.runtime.model_copy(update={"compile": "off"})
    config = config.model_copy(update={"runtime": runtime})
    # A fake tensor that stands for one on a GPU aborts a process of torch without CUDA: all stand for the host's.
    return build_train_module(config, vocab_size, ranks, torch.device("cpu"), without_values=mode), mode


@contextmanager
def _fake_process_group(world: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        parallel._WORLD_MESH = None


_KINDS: dict[str, CollectiveKind] = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}
_COLLECTIVES = ("c10d", "_c10d_functional")


class _LocalOperators(TorchDispatchMode):
    """Sees operators on local tensors: DTensor's own are left to DTensor first."""

    def __torch_dispatch__(
        self, operator: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = operator(*args, **(kwargs or {}))
        self.seen(operator, args, kwargs or {}, result)
        return result

    def seen(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> None:
        raise NotImplementedError


class _CollectiveCounter(_LocalOperators):
    """Calls and bytes of collectives, by kind and process group."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[CollectiveGroup] = Counter()
        self._bytes: Counter[CollectiveGroup] = Counter()

    def totals(self) -> dict[CollectiveGroup, CollectiveTotal]:
        return {group: CollectiveTotal(calls, self._bytes[group]) for group, calls in self._calls.items()}

    def seen(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> None:
        if operator.namespace not in _COLLECTIVES:
            return
        name = operator._schema.name.partition("::")[2].replace("_", "")
        kind = next((kind for prefix, kind in _KINDS.items() if name.startswith(prefix)), None)
        if kind is None:
            return
        arguments = (*args, *kwargs.values())
        ranks = next(ranks for each in arguments if (ranks := _ranks_of(each)) is not None)
        group = CollectiveGroup(kind, len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 0)
        returned = outputs if isinstance(outputs, tuple) else (outputs,)
        self._calls[group] += 1
        self._bytes[group] += max(sum(_tensor_bytes(part)) for part in (*arguments, *returned))


def _ranks_of(argument: Any) -> list[int] | None:
    """Ranks of the process group, if the argument is one: c10d's operators take an object, functional ones a name."""
    if isinstance(argument, torch.ScriptObject):
        if "ProcessGroup" not in str(argument._type()):
            return None
        argument = dist.ProcessGroup.unbox(argument)
    elif isinstance(argument, str):
        try:
            argument = dist.distributed_c10d._resolve_process_group(GroupName(argument))
        except (RuntimeError, ValueError):  # the name of a reduction
            return None
    return dist.get_process_group_ranks(argument) if isinstance(argument, dist.ProcessGroup) else None


def _tensor_bytes(value: Any) -> Iterator[int]:
    return (leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


class _MemoryCounter(_LocalOperators):
    """Bytes of the storages that operators make and of those given to `hold`; their sum now and at its peak."""

    def __init__(self, kernel_workspace: int = 0) -> None:
        """`kernel_workspace`: bytes that the backward kernel of the selected branch holds while it runs, which no
        operator shows."""
        super().__init__()
        self.now = self.peak = 0
        self._kernel_workspace = kernel_workspace
        self._sizes: dict[int, int] = {}

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self._add(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    def __enter__(self) -> "_MemoryCounter":
        """FSDP frees and restores gathered weights by resizing their storage, which is no operator."""
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            self._set(storage, size)
            return resized

        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def seen(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> None:
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        if self._kernel_workspace and operator._schema.name == "nsa::attend_backward" and "selected" in args:
            self.peak = max(self.peak, self.now + self._kernel_workspace)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self._sizes:
            self._set(storage, storage.nbytes())

    def _set(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


class _FlopCounter(_LocalOperators):
    """FLOPs of matrix products, by torch's own table, and of our operators: attention by the keys that are read."""

    def __init__(self, seq_len: int) -> None:
        """`seq_len`: length of the rows, of which every rank is taken to hold an average share."""
        super().__init__()
        self.total = 0.0
        self._seq_len = seq_len

    def seen(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> None:
        if (formula := flop_registry.get(operator._overloadpacket)) is not None:
            self.total += formula(*args, **kwargs, out_val=outputs)
        elif (count := _OWN_FLOPS.get(operator._schema.name)) is not None:
            self.total += count(self._seq_len, *args)


def _branch_flops(seq_len: int, q: Tensor, v_width: int, branch: str, sizes: list[int]) -> float:
    """FLOPs of the scores and of the weighted sum of values."""
    reads = Geometry.from_ints(sizes).total_reads(seq_len)[branch] / seq_len
    return 2 * reads * (q.numel() + q.numel() // q.shape[-1] * v_width)


_OWN_FLOPS: dict[str, Callable[..., float]] = {
    "nsa::attend": lambda n, q, k, v, idx, pos, start, branch, sizes, *_: _branch_flops(
        n, q, v.shape[-1], branch, sizes
    ),
    "nsa::attend_backward": lambda n, dout, q, k, v, *rest: 2 * _branch_flops(n, q, v.shape[-1], *rest[6:8]),
    "nsa::select": lambda n, q, k, pos, first, sizes, *_: _branch_flops(n, q, 0, "compressed", sizes),
    "nsa::compressed_and_select": lambda n, q, k, v, pos, first, sizes, *_: sum(
        _branch_flops(n, q, width, "compressed", sizes) for width in (v.shape[-1], 0)
    ),
    "nsa::linear_cross_entropy": lambda n, x, weight, labels, mean, need_grad: (
        2.0 * x.numel() * len(weight) * (3 if need_grad else 1)
    ),
}
"""FLOPs of our operators, of the length of the rows and the arguments."""


def _answer(send: Callable[..., None], config: dict[str, Any], **options: Any) -> None:
    """Answer in the child: simulate with arguments in plain values."""
    try:
        counts = simulate_step(RunConfig.model_validate(config), **options, log=lambda text: send(log=text))
    except ConfigError as error:
        send(refused=str(error))
    else:
        send(counts=counts.as_json())


if __name__ == "__main__":
    answer_parent(_answer)
