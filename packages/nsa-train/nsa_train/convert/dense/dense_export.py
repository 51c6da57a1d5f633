"""`nsa convert --to-dense`: writes a converted model back in the format of its source, trained since or not."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from nsa.errors import CheckpointError
from nsa.hf.configuration import NSAConfig
from nsa.hf.weight_names import EMBEDDING, HEAD
from nsa_train.convert.dense.conversion_record import CONVERSION, ConversionRecord
from nsa_train.convert.dense.copied_files import copy_back
from nsa_train.convert.dense.source_folder import OnTensor, parse_source_config, tensor_hash
from nsa_train.convert.dense.source_model import SourceModel
from nsa_train.convert.dense.source_tensors import join_tensors
from nsa_train.convert.export_folder import CONFIG, DEFAULT_SHARD_BYTES, is_export
from nsa_train.convert.folder_files import parse_json
from nsa_train.convert.import_folder import read_config
from nsa_train.convert.output_folder import new_folder
from nsa_train.convert.weight_files import read_weights, write_weights

_MAY_DIFFER = {"max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"}
"""Arguments that training changes, or that say nothing about what the model computes."""


@dataclass(frozen=True)
class DenseExport:
    """Result of `export_dense`."""

    architecture: str
    tensors: int
    unchanged: int
    """Tensors whose values are those of the source, bit for bit."""
    dropped: dict[str, int]
    """Parameters that the source's format cannot hold, by their name inside a layer, and how many layers have them."""
    dtype: str
    source_dtype: str
    missing_files: list[str]
    """Files of the source that are no longer in the folder."""


def export_dense(
    folder: Path,
    out: Path,
    *,
    like: Path | None = None,
    overwrite: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_tensor: OnTensor = lambda done, total: None,
) -> DenseExport:
    """Write the model of a converted folder, or of an export of a run trained from one, in its source's format.

    like: the converted folder whose conversion.json and tokenizer are used, for an export that has none.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Name one that `nsa convert` or `nsa export hf` wrote.")
    origin = like or folder
    record = ConversionRecord.read(origin)
    config = read_config(folder)
    query_rows = config.num_attention_heads * config.head_dim
    model = parse_source_config(record.config, origin / CONVERSION, lambda: query_rows)
    _require_same_model(folder, config, model)
    source_type = str(parse_json(record.config, origin / CONVERSION).get("model_type"))
    with new_folder(out, may_replace=lambda existing: overwrite and is_export(existing, source_type)) as staging:
        tensors = read_weights(folder, config)
        pairs = model.names.pairs(tensors, config.num_hidden_layers)
        source = join_tensors(pairs, tensors)
        if HEAD in record.tensors and HEAD not in source:  # the source has its tied embeddings twice
            source[HEAD] = source[next(name for name, ours in pairs.items() if ours == (EMBEDDING,))].clone()
        if differing := sorted(source.keys() ^ record.tensors.keys()):
            raise CheckpointError(
                f"{origin / CONVERSION} and {folder} disagree about the tensor {differing[0]!r:.80} and "
                f"{len(differing) - 1} more: it is the record of another model. Name the right one with --like."
            )
        unchanged = 0
        for done, (name, tensor) in enumerate(source.items(), 1):
            unchanged += tensor_hash(tensor) == record.tensors[name]
            on_tensor(done, len(source))
        (staging / CONFIG).write_text(record.config, encoding="utf-8", newline="")
        missing = copy_back(origin, staging, record.files)
        for path in write_weights(dict(sorted(source.items())), staging, shard_bytes):
            shutil.copymode(staging / CONFIG, path)  # safetensors makes private files
    return DenseExport(
        architecture=record.architecture,
        tensors=len(source),
        unchanged=unchanged,
        dropped=_by_layer(tensors),
        dtype=str(next(iter(source.values())).dtype).removeprefix("torch."),
        source_dtype=record.dtype,
        missing_files=missing,
    )


def _by_layer(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in sorted(tensors):
        inside = name.removeprefix("model.layers.").partition(".")[2]
        counts[inside] = counts.get(inside, 0) + 1
    return counts


def _require_same_model(folder: Path, config: NSAConfig, model: SourceModel) -> None:
    """Refuse a model whose settings were changed since: the source's config would describe another one."""
    for name, value in model.arguments.items():
        now = getattr(config, name)
        if name not in _MAY_DIFFER and (now or None) != (value or None):
            raise CheckpointError(
                f"{folder / CONFIG} has {name}={now!r:.60} and the {model.architecture} of {CONVERSION} "
                f"{value!r:.60}: the source's config.json would describe another model. Use the record of this model, "
                f"or export it with `nsa export hf`."
            )
