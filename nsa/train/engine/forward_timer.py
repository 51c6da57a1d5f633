"""How long this rank's own forward passes took. Under ddp nothing in them waits for others: a slow rank shows."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class ForwardTimer:
    """Started and stopped by the model's own hooks; on a GPU by events, so that nothing waits for the clock."""

    def __init__(self) -> None:
        self._host_s = 0.0
        self._began = 0.0
        self._events: list[torch.cuda.Event] = []

    @contextmanager
    def on(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        self._host_s, self._events = 0.0, []
        gpu = device.type == "cuda"
        hooks = [
            model.register_forward_pre_hook(lambda *_: self._mark() if gpu else self._start()),
            model.register_forward_hook(lambda *_: self._mark() if gpu else self._stop()),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def seconds(self) -> float:
        """Of all forward passes since `on`; waits for the GPU to reach the last of them."""
        if not self._events:
            return self._host_s
        self._events[-1].synchronize()
        pairs = zip(self._events[::2], self._events[1::2], strict=True)
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3

    def _start(self) -> None:
        self._began = time.perf_counter()

    def _stop(self) -> None:
        self._host_s += time.perf_counter() - self._began

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
