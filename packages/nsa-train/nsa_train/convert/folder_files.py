"""Reads files of an exported folder, which may come from anyone: regular files of limited size, strict JSON."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from nsa.errors import CheckpointError
from nsa.files import open_regular

LARGEST_JSON_BYTES = 16 << 20
_LARGEST_NUMBER = 2**31
"""Largest size that is accepted in a config.json."""


def read_bytes(path: Path, limit: int) -> bytes:
    try:
        with open_regular(path, follow_links=False) as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): an exported folder holds regular files and no links. Copy a "
            f"folder of links with `cp -rL`."
        ) from error
    if len(raw) > limit:
        raise CheckpointError(f"{path} has more than the {limit} bytes that such a file may have.")
    return raw


def read_text(path: Path, limit: int = LARGEST_JSON_BYTES) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not text ({error}).") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; numbers are finite and no key is given twice."""
    return parse_json(read_text(path), path)


def parse_json(text: str, where: object) -> dict[str, Any]:
    """The object in the text of a JSON file; `where` is its path, for messages."""
    try:
        values = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON ({error}).") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} holds {type(values).__name__}, not an object.")
    return values


def require_plausible_numbers(values: Mapping[str, Any], where: Path) -> None:
    """Refuse sizes of a config.json that no model has, before anything is computed with them."""
    for key, value in values.items():
        if isinstance(value, int | float) and abs(value) > _LARGEST_NUMBER:
            raise CheckpointError(f"{where} has {key!r:.60}={value!r:.40}: no real model has that.")


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text:.20} is not a finite number")


def _finite(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key is given twice")
    return values
