"""Reads and writes folders of models: regular files of limited size, strict JSON, a new folder at once."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from nsa.errors import CheckpointError, OutputError
from nsa.files import fsync_path, fsync_tree, open_regular, temporary_path

CONFIG, TOKENIZER_CONFIG, CHAT_TEMPLATE = "config.json", "tokenizer_config.json", "chat_template.jinja"
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


def read_chat_template(folder: Path) -> str | None:
    """The chat template of an exported folder; None if it has none."""
    if (folder / CHAT_TEMPLATE).exists():
        return read_bytes(folder / CHAT_TEMPLATE, LARGEST_JSON_BYTES).decode("utf-8", "replace")
    if not (folder / TOKENIZER_CONFIG).exists():
        return None
    template = read_json(folder / TOKENIZER_CONFIG).get("chat_template")
    return template if isinstance(template, str) else None


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


def require_fields(values: Mapping[str, Any], expected: Mapping[str, Any], where: object) -> None:
    """Refuse a record with other fields than these, or with one of another type; None stands for itself."""
    for key in values.keys() | expected.keys():
        kinds = expected.get(key, ())
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        value = values.get(key)
        if key not in values or not any(type(value) is kind or value is kind is None for kind in kinds):
            raise CheckpointError(f"{where} has {key}={value!r:.80}: it is not a record of this version.")


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text:.20} is not a finite number")


def _finite(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key is given twice")
    return values


@contextmanager
def new_folder(out: Path, *, may_replace: Callable[[Path], bool] = lambda folder: False) -> Iterator[Path]:
    """Yield an empty hidden folder that is renamed to `out` at the end; on an error `out` stays as it was.

    `out` must not exist, or be empty, or be one that `may_replace` accepts.
    """
    require_replaceable(out, may_replace)
    out = out.absolute()
    staging, former = temporary_path(out), temporary_path(out)
    try:
        staging.mkdir(parents=True)
        yield staging
        fsync_tree(staging)
        require_replaceable(out, may_replace)
        if out.exists():
            os.rename(out, former)
        os.rename(staging, out)
        fsync_path(out.parent)
    except BaseException:
        if former.exists() and not out.exists():
            os.rename(former, out)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def require_replaceable(out: Path, may_replace: Callable[[Path], bool]) -> None:
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_dir():
        raise OutputError(f"{out} is not a folder: nothing is written there. Name a new folder.")
    if any(out.iterdir()) and not may_replace(out):
        raise OutputError(
            f"{out} is not empty: nothing in it is changed. Name a new folder, or add --overwrite, which replaces an "
            "earlier export and nothing else."
        )
