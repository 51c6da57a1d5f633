"""`nsa export hf`: writes a checkpoint as a folder that Transformers loads (safetensors, config, tokenizer, card).

The checkpoint is verified first and nothing in it is executed. The folder appears complete or not at all.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig

from nsa.errors import CheckpointError, ConfigError
from nsa.hf.configuration import NSAConfig
from nsa.hf.remote_code import AUTO_MAP, remote_code_files
from nsa.hf.weight_names import HEAD, to_transformers
from nsa_train.checkpoint.folder import CheckpointFinding
from nsa_train.checkpoint.trained_model import TrainedModel, open_trained_model
from nsa_train.convert.dense.copied_files import COPIED_FILES
from nsa_train.convert.folder_files import read_json
from nsa_train.convert.model_card import model_card
from nsa_train.convert.model_settings import exported_config
from nsa_train.convert.output_folder import new_folder
from nsa_train.convert.tokenizer_files import tokenizer_files
from nsa_train.convert.training_record import TRAINING_RECORD, record_of, require_license
from nsa_train.convert.weight_files import write_weights
from nsa_train.data.saved_tokenizer import choose_tokenizer
from nsa_train.data.tokenizer import Tokenizer

CONFIG = "config.json"
CARD = "README.md"
ARCHITECTURE = "NSAForCausalLM"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_SHARD_BYTES = 5 * 10**9


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
    (folder / CARD).write_text(card, encoding="utf-8")
    for path in write_weights(tensors, folder, shard_bytes):
        shutil.copymode(folder / CARD, path)  # safetensors makes private files


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
