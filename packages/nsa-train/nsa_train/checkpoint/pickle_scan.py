"""Static scan of the pickle files in a checkpoint: refuses everything but tensors and plain containers.

DCP's index (`.metadata`), the tensors inside `.distcp` files and the engine's `train/rank{N}.pt` are all pickles. None
of them is ever given to `pickle` or `torch.load`: `tensor_index` and `torch_file` read them without executing anything.
"""

from pathlib import Path

from nsa.errors import CheckpointError
from nsa_train import names
from nsa_train.checkpoint.pickle_reader import PickleRefused
from nsa_train.checkpoint.run_state import LARGEST_JSON_BYTES
from nsa_train.checkpoint.tensor_index import Metadata, PieceLocation, largest_index, parse_index
from nsa_train.checkpoint.torch_file import check_torch_file, read_torch_file
from nsa_train.checkpoint.verified_files import LARGEST_RANK_FILE_BYTES, VerifiedFiles


def read_index(files: VerifiedFiles) -> Metadata:
    """The index of a checkpoint's tensors; raises CheckpointError if it cannot be trusted."""
    folder = files.tensor_folder
    sizes = {
        name.removeprefix(folder): size
        for name, size in files.sizes.items()
        if name.startswith(folder) and name.endswith(names.TENSOR_FILES)
    }
    name = f"{folder}{names.TENSOR_INDEX}"
    if name not in files.sizes:
        raise CheckpointError(f"{files.path} holds no tensors: {names.TENSORS}/{names.TENSOR_INDEX} is missing.")
    raw = files.read(name, limit=largest_index(sum(sizes.values()), len(sizes)))
    return parse_index(raw, sizes, files.path / name)


def read_piece(files: VerifiedFiles, where: PieceLocation) -> object:
    """A tensor, or a plain value, from its location in a `.distcp` file."""
    name = f"{files.tensor_folder}{where.relative_path}"
    return parse_plain(files.read_range(name, where.offset, where.length), files.path / name)


def read_trainer_state(files: VerifiedFiles, rank: int) -> object:
    """The engine's state of a rank; that of rank 0 if the saving run had no such rank. None if there is neither."""
    for name in (names.trainer_state(rank), names.trainer_state(0)):
        if name in files.sizes:
            return parse_plain(files.read(name, limit=LARGEST_RANK_FILE_BYTES), files.path / name)
    return None


def require_harmless(files: VerifiedFiles, *, pieces: bool = True, rank: int = 0, world: int = 1) -> Metadata:
    """Raise CheckpointError, naming the file, for anything that does not belong in a checkpoint or cannot be loaded.

    Returns the index of the tensors. `pieces=False` skips the headers of the pieces of tensors, of which a large run
    has millions: they are checked when they are loaded. The ranks of a run divide the trainer states, one file per
    rank that saved, among them.
    """
    states = sorted(name for name in files.sizes if name.endswith(".pt"))
    for name in states[rank::world]:
        _check(files, name, files.read(name, limit=LARGEST_RANK_FILE_BYTES), 0, files.sizes[name])
    for name, size in files.sizes.items():
        if not names.is_known_file(name):
            raise CheckpointError(f"{files.path} holds {name!r}, which does not belong in a checkpoint.")
        if name.endswith(".json") and name != names.COMMIT and size > LARGEST_JSON_BYTES:
            raise CheckpointError(f"{files.path / name} has {size} bytes: a record has at most {LARGEST_JSON_BYTES}.")
    index = read_index(files)
    folder, used = files.tensor_folder, set()
    for where in index.storage_data.values():
        used.add(where.relative_path)
        if pieces:
            _check(files, f"{folder}{where.relative_path}", None, where.offset, where.length)
    for name, size in files.sizes.items():  # a replica that had nothing to add leaves empty files
        if (
            name.endswith(names.TENSOR_FILES)
            and size
            and (not name.startswith(folder) or name.removeprefix(folder) not in used)
        ):
            raise CheckpointError(f"{files.path / name} is not in the index of tensors.")
    return index


def _check(files: VerifiedFiles, name: str, raw: bytearray | None, start: int, size: int) -> None:
    def read(offset: int, count: int) -> bytes | bytearray:
        count = max(0, min(count, size - offset))
        return files.peek(name, start + offset, count) if raw is None else raw[offset : offset + count]

    try:
        check_torch_file(read, size)
    except PickleRefused as error:
        raise _refusal(files.path / name, error) from error


def parse_plain(raw: bytearray, where: Path) -> object:
    """Tensors and plain values from the bytes of a file of torch.save; `where` is for messages."""
    try:
        return read_torch_file(raw)
    except PickleRefused as error:
        raise _refusal(where, error) from error


def _refusal(path: Path, error: PickleRefused) -> CheckpointError:
    return CheckpointError(f"{path} cannot be loaded safely: {error}.")
