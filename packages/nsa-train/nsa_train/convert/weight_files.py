"""Safetensors files of a model's folder: written in shards, read only if every tensor is as the config implies."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.errors import CheckpointError, OutputError
from nsa.files import open_regular
from nsa.hf.configuration import NSAConfig
from nsa.hf.modeling import NSAForCausalLM
from nsa.hf.weight_names import HEAD
from nsa_train import names
from nsa_train.convert.folder_files import CONFIG, read_json

_WEIGHTS_INDEX = f"{names.MODEL_SAFETENSORS}.index.json"
_DTYPES = ("F32", "BF16", "F16")
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_LARGEST_HEADER_BYTES = 32 << 20


class TensorShape(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


def write_weights(tensors: Mapping[str, Tensor], folder: Path, shard_bytes: int) -> None:
    """Write model.safetensors beside config.json, or shards of at most `shard_bytes` and their index."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=shard_bytes)
    for name, keys in split.filename_to_tensors.items():
        try:
            save_file({key: tensors[key] for key in keys}, folder / name, metadata={"format": "pt"})
            shutil.copymode(folder / CONFIG, folder / name)  # safetensors makes private files
        except SafetensorError as error:  # a full disk too
            raise OutputError(f"{folder / name} could not be written: {error}.") from error
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / _WEIGHTS_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_weights(folder: Path, config: NSAConfig) -> dict[str, Tensor]:
    """Every tensor of the model by its name; raises CheckpointError for a missing, foreign or misshapen one."""
    return read_tensors(folder, lambda tensors: expected_shapes(folder, config, len(tensors)))


def read_tensors(
    folder: Path, expect: Callable[[Mapping[str, TensorShape]], Mapping[str, tuple[int, ...]]]
) -> dict[str, Tensor]:
    """Tensors of the safetensors files in a folder by name; raises CheckpointError for one that is not as expected.

    expect: the shapes by name that the folder's config implies, given what its files hold.
    """
    with _open_weights(folder) as (files, contents):
        shapes = {key: described for tensors in contents.values() for key, described in tensors.items()}
        _require_expected(folder, shapes, expect(shapes))
        return {key: files[name].get_tensor(key) for name in contents for key in sorted(contents[name])}


def describe_weights(folder: Path) -> dict[str, TensorShape]:
    """Shape and type of every tensor in the safetensors files of a folder; their values are not read."""
    with _open_weights(folder) as (_, contents):
        return {key: described for tensors in contents.values() for key, described in tensors.items()}


@contextmanager
def _open_weights(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, dict[str, TensorShape]]]]:
    """The open files and what each holds, after their headers and the index were checked."""
    from safetensors import SafetensorError

    with ExitStack() as opened:
        try:
            files = {name: _open(folder / name, opened) for name in _weight_files(folder)}
            contents = {name: _described(file) for name, file in files.items()}
            _require_index(folder, contents)
            yield files, contents
        except OSError as error:
            raise CheckpointError(
                f"weights in {folder} cannot be read ({error}): they must be regular files and no links. Copy a folder "
                f"of links with `cp -rL`."
            ) from error
        except SafetensorError as error:
            raise CheckpointError(f"{folder} has a weights file that is not safetensors ({error}).") from error


def _weight_files(folder: Path) -> list[str]:
    if (folder / _WEIGHTS_INDEX).exists():
        return sorted(set(_weight_map(folder).values()))
    if not os.path.lexists(folder / names.MODEL_SAFETENSORS) and any(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} has its weights in *.bin, which are pickles: reading one executes what is in it. Load the model "
            f"with Transformers where you trust it, and save it again: save_pretrained writes safetensors."
        )
    return [names.MODEL_SAFETENSORS]


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor → file, of a folder with several weights files. A file's name must be one that an export gives it."""
    listed = read_json(folder / _WEIGHTS_INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{folder / _WEIGHTS_INDEX} has no weight_map: it does not say where the tensors are.")
    for name in listed.values():
        if not isinstance(name, str) or _SHARD_NAME.fullmatch(name) is None:
            raise CheckpointError(
                f"{folder / _WEIGHTS_INDEX} names the file {name!r:.80}: weights are in files called "
                f"model-00001-of-00002.safetensors, in the folder itself."
            )
    return listed


def _require_index(folder: Path, contents: Mapping[str, Mapping[str, TensorShape]]) -> None:
    if names.MODEL_SAFETENSORS in contents:
        return
    listed = set(_weight_map(folder).items())
    if differing := listed ^ {(key, name) for name, tensors in contents.items() for key in tensors}:
        raise CheckpointError(
            f"{folder / _WEIGHTS_INDEX} and the weights files disagree about {min(differing)!r}, and "
            f"{len(differing) - 1} more. Export or download the folder again."
        )


def _open(path: Path, opened: ExitStack) -> Any:
    """The file as safetensors, after its size and header were checked; no link, pipe or device."""
    from safetensors import safe_open

    file = opened.enter_context(open_regular(path, follow_links=False))
    length = int.from_bytes(file.read(8), "little")
    if length > _LARGEST_HEADER_BYTES:
        raise CheckpointError(
            f"{path} has a header of {length} bytes, more than the {_LARGEST_HEADER_BYTES} allowed: no weights."
        )
    # By descriptor: the file that was checked, not another one that took its place.
    return opened.enter_context(safe_open(f"/dev/fd/{file.fileno()}", "pt"))


def _described(file: Any) -> dict[str, TensorShape]:
    parts = {key: file.get_slice(key) for key in list(file.keys())}
    return {key: TensorShape(tuple(part.get_shape()), part.get_dtype()) for key, part in parts.items()}


def expected_shapes(folder: Path, config: NSAConfig, n_tensors: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of `NSAForCausalLM` by name; of tied embeddings only one. `n_tensors`: in the folder."""
    shapes = {key: tuple(tensor.shape) for key, tensor in meta_model(folder, config, n_tensors).state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop(HEAD)
    return shapes


def meta_model(folder: Path, config: NSAConfig, n_tensors: int) -> NSAForCausalLM:
    """The model of a folder without values. `n_tensors`: in the folder."""
    if config.num_hidden_layers > n_tensors:  # before a model of a billion layers is built to compare with
        raise CheckpointError(f"{folder} has {n_tensors} tensors for {config.num_hidden_layers} layers.")
    try:
        with torch.device("meta"):
            return NSAForCausalLM(config)
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: config.json describes a model that cannot be built ({error}).") from error


def _require_expected(
    folder: Path, tensors: Mapping[str, TensorShape], expected: Mapping[str, tuple[int, ...]]
) -> None:
    if differing := sorted(expected.keys() ^ tensors.keys()):
        missing = sum(key in expected for key in differing)
        raise CheckpointError(
            f"{folder} lacks {missing} tensors of the model in config.json and has {len(differing) - missing} others: "
            f"{', '.join(f'{key!r:.80}' for key in differing[:3])}. Use the config of these weights."
        )
    for key, (shape, dtype) in tensors.items():
        if shape != expected[key] or dtype not in _DTYPES:
            raise CheckpointError(
                f"{folder}: {key} is {dtype} of shape {shape}, and config.json implies one of {', '.join(_DTYPES)} of "
                f"shape {expected[key]}. Use the config of these weights."
            )
