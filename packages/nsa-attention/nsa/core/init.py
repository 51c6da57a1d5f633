"""Weight initialisation of one layer and of whole models."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from nsa.core.attention_config import INIT_STD
from nsa.core.branches import GateProjection
from nsa.core.compression import BlockCompressor
from nsa.core.initial_values import draw


def init_weights(root: nn.Module, n_layers: int | None = None, std: float = INIT_STD) -> None:
    """Normal(0, std) weights; those that write to the residual stream are divided by sqrt(2 · n_layers)."""
    for name, module in root.named_modules():
        init_module(name, module, n_layers, std)


def init_module(name: str, module: nn.Module, n_layers: int | None = None, std: float = INIT_STD) -> None:
    """The own weights of one module, whose standard deviation depends on its name in the model.

    Weights on the meta device have no values, and drawing them takes longer than all else in building a model there.
    """
    if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return
    if isinstance(module, GateProjection):
        module.init_weights()
    elif isinstance(module, nn.Linear):
        own_std = std
        if n_layers is not None and (name.endswith("attention.w_out") or name.endswith("feed_forward.w2")):
            own_std = std / (2 * n_layers) ** 0.5
        draw(module.weight, partial(nn.init.normal_, std=own_std))
        if module.bias is not None:
            draw(module.bias, nn.init.zeros_)
    elif isinstance(module, nn.Embedding):
        draw(module.weight, partial(nn.init.normal_, std=std))
    elif isinstance(module, nn.RMSNorm):
        draw(module.weight, nn.init.ones_)
    elif isinstance(module, BlockCompressor):
        module.reset_parameters(std)


class InitSkipped(TorchFunctionMode):
    """Context in which the functions of `torch.nn.init` return their tensor as it is, for modules on the meta device.

    There torch computes some of these functions in Python, which imports its compiler: almost as much CPU time as the
    import of torch.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
