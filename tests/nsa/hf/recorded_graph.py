"""A stand-in for CUDA graphs on a CPU: records operations and interpreted launches, repeats them at their addresses.

As with CUDA, capturing changes no memory, nothing may be read on the host meanwhile, and a replay sees no Python:
sizes, addresses and numbers are those of the capture.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

_READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "_to_copy_to_host")


class RecordedGraph:
    """In place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        self.launches: list[str] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for step in self.steps:
            step()


class _Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph, self.own, self.before = graph, set[int](), dict[int, tuple[Tensor, Tensor]]()
        self.alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        assert name not in _READS, f"{name} reads a value on the host"
        self.save(tree_leaves((args, kwargs)))
        out = func(*args, **kwargs)
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.alive += outs
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        fresh = [x for x in outs if x.untyped_storage()._cdata not in known]
        self.own |= {x.untyped_storage()._cdata for x in fresh}
        if func._schema.is_mutable:
            self.graph.steps.append(lambda: func(*args, **kwargs))
        elif fresh and not name.startswith(("empty", "new_empty")):

            def repeat() -> None:
                results = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
                for x, result in zip(outs, results, strict=True):
                    x.copy_(result)

            self.graph.steps.append(repeat)
        return out

    def save(self, leaves: list[Any]) -> None:
        """Keep what memory holds that was there before."""
        for x in leaves:
            if isinstance(x, Tensor) and (key := x.untyped_storage()._cdata) not in self.own and key not in self.before:
                whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
                self.before[key] = whole, whole.clone()

    def restore(self) -> None:
        for whole, before in self.before.values():
            whole.copy_(before)


@contextmanager
def recording(graph: RecordedGraph, capture_error_mode: str = "global") -> Iterator[None]:
    """In place of `torch.cuda.graph`."""
    run, mode = InterpretedFunction.run, _Recording(graph)

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            mode.save([*args, *options.values()])
            graph.launches.append(kernel.fn.__name__)
            graph.steps.append(lambda: run(kernel, *args, **options))
            run(kernel, *args, **options)

    with mock.patch.object(InterpretedFunction, "run", launch), mode:
        yield
    mode.restore()


@contextmanager
def recorded_graphs() -> Iterator[list[RecordedGraph]]:
    """Capture on a CPU; yields the graphs."""
    graphs: list[RecordedGraph] = []

    def graph() -> RecordedGraph:
        graphs.append(RecordedGraph())
        return graphs[-1]

    with (
        mock.patch.object(torch.cuda, "CUDAGraph", graph),
        mock.patch.object(torch.cuda, "graph", recording),
        mock.patch("nsa.hf.modeling.GRAPH_DEVICES", ("cpu",)),
    ):
        yield graphs
