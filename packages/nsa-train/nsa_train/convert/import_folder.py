"""`nsa import hf`: reads an exported folder, which may come from anyone, and writes it as a checkpoint of ours.

Only JSON and safetensors are read, with limits, and every tensor must have the name, shape and type that config.json
implies. Code, pickles and `auto_map` in the folder are ignored: nothing in it is executed.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dist_cp
from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError
from torch import Tensor

from nsa.errors import CheckpointError, ConfigError
from nsa.hf.configuration import NSAConfig
from nsa.hf.weight_names import EMBEDDING, HEAD, from_transformers
from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.checkpoint.manifest import LAST
from nsa_train.checkpoint.run_state import TOKENIZER_RECORD, VOCAB_SIZE, RunRecord
from nsa_train.checkpoint.save import HashingWriter
from nsa_train.checkpoint.save_plan import SharedSavePlanner
from nsa_train.config.schema import RunConfig
from nsa_train.convert.export_folder import ARCHITECTURE, model_settings
from nsa_train.convert.folder_files import CONFIG, new_folder, read_json, require_plausible_numbers
from nsa_train.convert.tokenizer_files import read_tokenizer_files
from nsa_train.convert.training_record import TRAINING_RECORD, TrainingRecord
from nsa_train.convert.weight_files import read_weights
from nsa_train.data.tokenizer import Tokenizer, tokenizer_record


@dataclass(frozen=True)
class ExportedModel:
    """A folder in Transformers' format whose parts were checked against each other."""

    path: Path
    config: NSAConfig
    tensors: dict[str, Tensor]
    """Tensors by the names of `NSAForCausalLM`; of tied embeddings only one."""
    tokenizer: Tokenizer | None
    record: TrainingRecord | None
    """Record of the training; None if the folder was not written by `nsa export hf`."""


def open_exported(folder: Path) -> ExportedModel:
    """Read and check an exported folder; raises CheckpointError or ConfigError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Name one that `nsa export hf` or Transformers wrote.")
    config = read_config(folder)
    record = None
    if os.path.lexists(folder / TRAINING_RECORD):
        record = TrainingRecord.parse(read_json(folder / TRAINING_RECORD), folder / TRAINING_RECORD)
    tokenizer = read_tokenizer_files(folder)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if tokenizer is not None and (tokenizer.vocab_size > config.vocab_size or tokenizer.eos_id not in ends):
        raise CheckpointError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids and ends documents with {tokenizer.eos_id}, "
            f"{CONFIG} says {config.vocab_size} and {config.eos_token_id}. Use the tokenizer the model was trained "
            f"with."
        )
    return ExportedModel(folder, config, read_weights(folder, config), tokenizer, record)


def read_config(folder: Path) -> NSAConfig:
    """config.json, checked like the settings of a run. What it says about code and files is not used."""
    values = read_json(folder / CONFIG)
    if values.get("model_type") != NSAConfig.model_type or values.get("architectures") not in (None, [ARCHITECTURE]):
        raise CheckpointError(
            f"{folder / CONFIG} describes {values.get('model_type')!r:.60} {values.get('architectures')!r:.60}: only "
            f"folders of {ARCHITECTURE} (model_type {NSAConfig.model_type!r}) are read."
        )
    known = {*NSAConfig.names(), "vocab_size", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
    arguments = {key: value for key, value in values.items() if key in known}
    require_plausible_numbers(arguments, folder / CONFIG)
    try:
        return NSAConfig(**arguments)
    except (StrictDataclassError, ConfigError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{folder / CONFIG} does not describe a model ({error}).") from error


def import_folder(folder: Path, out: Path, *, key: bytes | None = None) -> ExportedModel:
    """Write an exported folder as a run folder with one checkpoint, without optimizer state, signed with `key`.

    `nsa train --init-from`, `nsa export hf`, `nsa generate` and `nsa checkpoint` read it like any other.
    """
    exported = open_exported(folder)
    config = run_config(exported)
    tensors = from_transformers(exported.tensors)
    if exported.config.tie_word_embeddings:
        tensors |= from_transformers({HEAD: exported.tensors[EMBEDDING]})
    more: dict[str, Any] = {VOCAB_SIZE: exported.config.vocab_size}
    if exported.tokenizer is not None:
        more[TOKENIZER_RECORD] = tokenizer_record(exported.tokenizer)
    if exported.record is not None:
        more[TRAINING_RECORD] = exported.record.as_dict()
    step = exported.record.step if exported.record is not None else 0
    with new_folder(out) as staging:
        checkpoints = CheckpointFolder(staging / names.CHECKPOINTS, key=key)
        saving = checkpoints.begin(step)
        writer = HashingWriter(saving)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing process group
            dist_cp.save({"model": tensors}, storage_writer=writer, planner=SharedSavePlanner(), no_dist=True)
        RunRecord(step, 1, config.model_dump(mode="json"), {}, more=more).write(saving)
        if exported.tokenizer is not None:
            (saving / names.TOKENIZER).write_text(exported.tokenizer.to_json(), encoding="utf-8")
        checkpoints.commit(step, LAST, writer.hashes)
    return exported


def run_config(exported: ExportedModel) -> RunConfig:
    """Settings of a run with this model: config.json decides about the model, the training record about the rest."""
    config = exported.config
    if config.qk_norm and config.qk_norm_eps != config.rms_norm_eps:
        raise CheckpointError(
            f"{exported.path / CONFIG} has qk_norm_eps {config.qk_norm_eps} and rms_norm_eps {config.rms_norm_eps}: a "
            f"run has one epsilon for both. Import a model where they are equal."
        )
    recorded: Mapping[str, Any] = exported.record.settings if exported.record is not None else {}
    try:
        settings = RunConfig.model_validate(dict(recorded)).model_dump(mode="json")  # refuses unknown settings
        settings |= model_settings(config)
        settings["train"]["seq_len"] = config.max_position_embeddings
        return RunConfig.model_validate(settings)
    except (ValidationError, ConfigError, RecursionError) as error:
        raise CheckpointError(f"{exported.path} holds settings that no run can have ({error}).") from error
