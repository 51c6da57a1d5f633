"""Reads files of an exported folder, which may come from anyone: regular files of limited size, strict JSON."""

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from nsa.errors import CheckpointError
from nsa.files import open_regular

LARGEST_JSON_BYTES = 16 << 20


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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; numbers are finite and no key is given twice."""
    raw = read_bytes(path, LARGEST_JSON_BYTES)
    try:
        values = json.loads(raw, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise CheckpointError(f"{path} is not JSON ({error}).") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}, not an object.")
    return values


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text:.20} is not a finite number")


def _finite(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key is given twice")
    return values
