"""Value types of settings (counts, tokens, steps, seconds), their annotations, and the base class of sections."""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError


@dataclass(frozen=True)
class SettingUnit:
    """Unit of a number; shown in messages and in docs/CONFIG.md."""

    name: str


@dataclass(frozen=True)
class ValueDescription:
    """Description of a value whose regular expression would not help a user."""

    words: str


@dataclass(frozen=True)
class MayChangeOnResume:
    """Marks a setting that may differ from the one saved in the checkpoint a run resumes from."""


Count = Annotated[int, Field(ge=1)]
Tokens = Annotated[int, Field(ge=1), SettingUnit("tokens")]
Steps = Annotated[int, Field(ge=1), SettingUnit("steps")]
StepsOrNever = Annotated[int, Field(ge=0), SettingUnit("steps, 0 = never")]
Seconds = Annotated[float, Field(gt=0), SettingUnit("seconds")]
Positive = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]

BOOLEAN = TypeAdapter(bool)
"""Reads a boolean as settings of that type do."""


def _read_bool(off: str, on: str) -> BeforeValidator:
    """Accept what a boolean setting accepts, for two of the options: older configs are written so."""

    def read(value: Any) -> Any:
        try:
            return on if BOOLEAN.validate_python(value) else off
        except ValidationError:
            return value

    return BeforeValidator(read)


def _read_list(value: Any) -> Any:
    """Text such as `dense` or `[dense, nsa]`, with or without brackets and quotation marks, as a list."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [part.strip().strip("\"'") for part in bare.split(",")]


TEXT_OR_LIST = BeforeValidator(_read_list)
"""A setting that is one word or a list of words; a config file may write the list in YAML's way."""


OFF_OR_FULL = _read_bool("off", "full")
OFF_OR_ON = _read_bool("off", "on")


def as_json(value: Any) -> Any:
    """A setting's value as a record of a run holds it."""
    return list(value) if isinstance(value, tuple) else value


_T = TypeVar("_T")
Changeable = Annotated[_T, MayChangeOnResume()]
"""A setting that may differ from the checkpoint that a run resumes from. Every other setting may not."""


class ConfigSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)
