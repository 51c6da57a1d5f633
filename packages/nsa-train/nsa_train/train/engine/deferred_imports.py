"""Heavy modules that the engine and TensorBoard import at their top and most ranks never use: imported at first use.

A rank that only imports the engine would spend seconds of CPU time on clients of cloud storage, Triton, setuptools, the
engine's mixture-of-experts trainer and torch's compiler. While `deferred_imports` is entered, `import` gives stand-ins
for these modules. Each has the names of `_DEFERRED_NAMES`, which import the real module when they are called,
and of which nothing is an instance before; every other attribute imports the real module at once. Afterwards the
stand-ins are gone from `sys.modules`: everybody else, torch included, imports the real modules.

A module that is loaded already stays what it is. tests/nsa_train/train/engine/test_deferred_imports.py fails by name
when an upgrade of the engine uses one of the names in another way than to call it.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

import torch

from nsa.kernels.custom_operator import COMPILER

_DEFERRED_NAMES: dict[str, tuple[str, ...]] = {
    "cached_path": ("cached_path",),  # 0.9 s: clients of S3, Google Cloud and the Hugging Face hub
    "requests": ("Session",),  # 0.2 s: the tables of chardet
    "requests.adapters": ("HTTPAdapter",),
    "requests.exceptions": ("ChunkedEncodingError", "ConnectionError", "HTTPError", "Timeout"),
    "boto3": (),  # TensorBoard, for files on S3
    "fsspec": (),  # TensorBoard, for files elsewhere
    "torch.distributed.pipelining": ("PipelineStage",),  # the compiler of torch
    "torch.utils.cpp_extension": ("load_inline",),  # setuptools
    "torch.utils.flop_counter": ("FlopCounterMode",),  # Triton
    "olmo_core.train.train_module.transformer.ddp_train_module": ("OLMoDDPTrainModule",),  # the compiler
    "olmo_core.kernels.moe": (),  # Triton
    "olmo_core.kernels.mxfp8_utils": (  # Triton
        "_quantize_to_mxfp8_torch",
        "dequantize_rows_from_mxfp8",
        "grouped_scales_to_mxfp8_blocked",
        "quantize_grouped_weight_3d_to_mxfp8_blocked",
        "quantize_rows_to_mxfp8",
        "to_blocked",
    ),
}
"""Module → functions and classes that the engine takes from it by name and only calls, names in annotations, or asks
whether something is an instance of."""

_STORAGE_CLIENTS = "cached_path.schemes"


class _DeferredModule(ModuleType):
    """Stand-in for a module that is imported when an attribute is used which the stand-in does not have."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(name)
        vars(self).update(attributes, __path__=[])  # `_SubmoduleFinder` is asked for its submodules

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for its __file__
            raise AttributeError(name)
        return getattr(self.load(), name)

    def load(self) -> ModuleType:
        """The real module."""
        name = self.__name__
        if sys.modules.get(name) is self:
            del sys.modules[name]
        return importlib.import_module(name)


class _SubmoduleFinder(MetaPathFinder, Loader):
    """Finder of `import torch._dynamo.config` and alike: the real package is imported first."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        package = sys.modules.get(name.rpartition(".")[0])
        if not isinstance(package, _DeferredModule):
            return None
        package.load()
        return spec_from_loader(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class _DeferredClient:
    """Base class, until cached_path is imported, of the client that the engine adds to it."""

    recoverable_errors: tuple[type[BaseException], ...] = ()


_clients: list[type[_DeferredClient]] = []


@contextmanager
def deferred_imports() -> Iterator[None]:
    """Defer the imports of the engine or of TensorBoard, which is imported inside."""
    clients = {"SchemeClient": _DeferredClient, "S3Client": _DeferredClient, "add_scheme_client": _add_client}
    modules = {name: _DeferredModule(name, **_functions(name, names)) for name, names in _DEFERRED_NAMES.items()}
    for name, module in modules.items():
        package, _, part = name.rpartition(".")
        if package in modules:
            setattr(modules[package], part, module)
    with _stand_ins(
        *modules.values(),
        _DeferredModule(_STORAGE_CLIENTS, **clients),
        _DeferredModule(COMPILER, disable=_disable),
    ):
        yield


@contextmanager
def _stand_ins(*modules: _DeferredModule) -> Iterator[None]:
    """Let `import` find these modules, unless the real ones are loaded already."""
    entered = [module for module in modules if sys.modules.setdefault(module.__name__, module) is module]
    finder = _SubmoduleFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in entered:
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]


def _functions(module: str, names: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    return {name: _DeferredCallable(name, (), {"module": module}) for name in names}


class _DeferredCallable(type):
    """Metaclass of a stand-in for a function or class: a call imports the real one; before, it has no instances."""

    module: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        real = importlib.import_module(cls.module)
        if cls.module == "cached_path":
            _register_clients()
        return getattr(real, cls.__name__)(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        real = sys.modules.get(cls.module)
        return (
            isinstance(real, ModuleType)
            and not isinstance(real, _DeferredModule)
            and isinstance(instance, getattr(real, cls.__name__))
        )


def _add_client(client: type[_DeferredClient]) -> None:
    _clients.append(client)


def _register_clients() -> None:
    """Add the engine's clients to cached_path, once."""
    schemes = importlib.import_module(_STORAGE_CLIENTS)
    while _clients:
        client = _clients.pop()
        bases = {"recoverable_errors": schemes.S3Client.recoverable_errors}
        schemes.add_scheme_client(type(client.__name__, (client, schemes.SchemeClient), bases))


def _disable(fn: Callable[..., Any] | None = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """`torch._dynamo.disable` in the form that torch itself uses where it must not import the compiler: the compiler is
    imported by the first call of the function."""
    if fn is None:
        return functools.partial(_disable, recursive=recursive, reason=reason)
    return torch._disable_dynamo(fn, recursive)
