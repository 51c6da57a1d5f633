"""Type, allowed values and unit of a setting as text, for error messages and docs/CONFIG.md."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from nsa_train.config.setting_types import MayChangeOnResume, SettingUnit, ValueDescription


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
