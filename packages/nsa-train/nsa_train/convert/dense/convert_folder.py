"""`nsa convert`: writes a dense model of Transformers as an exported folder whose layers are sparse.

The weights stay bit for bit what they were. Up to the length that selection and window cover, the converted model
computes what the dense one computes; beyond, a query reads the selected blocks and the window only.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor
from transformers import GenerationConfig

from nsa import __version__
from nsa.core.init import init_module
from nsa.hf.configuration import NSAConfig
from nsa.options import AttentionKind
from nsa_train.convert.dense.conversion_card import conversion_card
from nsa_train.convert.dense.conversion_plan import ConversionOptions, LayerReads, converted_config, layer_reads
from nsa_train.convert.dense.conversion_record import ConversionRecord
from nsa_train.convert.dense.copied_files import GENERATION_CONFIG, SourceTokenizer, copy_source_files
from nsa_train.convert.dense.healing_recipe import recipe_files
from nsa_train.convert.dense.source_folder import OnTensor, SourceWeights, open_source, read_source
from nsa_train.convert.export_folder import ARCHITECTURE, CARD, DEFAULT_SHARD_BYTES, is_export
from nsa_train.convert.import_folder import ExportedModel, run_config
from nsa_train.convert.output_folder import new_folder
from nsa_train.convert.weight_files import meta_model, write_weights


@dataclass(frozen=True)
class ConvertedModel:
    """What was written."""

    architecture: str
    """Of the source."""
    config: NSAConfig
    parameters: int
    new_parameters: int
    """Of gates and φ, which the source does not have."""
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
        card = conversion_card(
            record, config, converted.reads, parameters=converted.parameters, has_tokenizer=reader.tokenizer is not None
        )
        (staging / CARD).write_text(card, encoding="utf-8")
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
    """Ids that end a document, with the tokenizer's."""
    ids = [] if eos_ids is None else [eos_ids] if isinstance(eos_ids, int) else list(eos_ids)
    ids = ids if end in ids else [*ids, end]
    return ids[0] if len(ids) == 1 else ids


def _generation_config(config: NSAConfig) -> GenerationConfig:
    ends = config.eos_token_id
    return GenerationConfig(eos_token_id=ends, pad_token_id=ends[0] if isinstance(ends, list) else ends)
