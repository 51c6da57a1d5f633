"""Kernel launches, and launch plans: what a launcher does for inputs of one form, kept and repeated without its Python.

A launcher is a function of tensors that allocates, takes views and launches kernels. All of it follows from the form of
its inputs (shapes, strides, dtypes, alignment, device) and never from their values: so the second call with inputs of
one form is recorded, and later ones repeat the allocations and the launches alone, with the kernels as compiled, the
grids and every argument but the tensors already in place. Triton's own launch would look at each argument again.

Under the interpreter nothing is compiled, and launchers run as they are written.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from nsa.kernels.triton.tile_store import tunes

_Launcher = TypeVar("_Launcher", bound=Callable[..., Any])

_MOST_PLANS = 256
"""Plans of one launcher; the oldest is dropped."""
_unplanned = 0
SMALL_BYTES = 2**24
"""Tensors below this that only kernels use share one allocation, freed when the plan ends; within it, what no later
launch reads makes room for what follows. 0: kernels get tensors, never addresses."""
_ALIGNMENT = 256  # bytes, as of torch's own allocations on a GPU
_TENSOR = object()


class _Recorder(TorchDispatchMode):
    """Notes operations and launches. Tensors are named by their places in a pool, and not kept."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.pool: list[Any] = [*[_TENSOR] * len(inputs), None]  # after the inputs: the stream
        self.places = WeakTensorKeyDictionary({x: place for place, x in reversed(list(enumerate(inputs)))})
        self.device, self.n_inputs = inputs[0].device, len(inputs)
        self.steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.used: dict[int, int] = {}
        """The last step that reads each place."""
        self.by_operations: set[int] = set()
        """Places that something else than a launch reads."""
        self.repeatable = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            self.repeatable = False
        elif func.__name__.startswith(("empty", "new_empty")):
            self._note(_allocate, self._add(result), result.shape, result.stride(), result.dtype)
        elif not func._schema.is_mutable and _is_view(result, source := args[0]):
            ahead = result.storage_offset() - source.storage_offset()
            if (result.shape, result.stride(), ahead) == (source.shape, source.stride(), 0):
                self.places[result] = self._place(source).place
            else:
                self.repeatable &= result.dtype == source.dtype
                where = (result.shape, result.stride(), ahead, result.element_size())
                self._note(_view, self._add(result), self._place(source).place, *where)
        else:
            named = tree_map_only(Tensor, self.operand, (args, kwargs or {}))
            self._note(_operate, self._add(result), func, *named)
        return result

    def launched(self, compiled: Any, kernel: Any, grid: tuple[int, ...], args: Any, constants: Any) -> None:
        if compiled is None:  # nothing was launched
            self.repeatable = False
            return
        parameters = {name: value for name, value in constants.items() if name in kernel.arg_names}
        bound = kernel.signature.bind(*args, **parameters)
        bound.apply_defaults()
        places = [self._place(x).place if isinstance(x, Tensor) else self._add(x) for x in bound.arguments.values()]
        self._note(_launch, compiled, (*grid, 1, 1)[:3], itemgetter(*places), self.n_inputs)

    def _note(self, step: Callable[..., Any], *details: Any) -> None:
        self.steps.append((step, details))

    def _add(self, x: Any) -> int:
        self.pool.append(_TENSOR if isinstance(x, Tensor) else x)
        if isinstance(x, Tensor):
            self.places[x] = len(self.pool) - 1
        return len(self.pool) - 1

    def _place(self, x: Tensor) -> "_InPool":
        if x not in self.places:  # neither an input nor made of one
            self.repeatable = False
            return _InPool(0)
        place = self.places[x]
        self.used[place] = len(self.steps)
        return _InPool(place)

    def operand(self, x: Tensor) -> "_InPool":
        """The place of a tensor that something else than a launch reads."""
        name = self._place(x)
        self.by_operations.add(name.place)
        return name

    def plan(self, result: Any) -> "_LaunchPlan | None":
        named = tree_map_only(Tensor, self.operand, result)
        for number, (step, details) in reversed(list(enumerate(self.steps))):
            if step is _view:  # who reads a view reads its source
                place, source = details[:2]
                self.used[source] = max(self.used[source], self.used.get(place, number))
                self.by_operations |= {source} if place in self.by_operations else set()
        return _LaunchPlan(self, named) if self.repeatable else None


def _is_view(result: Tensor, source: Any) -> bool:
    return isinstance(source, Tensor) and result.untyped_storage()._cdata == source.untyped_storage()._cdata


class _InPool:
    def __init__(self, place: int) -> None:
        self.place = place


class _LaunchPlan:
    """Repeats what was recorded. Memory is freed where the launcher freed it at the latest: after its last reader."""

    def __init__(self, recorder: _Recorder, result: Any) -> None:
        device, n_inputs = recorder.device, recorder.n_inputs
        self._pool = [None if x is _TENSOR else x for x in recorder.pool]
        self._n_inputs, self._result = n_inputs, result
        self._steps: list[Callable[[list[Any]], None]] = []
        shared: dict[int, _Lifetime] = {}
        for number, (step, details) in enumerate(recorder.steps):
            if step is _allocate and (place := details[0]) not in recorder.by_operations:
                size = prod(details[1]) * details[3].itemsize
                if size < SMALL_BYTES:
                    shared[place] = _Lifetime(number, recorder.used.get(place, number), size)
        if shared:
            self._steps.append(_share(device, *_packed(shared)))
        places = (place for place, x in enumerate(recorder.pool) if x is _TENSOR and place >= n_inputs)
        last = {place: recorder.used.get(place, 0) for place in places if place not in shared}
        for number, (step, details) in enumerate(recorder.steps):
            if step is _allocate and details[0] in shared:
                continue
            if step is _view and SMALL_BYTES and details[0] not in recorder.by_operations:
                self._steps.append(_address(*details))
            else:
                self._steps.append(step(device, *details))
            if dead := [place for place, reader in last.items() if reader == number and step is _launch]:
                self._steps.append(_free(dead))

    def run(self, inputs: Sequence[Tensor], stream: int) -> Any:
        pool = self._pool.copy()
        pool[: self._n_inputs + 1] = (*inputs, stream)
        for step in self._steps:
            step(pool)
        result = self._result
        if isinstance(result, _InPool):
            return pool[result.place]
        return tuple(pool[x.place] for x in result)


def _allocate(device: torch.device, place: int, shape: Any, strides: Any, dtype: torch.dtype) -> Any:
    def step(pool: list[Any]) -> None:
        pool[place] = torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return step


class _Lifetime(NamedTuple):
    """Steps from a tensor's allocation to its last reader, and its bytes."""

    first: int
    last: int
    size: int


def _packed(tensors: Mapping[int, _Lifetime]) -> tuple[dict[int, int], int]:
    """Offset of each tensor in an allocation that they share, and its bytes: the lowest gap among those that live at
    the same time."""
    offsets: dict[int, int] = {}
    for place, tensor in tensors.items():
        at = 0
        alive = (other for other in offsets if tensors[other].last >= tensor.first)
        for begin, size in sorted((offsets[other], tensors[other].size) for other in alive):
            if at + tensor.size <= begin:
                break
            at = max(at, -(-(begin + size) // _ALIGNMENT) * _ALIGNMENT)
        offsets[place] = at
    return offsets, max(offset + tensors[place].size for place, offset in offsets.items())


def _share(device: torch.device, offsets: Mapping[int, int], size: int) -> Any:
    """Kernels take addresses in place of tensors."""
    places = list(offsets.items())

    def step(pool: list[Any]) -> None:
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        pool.append(memory)
        begin = memory.data_ptr()
        for place, offset in places:
            pool[place] = begin + offset

    return step


def _address(place: int, source: int, shape: Any, strides: Any, ahead: int, element_size: int) -> Any:
    """A view that only kernels use."""
    ahead *= element_size

    def step(pool: list[Any]) -> None:
        whole = pool[source]
        pool[place] = (whole if isinstance(whole, int) else whole.data_ptr()) + ahead

    return step


def _view(
    device: torch.device, place: int, source: int, shape: Any, strides: Any, ahead: int, element_size: int
) -> Any:
    def step(pool: list[Any]) -> None:
        x = pool[source]
        pool[place] = x.as_strided(shape, strides, x.storage_offset() + ahead)

    return step


def _operate(device: torch.device, place: int, func: Any, args: Any, kwargs: Any) -> Any:
    def step(pool: list[Any]) -> None:
        filled = tree_map_only(_InPool, lambda x: pool[x.place], (args, kwargs))
        pool[place] = func(*filled[0], **filled[1])

    return step


def _launch(
    device: torch.device, compiled: Any, grid: tuple[int, ...], arguments: Callable[..., Any], stream: int
) -> Any:
    run, before_hooks = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)

    def step(pool: list[Any]) -> None:
        run(*grid, pool[stream], *before_hooks, *arguments(pool))

    return step


def _free(places: Sequence[int]) -> Any:
    def step(pool: list[Any]) -> None:
        for place in places:
            pool[place] = None

    return step


_thread = threading.local()  # backward runs in threads of autograd


class Launch(NamedTuple):
    """A kernel over a grid."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    compiled = kernel[grid](*arguments, **constants)
    if (recorder := getattr(_thread, "recorder", None)) is not None:
        recorder.launched(compiled, kernel, grid, arguments, constants)


def launch_all(launches: Sequence[Launch]) -> None:
    """`launch`, in order."""
    recorder = getattr(_thread, "recorder", None)
    for kernel, grid, arguments, constants in launches:
        compiled = kernel[grid](*arguments, **constants)
        if recorder is not None:
            recorder.launched(compiled, kernel, grid, arguments, constants)


@contextmanager
def unplanned() -> Iterator[None]:
    """Inside, launchers run as they are written, in all threads: where launches are not what they usually are."""
    global _unplanned
    _unplanned += 1
    try:
        yield
    finally:
        _unplanned -= 1


def planned(launcher: _Launcher) -> _Launcher:
    """Keep a plan of the launcher for each form of its inputs: tensors, named tuples of them, and hashable values. It
    returns a tensor or several."""
    if triton.knobs.runtime.interpret:
        return launcher
    plans: OrderedDict[Any, _LaunchPlan | object] = OrderedDict()

    @functools.wraps(launcher)
    def run(*args: Any) -> Any:
        if _unplanned or getattr(_thread, "recorder", None) is not None or _hooked():
            return launcher(*args)
        tensors, form = [], []
        for x in args:
            for y in x if isinstance(x, tuple) else (x,):
                if isinstance(y, Tensor):
                    if type(y) is not Tensor:  # fake ones have no address
                        return launcher(*args)
                    tensors.append(y)
                    form.append((y.dtype, y.shape, y.stride(), y.data_ptr() & 15))
                else:
                    form.append(y)
        same: dict[int, int] = {}
        places = [same.setdefault(id(x), place) for place, x in enumerate(tensors)]
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        key = (*form, *places, tensors[0].device, device, tunes())
        plan = plans.get(key)
        if isinstance(plan, _LaunchPlan):
            return plan.run(tensors, driver.get_current_stream(device))
        if plan is _COMPILED:
            _thread.recorder = recorder = _Recorder(tensors)
            try:
                with recorder:
                    result = launcher(*args)
            finally:
                _thread.recorder = None
            plans[key] = recorder.plan(result) or _UNREPEATABLE
            return result
        if plan is None:
            if len(plans) >= _MOST_PLANS:
                plans.popitem(last=False)
            plans[key] = _COMPILED
        return launcher(*args)

    return run  # type: ignore[return-value]


def _hooked() -> bool:
    """Whether something, a profiler for instance, is called at every launch."""
    knobs = triton.knobs.runtime
    return bool(knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls)


_COMPILED, _UNREPEATABLE = object(), object()
"""In place of a plan: the launcher ran once, so that its kernels are compiled and their tiles chosen; what it does
cannot be repeated."""
