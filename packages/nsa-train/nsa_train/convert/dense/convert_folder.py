"""`nsa convert`: writes a dense model of Transformers as an exported folder whose layers are sparse.

The weights stay bit for bit what they were. Up to the length that selection and window cover, the converted model
computes what the dense one computes; beyond, a query reads the selected blocks and the window only.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor
from transformers import GenerationConfig

from nsa import __version__
from nsa.core.init import init_module
from nsa.hf.configuration import NSAConfig
from nsa.options import AttentionKind
from nsa_train.convert.dense.conversion_plan import (
    ConversionOptions,
    LayerReads,
    converted_config,
    covered_tokens,
    layer_reads,
)
from nsa_train.convert.dense.conversion_record import CONVERSION, ConversionRecord
from nsa_train.convert.dense.copied_files import GENERATION_CONFIG, SourceTokenizer, copy_source_files
from nsa_train.convert.dense.healing_recipe import recipe_files
from nsa_train.convert.dense.source_folder import OnTensor, SourceWeights, open_source, read_source
from nsa_train.convert.export_folder import ARCHITECTURE, CARD, DEFAULT_SHARD_BYTES, is_export
from nsa_train.convert.import_folder import ExportedModel, run_config
from nsa_train.convert.model_card import card_table, how_to_load
from nsa_train.convert.output_folder import new_folder
from nsa_train.convert.weight_files import meta_model, write_weights


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
        for name, text in recipe_files(run_config(exported), config.vocab_size, has_new=bool(new)).items():
            (staging / name).write_text(text, encoding="utf-8")
        config.architectures, config.dtype = [ARCHITECTURE], weights.dtype
        config.save_pretrained(staging)
        if not (staging / GENERATION_CONFIG).exists():
            _generation_config(config).save_pretrained(staging)
        card = _card_lines(record, config, converted.reads, converted.parameters, reader.tokenizer is not None)
        (staging / CARD).write_text("\n".join(card) + "\n", encoding="utf-8")
        for path in write_weights(dict(sorted((weights.tensors | new).items())), staging, shard_bytes):
            shutil.copymode(staging / CARD, path)  # safetensors makes private files
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


def _generation_config(config: NSAConfig) -> GenerationConfig:
    ends = config.eos_token_id
    return GenerationConfig(eos_token_id=ends, pad_token_id=ends[0] if isinstance(ends, list) else ends)


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
