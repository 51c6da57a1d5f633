"""Custom operators: `torch.library.custom_op` without an import of torch's compiler by a call, and their gradients.

torch hides the function of such an operator from its compiler, and imports the compiler for it when the operator is
called: almost as much CPU time as the import of torch, in every process that trains or generates. Nothing needs to be
hidden before anything is compiled, so the function is called directly until the compiler has been imported.

Gradients are for autograd, `torch.compile` and `torch.func.grad`; vmap, forward mode and double backward are refused by
name. torch.library gives an operator with a gradient no rule for `torch.func.grad`, takes it for a constant in forward
mode without a word, and batches it by a loop. An `autograd.Function` around the operator has a place for each of them.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.library import CustomOpDef

from nsa.errors import UnsupportedTransform

COMPILER = "torch._dynamo"
_ANY_DEVICE = None


def custom_operator(
    name: str, *, mutates_args: Iterable[str], schema: str | None = None
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Decorator that makes a function the operator `name` of torch.library. `schema`: of a function whose signature
    does not say it."""

    def define(function: Callable[..., Any]) -> CustomOpDef:
        operator = torch.library.custom_op(name, function, mutates_args=tuple(mutates_args), schema=schema)
        hidden = operator._backend_fns[_ANY_DEVICE]

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (hidden if COMPILER in sys.modules else function)(*args, **kwargs)

        operator._backend_fns[_ANY_DEVICE] = run
        return operator

    return define


_WHY = {
    "vmap": "rows are mapped by their own batch axis. Put the mapped axis there",
    "forward mode (jvp)": "its gradient is written for reverse mode. Use torch.func.grad or vjp",
    "double backward (create_graph=True, nested torch.func.grad)": "its gradient has no gradient of its own",
}
_ANY_ARGUMENTS = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])
"""torch binds the arguments of every call to the function's signature: to this one in a tenth of the time."""
_VMAP, _FORWARD_MODE, _DOUBLE_BACKWARD = _WHY


class ReverseModeFunction(torch.autograd.Function):
    """A function that `torch.func.grad` differentiates and that refuses the other transforms."""

    subject: ClassVar[str]
    """What refuses, as the message calls it."""
    instead: ClassVar[str]
    """A sentence that says what supports the transform."""

    @classmethod
    def refuse(cls, transform: str) -> NoReturn:
        raise UnsupportedTransform(f"{cls.subject} does not support {transform}: {_WHY[transform]}. {cls.instead}")

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Any) -> NoReturn:
        cls.refuse(_FORWARD_MODE)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *args: Any) -> NoReturn:
        cls.refuse(_VMAP)

    @classmethod
    def refuse_second(cls, *gradients: Tensor | None) -> None:
        """Refuse if there are gradients of what is itself a gradient."""
        if any(gradient is not None for gradient in gradients):
            cls.refuse(_DOUBLE_BACKWARD)


class _DifferentiableOperator:
    """An operator of torch.library with a gradient, called like a function. `operator.call(…)` does the same with one
    Python function less."""

    def __init__(self, operator: torch.library.CustomOpDef, function: type[torch.autograd.Function]) -> None:
        self._operator, self._apply = operator, function.apply

    @property
    def call(self) -> Callable[..., Any]:
        """Traced, the operator itself, which stays opaque and whose gradient compilers know; else its function."""
        return self._operator if torch.compiler.is_compiling() else self._apply

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def with_gradient(
    operator: torch.library.CustomOpDef, setup_context: Callable[..., None], backward: Callable[..., Any],
    base: type[ReverseModeFunction],
) -> _DifferentiableOperator:  # fmt: skip
    """Register an operator's gradient. `base` has the words of its refusals."""
    members: dict[str, Any] = {
        "forward": _without_dispatcher(operator),
        "setup_context": setup_context,
        "backward": backward,
    }
    function: Any = type(operator._name, (base,), {name: staticmethod(member) for name, member in members.items()})
    operator.register_autograd(backward, setup_context=setup_context)
    operator.register_vmap(base.vmap)
    operator.__signature__ = _ANY_ARGUMENTS  # type: ignore[attr-defined]
    return _DifferentiableOperator(operator, function)


def _without_dispatcher(operator: torch.library.CustomOpDef) -> Callable[..., Any]:
    """Call the operator's function where nothing watches, replaces or traces operators: the dispatcher takes as long as
    ten launches."""
    function = operator._init_fn

    def run(*args: Any) -> Any:
        watched = (
            torch._C._len_torch_dispatch_stack()
            or torch.autograd.profiler._is_profiler_enabled
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None  # it would trace what runs inside
            or not _PLAIN.issuperset(map(type, args))
        )
        return operator(*args) if watched else function(*args)

    return run


_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), str, int, float, bool, list))
"""Types of arguments; lists have no tensors. A subclass of `Tensor` has operators of its own."""


def without_second_gradient(
    operator: torch.library.CustomOpDef, base: type[ReverseModeFunction]
) -> _DifferentiableOperator:
    """`with_gradient` of an operator that computes a gradient and has none of its own."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def backward(ctx: Any, *gradients: Any) -> None:
        base.refuse_second(*gradients)

    return with_gradient(operator, setup_context, backward, base)


def value_of(x: Tensor) -> Tensor:
    """The values of a tensor that autograd or `torch.func.grad` tracks."""
    while torch._C._functorch.is_gradtrackingtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.detach()


def is_mapped(x: Tensor) -> bool:
    """Whether `torch.func.vmap` maps over the tensor: its values cannot be read then."""
    while torch._C._functorch.is_gradtrackingtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return bool(torch._C._functorch.is_batchedtensor(x))
