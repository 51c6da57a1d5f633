"""Construction of modules on the meta device without `torch.nn.init`: there are no values to initialise.

On that device torch computes some of these functions in Python, which imports its compiler: almost as much CPU time as
the import of torch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import init
from torch.overrides import TorchFunctionMode


class InitSkipped(TorchFunctionMode):
    """Context in which the functions of `torch.nn.init` return their tensor as it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
