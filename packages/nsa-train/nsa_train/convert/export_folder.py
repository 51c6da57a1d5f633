"""`nsa export hf`: writes a checkpoint as a folder that Transformers loads (safetensors, config, tokenizer, card).

The checkpoint is verified first and nothing in it is executed. The folder appears complete or not at all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from nsa.errors import CheckpointError, ConfigError
from nsa.hf.configuration import LAYER_OPTIONS, NSAConfig
from nsa.hf.remote_code import AUTO_MAP, remote_code_files
from nsa.hf.weight_names import HEAD, to_transformers
from nsa_train.checkpoint.folder import CheckpointFinding
from nsa_train.checkpoint.trained_model import TrainedModel, open_trained_model
from nsa_train.config.schema import RunConfig
from nsa_train.convert.folder_files import CONFIG, new_folder, read_json
from nsa_train.convert.tokenizer_files import COPIED_FILES, tokenizer_files
from nsa_train.convert.training_record import TRAINING_RECORD, model_card, record_of, require_license
from nsa_train.convert.weight_files import write_weights
from nsa_train.data.tokenizer import Tokenizer, choose_tokenizer

CARD = "README.md"
ARCHITECTURE = "NSAForCausalLM"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_SHARD_BYTES = 5 * 10**9
_MODEL_SETTINGS = {
    "num_hidden_layers": "n_layers",
    "intermediate_size": "ffn_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "post_norm": "post_norm",
    "ffn_bias": "ffn_bias",
    "window": "window",
    "attention": "attention",
    "rope_layers": "rope_layers",
}
"""Settings of `model` beside the options of the attention, by their names in `NSAConfig`."""


def export_folder(
    source: Path,
    out: Path,
    *,
    dtype: str | None = None,
    tokenizer: str | None = None,
    license_name: str | None = None,
    remote_code: bool = False,
    overwrite: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    key: bytes | None = None,
    on_rejected: Callable[[CheckpointFinding], None] = lambda finding: None,
) -> TrainedModel:
    """Export a run's newest good checkpoint, or one checkpoint. Returns what was exported.

    dtype: fp32, bf16 or fp16; default as saved. tokenizer: for checkpoints of earlier versions, which have none:
    `byte` or a tokenizers JSON file. remote_code: add modelling code for machines without this package.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}. Use one of: {', '.join(DTYPES)}.")
    if license_name is not None:
        require_license(license_name)
    with new_folder(out, may_replace=is_export if overwrite else lambda folder: False) as staging:
        trained = open_trained_model(source, key=key, on_rejected=on_rejected)
        _write(trained, staging, dtype, _tokenizer(trained, tokenizer), license_name, remote_code, shard_bytes)
    return trained


def is_export(folder: Path, model_type: str = NSAConfig.model_type) -> bool:
    """Whether a folder holds a model of this type and nothing that an export or a conversion does not write."""
    try:
        if read_json(folder / CONFIG).get("model_type") != model_type:
            return False
    except CheckpointError:
        return False
    suffixes = (".json", ".safetensors", ".py", ".md", ".yaml")
    return all(
        path.is_file() and not path.is_symlink() and (path.suffix in suffixes or path.name in COPIED_FILES)
        for path in folder.iterdir()
    )


def _write(
    trained: TrainedModel,
    folder: Path,
    dtype: str | None,
    tokenizer: Tokenizer | None,
    license_name: str | None,
    remote_code: bool,
    shard_bytes: int,
) -> None:
    tensors = _exported_tensors(trained, None if dtype is None else DTYPES[dtype])
    config = exported_config(trained.config, trained.vocab_size, tokenizer.eos_id if tokenizer else None)
    config.architectures = [ARCHITECTURE]
    config.dtype = next(iter(tensors.values())).dtype
    if remote_code:
        config.auto_map = dict(AUTO_MAP)
        for name, text in remote_code_files().items():
            (folder / name).write_text(text, encoding="utf-8")
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.eos_token_id).save_pretrained(folder)
    if tokenizer is not None:
        for name, text in tokenizer_files(tokenizer, config.max_position_embeddings).items():
            (folder / name).write_text(text, encoding="utf-8")
    record = record_of(trained, license_name)
    card = model_card(
        record,
        config,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        dtype=str(config.dtype).removeprefix("torch."),
        tokenizer=tokenizer,
        remote_code=remote_code,
    )
    (folder / TRAINING_RECORD).write_text(record.to_json(), encoding="utf-8")
    (folder / CARD).write_text("\n".join(card) + "\n", encoding="utf-8")
    write_weights(tensors, folder, shard_bytes)


def _exported_tensors(trained: TrainedModel, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The checkpoint's parameters as an exported folder holds them; of tied embeddings only one."""
    tensors = to_transformers(trained.tensors)
    if trained.config.model.tie_embeddings:
        tensors.pop(HEAD, None)
    return {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in sorted(tensors.items())}


def _tokenizer(trained: TrainedModel, override: str | None) -> Tokenizer | None:
    """The tokenizer of the checkpoint, or `override`; None only for a run whose data had none."""
    tokenizer, data = choose_tokenizer(override, trained.tokenizer()), trained.config.data
    if tokenizer is None and data.dataset == "synthetic":
        return None
    if tokenizer is None:
        raise ConfigError(
            f"{trained.path} was saved without a tokenizer, by an earlier version or from a prepared set of one: the "
            f"export could not read text. Give the tokenizer of its data, e.g. --tokenizer {data.tokenizer}."
        )
    if tokenizer.vocab_size > trained.vocab_size:
        raise ConfigError(
            f"tokenizer {override} has {tokenizer.vocab_size} ids and the model {trained.vocab_size}: ids beyond have "
            f"no embedding. Use the tokenizer of the run's data."
        )
    return tokenizer


# The settings of a run as the config of its model, and back.


def exported_config(config: RunConfig, vocab_size: int, eos_token_id: int | None) -> NSAConfig:
    """The config of a run's model; `model.vocab_size`, if set, wins over the tokenizer's."""
    model, values = config.model, config.attention.options()
    of_model = {name: getattr(model, setting) for name, setting in _MODEL_SETTINGS.items()}
    of_model |= {name: v[0] if len(v) == 1 else list(v) for name, v in of_model.items() if isinstance(v, tuple)}
    return NSAConfig(
        vocab_size=model.vocab_size or vocab_size,
        max_position_embeddings=config.train.seq_len,
        eos_token_id=eos_token_id,
        **of_model | {"intermediate_size": model.ffn_size},
        **{each.exported: values[each.name] for each in LAYER_OPTIONS},
    )


def model_settings(config: NSAConfig) -> dict[str, dict[str, Any]]:
    """Sections `model` and `nsa` of a run with this model; `exported_config` undoes it."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "nsa": {}}
    for each in LAYER_OPTIONS:
        section, _, key = each.setting.partition(".")
        sections[section][key] = getattr(config, each.exported)
    sections["model"] |= {setting: getattr(config, name) for name, setting in _MODEL_SETTINGS.items()}
    sections["model"]["rope_scaling"] = config.rope_scaling or {}
    return sections
