"""AdamW for steps that are never compiled: the methods of torch's own without its compiler.

torch hides these methods from its compiler, and imports the compiler for it by the first call: almost as much CPU time
as the import of torch. The engine compiles a step only if `AdamWConfig.compile` is set, which is never the case here.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.optim import AdamWConfig
from torch.optim import AdamW

_plain_step: Callable[..., Any] = inspect.unwrap(AdamW.step)


class EagerAdamW(AdamW):
    """torch's AdamW, bit for bit."""

    add_param_group = inspect.unwrap(AdamW.add_param_group)
    zero_grad = inspect.unwrap(AdamW.zero_grad)
    state_dict = inspect.unwrap(AdamW.state_dict)
    load_state_dict = inspect.unwrap(AdamW.load_state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        return _plain_step(self, closure)


@dataclass
class EagerAdamWConfig(AdamWConfig):
    """Settings of `EagerAdamW`."""

    @classmethod
    def optimizer(cls) -> type[AdamW]:
        return EagerAdamW
