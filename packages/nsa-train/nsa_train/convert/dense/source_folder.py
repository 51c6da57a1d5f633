"""Reads a model of other software, which may come from anyone, for `nsa convert`.

Only JSON and safetensors are read, with limits, and every tensor must have the name, shape and type that config.json
implies. Code, pickles and `auto_map` in the folder are ignored: nothing in it is executed.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nsa.errors import CheckpointError
from nsa.hf.configuration import NSAConfig
from nsa.hf.weight_names import EMBEDDING, HEAD
from nsa_train.convert.dense.source_families import FLA_QUERY, is_fla_config, parse_dense_config, parse_fla_config
from nsa_train.convert.dense.source_model import SourceModel, source_shapes, split_tensors
from nsa_train.convert.folder_files import CONFIG, parse_json, read_text
from nsa_train.convert.weight_files import TensorShape, describe_weights, expected_shapes, read_tensors

OnTensor = Callable[[int, int], None]
"""Callback with the number of tensors that were checked, and of all."""


@dataclass(frozen=True)
class _SourceFolder:
    """A folder whose config.json was read."""

    path: Path
    config_text: str
    """config.json as it is."""
    model: SourceModel


@dataclass(frozen=True)
class SourceWeights:
    """Tensors of a folder that were checked against its config.json."""

    tensors: dict[str, Tensor]
    """Tensors by the names of `NSAForCausalLM`; of tied embeddings only one."""
    hashes: dict[str, str]
    """SHA-256 of the values of every tensor of the folder, by its name there."""
    dtype: torch.dtype


def open_source(folder: Path) -> _SourceFolder:
    """Read config.json of a dense model, or of a model of flash-linear-attention; raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder. Name one with config.json and model.safetensors, e.g. made by `hf download "
            f"NAME --local-dir FOLDER`."
        )
    text = read_text(folder / CONFIG)

    def query_rows() -> int:
        query = describe_weights(folder).get(FLA_QUERY)
        return query.shape[0] if query is not None and query.shape else 0

    return _SourceFolder(folder, text, parse_source_config(text, folder / CONFIG, query_rows))


def parse_source_config(text: str, where: Path, query_rows: Callable[[], int]) -> SourceModel:
    """The model in the text of a config.json.

    query_rows: of the first layer's query projection, for models whose config.json does not say how wide a head is.
    """
    values = parse_json(text, where)
    if is_fla_config(values):
        return parse_fla_config(values, where, query_rows)
    if values.get("model_type") == NSAConfig.model_type:
        raise CheckpointError(
            f"{where} describes a model of this package already. To get back the dense model that it was converted "
            f"from, add --to-dense."
        )
    return parse_dense_config(values, where)


def read_source(source: _SourceFolder, on_tensor: OnTensor = lambda done, total: None) -> SourceWeights:
    """Read and check the tensors; raises CheckpointError."""
    folder, model = source.path, source.model
    config, shapes = model.config, dict[str, tuple[int, ...]]()

    def expect(file_tensors: Mapping[str, TensorShape]) -> dict[str, tuple[int, ...]]:
        shapes.update(expected_shapes(folder, config, len(file_tensors)))
        expected = source_shapes(model.names.pairs(shapes, config.num_hidden_layers), shapes)
        if config.tie_word_embeddings and HEAD in file_tensors:  # saved twice, as some software does
            expected[HEAD] = shapes[EMBEDDING]
        return expected

    tensors = read_tensors(folder, expect)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{folder} has tensors of {', '.join(sorted(map(str, dtypes)))}: a converted model has one type. Save it "
            f"again with Transformers in one of them."
        )
    hashes = {}
    for done, (name, tensor) in enumerate(tensors.items(), 1):
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{folder}: {name} holds NaN or infinite values: the model is broken, or was saved in a type that "
                f"cannot hold them. Use another copy of it."
            )
        hashes[name] = tensor_hash(tensor)
        on_tensor(done, len(tensors))
    pairs = model.names.pairs(shapes, config.num_hidden_layers)
    if config.tie_word_embeddings and HEAD in tensors:
        _drop_tied(folder, tensors, pairs)
    return SourceWeights(split_tensors(pairs, tensors, shapes), hashes, dtypes.pop())


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 of the values as a safetensors file holds them."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).hexdigest()


def _drop_tied(folder: Path, tensors: dict[str, Tensor], pairs: Mapping[str, tuple[str, ...]]) -> None:
    """Remove the second copy of tied embeddings, if it is one."""
    embedding = next(name for name, ours in pairs.items() if ours == (EMBEDDING,))
    if not torch.equal(tensors.pop(HEAD), tensors[embedding]):
        raise CheckpointError(
            f"{folder} has tie_word_embeddings=true and a {HEAD} that differs from {embedding}: Transformers would "
            f"drop it. Set tie_word_embeddings to false in config.json if it is the model's own."
        )
