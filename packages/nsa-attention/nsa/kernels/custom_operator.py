"""Definition of our custom operators: `torch.library.custom_op` without an import of torch's compiler by a call.

torch hides the function of such an operator from its compiler, and imports the compiler for it when the operator is
called: almost as much CPU time as the import of torch, in every process that trains or generates. Nothing needs to be
hidden before anything is compiled, so the function is called directly until the compiler has been imported.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.library import CustomOpDef

COMPILER = "torch._dynamo"
_ANY_DEVICE = None


def custom_operator(name: str, *, mutates_args: Iterable[str]) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Decorator that makes a function the operator `name` of torch.library."""

    def define(function: Callable[..., Any]) -> CustomOpDef:
        operator = torch.library.custom_op(name, function, mutates_args=tuple(mutates_args))
        hidden = operator._backend_fns[_ANY_DEVICE]

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (hidden if COMPILER in sys.modules else function)(*args, **kwargs)

        operator._backend_fns[_ANY_DEVICE] = run
        return operator

    return define
