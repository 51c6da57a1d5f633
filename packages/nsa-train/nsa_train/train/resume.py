"""Decides which checkpoint to resume from, or to take weights from, and refuses settings or data of another run.

Settings that may change on resume are marked in the schema (`Changeable`) and listed in docs/CONFIG.md. Values are
compared as they take effect: a width left to its default equals the same width written down.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nsa.errors import CheckpointError, ConfigError, DataError
from nsa.geometry import default_ffn_dim
from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFinding
from nsa_train.checkpoint.run_state import TOKENIZER_RECORD, VOCAB_SIZE, RunRecord
from nsa_train.checkpoint.trained_model import TrainedModel, open_trained_model
from nsa_train.config.layer import flatten
from nsa_train.config.schema import VALUES_BEFORE, RunConfig, settings
from nsa_train.config.setting_types import as_json, may_change_on_resume, plain
from nsa_train.data.rows.specs import RowData
from nsa_train.train import datasets
from nsa_train.train.engine.checkpointer import VerifiedCheckpointer
from nsa_train.train.start_options import StartOptions, is_exported_folder

_VOCAB_KEY, _FFN_KEY = "model.vocab_size", "model.ffn_dim"


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint a run resumes from, if any, and the newer ones that were rejected."""

    path: Path | None
    step: int
    passed_over: tuple[CheckpointFinding, ...] = ()


def find_resume_point(checkpointer: VerifiedCheckpointer, checkpoints: Path, options: StartOptions) -> ResumePoint:
    """The checkpoint to start from, the same on all ranks. Collective."""
    resume_from = options.resume_from
    if resume_from is not None and names.step_of(resume_from.resolve().name) is not None:
        path = resume_from.resolve()
        return ResumePoint(path, names.step_of(path.name) or 0)
    if resume_from is not None:
        inside = resume_from / names.CHECKPOINTS
        checkpoints = inside if inside.is_dir() else resume_from
    elif not options.resume:
        return ResumePoint(None, 0)
    checkpoint = checkpointer.find_resumable(checkpoints)
    if checkpoint.path is None and (resume_from is not None or checkpoint.passed_over):
        why = "; ".join(str(finding) for finding in checkpoint.passed_over) or "there is none"
        raise CheckpointError(
            f"{checkpoints} holds no checkpoint to resume from ({why}). Start a new run in another train.out_dir, or "
            f"give --resume-from a good one."
        )
    return ResumePoint(checkpoint.path, checkpoint.step or 0, checkpoint.passed_over)


@dataclass(frozen=True)
class SettingChange:
    key: str
    saved: Any
    now: Any

    @property
    def allowed(self) -> bool:
        return self.key in settings() and may_change_on_resume(settings()[self.key])

    def __str__(self) -> str:
        now = plain(self.now) if self.key in settings() else "unknown to this version"
        return f"{self.key}: saved {plain(self.saved)}, now {now}"


def changed_settings(record: RunRecord, config: RunConfig, vocab_size: int) -> list[SettingChange]:
    """All differences, in the order of the schema. A setting newer than the checkpoint counts as its default,
    or as what was done before."""
    defaults = {key: as_json(field.default) for key, field in settings().items()} | VALUES_BEFORE
    saved, now = defaults | flatten(record.config), flatten(config.model_dump(mode="json"))
    saved_vocab_size = record.more.get(VOCAB_SIZE) or saved[_VOCAB_KEY]
    if saved_vocab_size is not None:  # not in checkpoints of earlier versions, whose data cursor names the tokenizer
        saved[_VOCAB_KEY], now[_VOCAB_KEY] = saved_vocab_size, vocab_size
    if None in (widths := (saved[_FFN_KEY], now[_FFN_KEY])) and widths != (None, None):
        for values in (saved, now):
            values[_FFN_KEY] = values[_FFN_KEY] or default_ffn_dim(values["model.dim"])
    return [SettingChange(key, saved[key], now.get(key)) for key in saved if saved[key] != now.get(key)]


class WeightImporter(Protocol):
    """Writes an exported folder as a run folder with one checkpoint: `nsa_train.convert.import_folder`, which this
    package does not import, so that training does not need Transformers."""

    def __call__(self, folder: Path, out: Path, *, key: bytes | None) -> object: ...


def find_initial_weights(
    init_from: Path,
    config: RunConfig,
    vocab_size: int,
    key: bytes | None,
    scratch: Path,
    importer: WeightImporter | None = None,
) -> tuple[Path, list[SettingChange]]:
    """The checkpoint whose weights a new run starts with, and the settings of the model that differ. On one rank.

    An exported folder is imported into `scratch` first. Weights trained with another tokenizer than that of the data
    are refused. Other shapes are refused when the weights are loaded; other settings may be wanted, e.g. for a longer
    context.
    """
    if is_exported_folder(init_from):
        if importer is None:
            raise CheckpointError(
                f"{init_from} is a folder in Transformers' format: this run starts from checkpoints. Import it with "
                f"`nsa import hf {init_from} OUT` and give OUT instead."
            )
        importer(init_from, scratch, key=key)
        trained = open_trained_model(scratch, key=key)
    else:
        trained = open_trained_model(init_from, key=key)
    _require_same_tokenizer(init_from, trained, config)
    changes = changed_settings(trained.record, config, vocab_size)
    of_model = [change for change in changes if change.key.startswith(("model.", "nsa."))]
    return trained.path, [change for change in of_model if not change.allowed]


def _require_same_tokenizer(init_from: Path, trained: TrainedModel, config: RunConfig) -> None:
    """Raise if the data was tokenized with another tokenizer than the weights were trained with, if both are known."""
    saved, now = trained.record.more.get(TOKENIZER_RECORD), datasets.data_tokenizer_record(config)
    if not isinstance(saved, dict) or now is None or saved.get("fingerprint") == now["fingerprint"]:
        return
    source = init_from if (init_from / names.TOKENIZER).exists() else trained.path
    raise ConfigError(
        f"the weights of {init_from} were trained with a tokenizer of {saved.get('vocab_size')} ids (fingerprint "
        f"{str(saved.get('fingerprint'))[:16]}…), the data has one of {now['vocab_size']} ids (fingerprint "
        f"{now['fingerprint'][:16]}…): the same ids mean other text. Prepare the text with the tokenizer of the "
        f"weights: nsa data prepare SRC OUT --tokenizer {source / names.TOKENIZER}"
    )


def require_same_settings(checkpoint: Path, config: RunConfig, vocab_size: int) -> list[SettingChange]:
    """Raise with every changed setting that may not change on resume; return the other changes."""
    changes = changed_settings(RunRecord.read(checkpoint), config, vocab_size)
    if refused := [change for change in changes if not change.allowed]:
        back = " ".join(f"{change.key}={plain(change.saved)}" for change in refused)
        raise ConfigError(
            "\n".join(
                [
                    f"{checkpoint} was saved with other settings, which may not change on resume (docs/CONFIG.md): its "
                    f"weights would be used in another model, or its data cursor would mean other data.",
                    *(f"  - {change}" for change in refused),
                    f"Set them back ({back}), or start a new run in another train.out_dir.",
                ]
            )
        )
    return changes


def require_same_data(checkpoint: Path, config: RunConfig, data: RowData, changes: list[SettingChange]) -> None:
    """Raise unless the saved data cursor means the same rows. Data may have moved, so its content decides.

    Listing a large remote source takes long, so one with an unchanged name is left to the loader, which also checks.
    """
    cursor: Mapping[str, Any] | None = RunRecord.read(checkpoint).data_cursor.get("cursor")
    same_name = not any(change.key in ("data.path", "data.mixture", "data.tokenizer") for change in changes)
    if cursor is None or (same_name and datasets.remote_address(config)):
        return
    try:
        data.open().load_state_dict(dict(cursor))
    except (ConfigError, DataError) as error:
        raise type(error)(f"{checkpoint} cannot be resumed with {data}: {error}") from error
