"""Refuses to resume with settings that the checkpoint was not saved with, except those that may change.

Which settings may change is said in the schema (`Changeable`) and listed in docs/CONFIG.md. Values are compared as they
take effect: a width left to its default equals the same width written down.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.checkpoint.run_state import RunRecord
from nsa.config.describe import may_change_on_resume, plain
from nsa.config.layer import flatten
from nsa.config.schema import RunConfig, default_ffn_dim, settings
from nsa.data.rows.specs import RowData
from nsa.errors import ConfigError, DataError
from nsa.train import datasets

VOCAB_SIZE = "vocab_size"
"""In `RunRecord.more`: what `model.vocab_size` came to."""
_VOCAB_KEY, _FFN_KEY = "model.vocab_size", "model.ffn_dim"


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
    """Everything that differs, in the order of the schema. A setting newer than the checkpoint had its default then."""
    defaults = {key: field.default for key, field in settings().items()}
    saved, now = defaults | flatten(record.config), flatten(config.model_dump(mode="json"))
    saved_vocab_size = record.more.get(VOCAB_SIZE) or saved[_VOCAB_KEY]
    if saved_vocab_size is not None:  # not in checkpoints of earlier versions, whose data cursor names the tokenizer
        saved[_VOCAB_KEY], now[_VOCAB_KEY] = saved_vocab_size, vocab_size
    if None in (widths := (saved[_FFN_KEY], now[_FFN_KEY])) and widths != (None, None):
        for values in (saved, now):
            values[_FFN_KEY] = values[_FFN_KEY] or default_ffn_dim(values["model.dim"])
    return [SettingChange(key, saved[key], now.get(key)) for key in saved if saved[key] != now.get(key)]


def require_same_settings(checkpoint: Path, config: RunConfig, vocab_size: int) -> list[SettingChange]:
    """Raise with every setting that may not change; returns those that may, and did."""
    changes = changed_settings(RunRecord.read(checkpoint), config, vocab_size)
    if refused := [change for change in changes if not change.allowed]:
        back = " ".join(f"{change.key}={plain(change.saved)}" for change in refused)
        raise ConfigError(
            "\n".join(
                [
                    f"{checkpoint} was saved with other settings, which may not change on resume (docs/CONFIG.md): its "
                    f"weights would be used in another model, or its place in the data would mean other data.",
                    *(f"  - {change}" for change in refused),
                    f"Set them back ({back}), or start a new run in another train.out_dir.",
                ]
            )
        )
    return changes


def require_same_data(checkpoint: Path, config: RunConfig, data: RowData, changes: list[SettingChange]) -> None:
    """Raise unless the saved place in the data means the same rows. Data may have moved, so its content decides.

    Listing a large remote source takes long, so one that is named as before is left to the loader, which also checks.
    """
    cursor: Mapping[str, Any] | None = RunRecord.read(checkpoint).data_cursor.get("cursor")
    named_as_before = not any(change.key in ("data.path", "data.tokenizer") for change in changes)
    if cursor is None or (named_as_before and datasets.remote_address(config)):
        return
    try:
        data.open().load_state_dict(dict(cursor))
    except (ConfigError, DataError) as error:
        raise type(error)(f"{checkpoint} cannot be resumed with {data}: {error}") from error
