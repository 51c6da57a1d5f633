"""`nsa convert`: writes a dense model of Transformers as an exported folder whose layers are sparse, and back.

The weights stay bit for bit what they were. Up to the length that selection and window cover, the converted model
computes what the dense one computes; beyond, a query reads the selected blocks and the window only.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from torch import Tensor
from transformers import GenerationConfig

from nsa import __version__
from nsa.core.init import init_module
from nsa.errors import CheckpointError
from nsa.hf.configuration import NSAConfig
from nsa.hf.weight_names import EMBEDDING, HEAD
from nsa.options import AttentionKind
from nsa_train.config.schema import RunConfig
from nsa_train.convert.dense.conversion_plan import (
    ConversionOptions,
    LayerReads,
    converted_config,
    covered_tokens,
    layer_reads,
)
from nsa_train.convert.dense.source_folder import (
    OnTensor,
    SourceWeights,
    open_source,
    parse_source_config,
    read_source,
    tensor_hash,
)
from nsa_train.convert.dense.source_model import SourceModel, join_tensors
from nsa_train.convert.export_folder import ARCHITECTURE, CARD, DEFAULT_SHARD_BYTES, is_export
from nsa_train.convert.folder_files import CONFIG, new_folder, parse_json, read_json, require_fields
from nsa_train.convert.import_folder import ExportedModel, read_config, run_config
from nsa_train.convert.tokenizer_files import GENERATION_CONFIG, SourceTokenizer, copy_back, copy_source_files
from nsa_train.convert.training_record import card_table, how_to_load
from nsa_train.convert.weight_files import meta_model, read_weights, write_weights

CONVERSION = "conversion.json"
_FORMAT = 1
_HASH_DIGITS = 64
RUN_CONFIG, WARMUP_CONFIG = "run.yaml", "warmup.yaml"
_DATA = "data.dataset=prepared data.path=SET train.seq_len=LENGTH"
_WARMUP_HEAD = f"""\
# Warm-up of this converted model: trains the parameters that its source does not have; the source's are frozen.
#   nsa train OUT/{WARMUP_CONFIG} {_DATA} train.out_dir=RUNS/warmup --init-from OUT
"""
_HEALING_HEAD = f"""\
# Training of this converted model, all parameters, at a low rate.
#   nsa train OUT/{RUN_CONFIG} {_DATA} train.out_dir=RUNS/healed --init-from {{origin}}
"""
_HEALING = {"lr": 3e-5, "warmup_steps": 50}
_PHI_RATE, _GATE_RATE = 1e-3, 3e-4  # gates at ten times that rate made the loss worse
_MAY_DIFFER = {"max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"}
"""Arguments that training changes, or that say nothing about what the model computes."""


@dataclass(frozen=True)
class ConversionRecord:
    """conversion.json: what the model was converted from, and how, so that it can be undone."""

    architecture: str
    """Architecture of the source, as in its config.json."""
    config: str
    """The source's config.json as it was."""
    dtype: str
    """Type of the source's tensors."""
    tensors: Mapping[str, str]
    """SHA-256 of the values of every tensor of the source, by its name there."""
    files: Mapping[str, str]
    """Other files of the source that were copied: name there → name here."""
    options: Mapping[str, Any]
    """Options of the conversion."""
    version: str
    """Version of nsa-train."""

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=2, sort_keys=True, allow_nan=False)
        (folder / CONVERSION).write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the record of a folder that may come from anyone; raises CheckpointError."""
        where = folder / CONVERSION
        if not where.exists() and not where.is_symlink():
            raise CheckpointError(
                f"{folder} has no {CONVERSION}: it does not say which model it was converted from. Name the converted "
                f"folder that its training started from with --like."
            )
        values = read_json(where)
        expected = {
            "format": int, "architecture": str, "config": str, "dtype": str, "tensors": dict, "files": dict,
            "options": dict, "version": str,
        }  # fmt: skip
        require_fields(values, expected, where)
        if values.pop("format") != _FORMAT:
            raise CheckpointError(f"{where} is of another version than {_FORMAT}, which this version reads.")
        if not all(isinstance(value, str) and len(value) == _HASH_DIGITS for value in values["tensors"].values()):
            raise CheckpointError(f"{where} has a tensor without the SHA-256 of its values.")
        if not all(isinstance(name, str) for name in values["files"].values()):
            raise CheckpointError(f"{where} has a copied file without its name.")
        return cls(**values)


@dataclass(frozen=True)
class ConvertedModel:
    """Result of `convert_folder`."""

    architecture: str
    """Architecture of the source."""
    config: NSAConfig
    parameters: int
    new_parameters: int
    """Parameters of gates and φ, which the source does not have."""
    reads: dict[AttentionKind, LayerReads]
    tokenizer_problem: str | None
    """Why the source's tokenizer cannot be read here; it was copied as data."""


def convert_folder(
    folder: Path,
    out: Path,
    options: ConversionOptions | None = None,
    *,
    overwrite: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_tensor: OnTensor = lambda done, total: None,
) -> ConvertedModel:
    """Write the model of `folder` as a converted folder; raises CheckpointError or ConfigError and writes nothing.

    Without options a dense model gets the defaults. A model of flash-linear-attention is sparse already and takes none.
    """
    with new_folder(out, may_replace=is_export if overwrite else lambda folder: False) as staging:
        source = open_source(folder)
        model = source.model
        config = converted_config(model, options)
        reader = SourceTokenizer(folder, config.vocab_size)
        if reader.tokenizer is not None:
            config.eos_token_id = _ends(config.eos_token_id, reader.tokenizer.eos_id)
        weights = read_source(source, on_tensor)
        new = _new_tensors(folder, config, weights)
        converted = ConvertedModel(
            architecture=model.architecture,
            config=config,
            parameters=sum(tensor.numel() for tensor in (*weights.tensors.values(), *new.values())),
            new_parameters=sum(tensor.numel() for tensor in new.values()),
            reads=layer_reads(config, model.kinds),
            tokenizer_problem=reader.problem,
        )
        record = ConversionRecord(
            architecture=model.architecture,
            config=source.config_text,
            dtype=str(weights.dtype).removeprefix("torch."),
            tensors=weights.hashes,
            files=copy_source_files(folder, staging, tokenizer_is_read=reader.tokenizer is not None),
            options={} if model.is_sparse else asdict(options or ConversionOptions()),
            version=__version__,
        )
        record.write(staging)
        exported = ExportedModel(folder, config, {}, reader.tokenizer, None)
        for name, text in _recipe_files(run_config(exported), config.vocab_size, has_new=bool(new)).items():
            (staging / name).write_text(text, encoding="utf-8")
        config.architectures, config.dtype = [ARCHITECTURE], weights.dtype
        config.save_pretrained(staging)
        if not (staging / GENERATION_CONFIG).exists():
            ends = config.eos_token_id
            pad = ends[0] if isinstance(ends, list) else ends
            GenerationConfig(eos_token_id=ends, pad_token_id=pad).save_pretrained(staging)
        card = _card_lines(record, config, converted.reads, converted.parameters, reader.tokenizer is not None)
        (staging / CARD).write_text("\n".join(card) + "\n", encoding="utf-8")
        write_weights(dict(sorted((weights.tensors | new).items())), staging, shard_bytes)
    return converted


def _new_tensors(folder: Path, config: NSAConfig, weights: SourceWeights) -> dict[str, Tensor]:
    """First values of the parameters that the source does not have: gates of kind `tanh`, and φ that is the mean."""
    model = meta_model(folder, config, len(weights.hashes))
    names = [name for name, _ in model.named_parameters()]  # of tied embeddings one
    assert weights.tensors.keys() <= set(names), "every tensor of the source has a place in the converted model"
    new = {}
    for name in sorted(set(names) - weights.tensors.keys()):
        within, _, own = name.rpartition(".")
        module = model.get_submodule(within)
        if module._parameters[own].is_meta:
            module.to_empty(device="cpu", recurse=False)
            init_module(within, module)
        new[name] = module._parameters[own].detach().to(weights.dtype)
    return new


def _ends(eos_ids: int | list[int] | None, end: int) -> int | list[int]:
    """Ids that end a document, the tokenizer's included."""
    ids = [] if eos_ids is None else [eos_ids] if isinstance(eos_ids, int) else list(eos_ids)
    ids = ids if end in ids else [*ids, end]
    return ids[0] if len(ids) == 1 else ids


def _card_lines(
    record: ConversionRecord,
    config: NSAConfig,
    reads: Mapping[AttentionKind, LayerReads],
    parameters: int,
    has_tokenizer: bool,
) -> Iterator[str]:
    """README.md of a converted folder: its source, how far it computes the same, how to load it."""
    yield from ("---", "library_name: transformers", "pipeline_tag: text-generation", "license: unknown")
    yield from ("tags:", "- native-sparse-attention", "---", "")
    yield from (f"# {record.architecture}, converted to sparse attention", "")
    yield f"Converted by `nsa convert` (nsa-train {record.version}) and not trained since. {_equality(reads)}"
    yield (
        f"`{CONVERSION}` holds the source's config.json and the hashes of its tensors: `nsa convert FOLDER OUT "
        f"--to-dense` writes the source's format back. The licence is that of the source."
    )
    yield from ("", "## Load", "", *how_to_load(remote_code=False), "## Model", "")
    yield from card_table(
        {
            "parameters": f"{parameters:,}, {record.dtype}",
            "layers, width, heads, key/value groups": f"{config.num_hidden_layers}, {config.hidden_size}, "
            f"{config.num_attention_heads}, {config.num_key_value_heads}",
            "blocks l, d, l_sel, n_sel, w": f"{config.l}, {config.d}, {config.l_sel}, {config.n_sel}, {config.w}",
            "context of the source": f"{config.max_position_embeddings:,} tokens",
            "vocabulary": f"{config.vocab_size:,} ids, " + ("with its tokenizer" if has_tokenizer else "no tokenizer"),
        }
    )
    yield from ("", "## Layers", "", "| kind | layers | keys read at the end of the context | compressed keys scored |")
    yield "|---|---|---|---|"
    for kind, each in reads.items():
        yield f"| {kind} | {each.layers} | {each.keys:,} | {each.scored:,} |"


def _equality(reads: Mapping[AttentionKind, LayerReads]) -> str:
    if (covered := covered_tokens(reads)) is None:
        return "It computes what the source computes."
    return (
        f"Up to {covered:,} tokens it computes what the source computes; beyond, a token reads the blocks it selects, "
        f"and training is needed for long texts."
    )


# Settings of the runs that follow.


def _recipe_files(config: RunConfig, vocab_size: int, *, has_new: bool) -> dict[str, str]:
    """Text of each file by its name. `has_new`: whether the model has parameters that its source does not have."""
    healing = _sections(config, vocab_size) | {"train": _HEALING}
    files = {RUN_CONFIG: _HEALING_HEAD.format(origin="RUNS/warmup" if has_new else "OUT") + yaml.safe_dump(healing)}
    if has_new:
        files[WARMUP_CONFIG] = _WARMUP_HEAD + yaml.safe_dump(_warmup(config, vocab_size))
    return files


def _warmup(config: RunConfig, vocab_size: int) -> dict[str, Any]:
    gated, learned = "nsa" in config.model.attention, config.attention.compression.operator.has_weights
    trainable = ["*.phi_k.*"] * learned + ["*.gates.*"] * gated + ["*.phi_v.*"] * (gated and learned)
    sections = _sections(config, vocab_size)
    if learned:
        sections["nsa"] = {**sections.get("nsa", {}), "selector_loss": 1.0, "selector_blocks": "all"}
    rate = _GATE_RATE if gated else _PHI_RATE
    train = {"trainable": trainable, "lr": rate, "lr_schedule": "constant", "weight_decay": 0.0}
    return sections | {"train": train}


def _sections(config: RunConfig, vocab_size: int) -> dict[str, Any]:
    """The sections of a config file that describe the model; settings at their defaults are left out."""
    model = config.model.model_dump(mode="json", exclude_defaults=True) | {"vocab_size": vocab_size}
    nsa = config.nsa.model_dump(mode="json", exclude_defaults=True)
    return {"model": model} | ({"nsa": nsa} if nsa else {})


# Back to the format of the source.


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
        write_weights(dict(sorted(source.items())), staging, shard_bytes)
    return DenseExport(
        architecture=record.architecture,
        tensors=len(source),
        unchanged=unchanged,
        dropped=dict(Counter(name.removeprefix("model.layers.").partition(".")[2] for name in sorted(tensors))),
        dtype=str(next(iter(source.values())).dtype).removeprefix("torch."),
        source_dtype=record.dtype,
        missing_files=missing,
    )


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
