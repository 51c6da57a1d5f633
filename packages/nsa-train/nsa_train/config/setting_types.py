"""Types of settings (counts, tokens, steps, seconds), their description as text, and the base class of sections."""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo


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


def _read_weights(value: Any) -> Any:
    """Text such as `{sets/web: 0.7, sets/code: 0.3}`, as a command line gives it, as a mapping."""
    if not isinstance(value, str) or not (value.startswith("{") and value.endswith("}")):
        return value
    pairs = (part.rpartition(":") for part in value[1:-1].split(",") if part.strip())
    return {name.strip().strip("\"'"): weight.strip() for name, _, weight in pairs}


WEIGHTS = BeforeValidator(_read_weights)
"""A mapping of names to numbers; a command line may write it in YAML's way."""


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


def may_change_on_resume(field: FieldInfo) -> bool:
    return any(isinstance(m, MayChangeOnResume) for m in _metadata(field.annotation, field.metadata))


def kind(field: FieldInfo) -> str:
    """Type and limits of a value as text: 'a whole number ≥ 1', 'one of bf16, fp16, fp32'."""
    return _kind(field.annotation, list(field.metadata))


def unit(field: FieldInfo) -> str:
    """The unit of a number, or '' if it has none."""
    return next((m.name for m in _metadata(field.annotation, field.metadata) if isinstance(m, SettingUnit)), "")


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The options of an enumerated setting, or () for any other field."""
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def plain(value: Any) -> str:
    """A value as it is written in a config."""
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return plain(value[0]) if len(value) == 1 else f"[{', '.join(map(plain, value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _metadata(annotation: Any, metadata: list[Any]) -> Iterator[Any]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)
    if get_origin(annotation) is Annotated:
        base, *inner = get_args(annotation)
        yield from _metadata(base, inner)
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _metadata(part, [])


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_SIGNS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def _kind(annotation: Any, metadata: list[Any]) -> str:
    if get_origin(annotation) is Annotated:
        base, *inner = get_args(annotation)
        return _kind(base, metadata + inner)
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _kind(part, metadata) for part in get_args(annotation))
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(get_args(annotation))
    if looks := next((item for item in metadata if isinstance(item, ValueDescription)), None):
        return looks.words
    limits = [
        f"{sign} {limit if isinstance(limit, int) else format(limit, 'g')}"
        for item in _metadata(None, metadata)
        for name, sign in _SIGNS
        if (limit := getattr(item, name, None)) is not None
    ]
    return " ".join([_WORDS[annotation], " and ".join(limits)]).strip()
