"""The second line of defence: look into every pickle of a checkpoint before anything that executes pickles reads it.

DCP's index (`.metadata`), the tensors inside `.distcp` files and the engine's `train/rank{N}.pt` are all pickles, and
the engine reads them with nothing held back. The manifest comes first; this catches a hostile folder that brought its
own manifest. Only classes that DCP, torch and numpy really write pass; anything else is named and refused.
"""

import io
import pickle
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.errors import CheckpointError
from nsa.train.checkpoint.layout import TENSOR_INDEX

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_DCP = "torch.distributed.checkpoint.metadata"
# What torch 2.13 and OLMo-core 3.0 write into an index. None of these does more than hold values.
_INDEX_CLASSES = frozenset(
    {
        *((_DCP, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((_DCP, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
        (_DCP, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
        *(("torch", f"{kind}{bits}") for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)),
        *(("torch", name) for name in ("bool", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128")),
    }
)
# Beyond torch's own list for weights_only: a numpy random state, as the engine keeps it in train/rank{N}.pt.
_ALSO_IN_RANK_FILES = frozenset(
    {
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "_codecs.encode",
    }
)


def _member(of: Any, name: Any) -> Any:
    """In place of `getattr`, by which Python up to 3.11.3 pickles the member of an enum: that, and nothing else."""
    if not (isinstance(of, type) and issubclass(of, Enum) and name in of.__members__):
        raise pickle.UnpicklingError("it asks for builtins.getattr of something else than the member of an enum")
    return of[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        # A dotted name would walk from an allowed class to anything it can reach.
        if (module, name) not in _INDEX_CLASSES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it asks for a persistent object")


def read_index(file: Path) -> "Metadata":
    """DCP's `.metadata`, without executing anything; refused if it holds a class that an index has no use for."""
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        index = _IndexUnpickler(io.BytesIO(file.read_bytes())).load()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    # A damaged pickle fails in many ways; none of them gets further than this line.
    except (pickle.UnpicklingError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError) as error:
        raise CheckpointError(f"{file} is not an index of tensors that can be trusted: {error}.") from error
    except (ImportError, MemoryError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{file} is not an index of tensors that can be trusted: {error}.") from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError(
            f"{file} is not an index of tensors that can be trusted: it holds {type(index).__name__}."
        )
    return index


def demand_harmless(checkpoint: Path) -> None:
    """Raise CheckpointError, naming the file, if any pickle in a checkpoint could run code when the engine loads it."""
    indexed: set[Path] = set()
    for file in sorted(checkpoint.rglob("*")):
        if file.is_symlink():
            raise CheckpointError(f"{file} is a link: a checkpoint holds its own files only.")
        if file.name == TENSOR_INDEX:
            indexed |= set(_demand_harmless_tensors(file))
        elif file.suffix == ".pt":
            _demand_harmless_torch_file(file, 0, None)
    for file in sorted(checkpoint.rglob("*.distcp")):
        if file not in indexed and file.stat().st_size:  # a replica that had nothing to add leaves empty files
            raise CheckpointError(f"{file} is in no index of tensors: nobody would know what is in it.")


def _demand_harmless_tensors(index_file: Path) -> Iterator[Path]:
    """Every piece of every tensor file that an index points at."""
    folder = index_file.parent
    for where in read_index(index_file).storage_data.values():
        name, offset, length = where.relative_path, where.offset, where.length
        if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
            raise CheckpointError(f"{index_file} points outside its own folder ({name!r}).")
        _demand_harmless_torch_file(folder / name, offset, length)
        yield folder / name


def _demand_harmless_torch_file(file: Path, offset: int, length: int | None) -> None:
    import torch

    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            content = io.BytesIO(stream.read() if length is None else stream.read(length))
        unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(content)) - _ALSO_IN_RANK_FILES
    except (OSError, ValueError, EOFError, RuntimeError, pickle.UnpicklingError, OverflowError, TypeError) as error:
        raise CheckpointError(f"{file} holds something that torch.save did not write: {error}.") from error
    if unsafe:
        raise CheckpointError(f"{file} would run {', '.join(sorted(unsafe))} when loaded: it is not a checkpoint.")
