"""Checks of single values read from the files of a run folder: a value has the required type and range, or is absent.

A run folder is written by processes that may be killed, on disks that fill up, by other versions, and by anybody with
write access.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_DEEPEST = 16
_LARGEST_NUMBER = 1e100
"""Larger values are not measurements; sums and squares of smaller ones do not overflow."""
_LATEST_TIME = 253_402_300_000.0  # end of the year 9999, the last that datetime supports

T = TypeVar("T")
Check = Callable[[Any], Any]
"""Returns the checked value, or None if it is invalid."""
Parsed = tuple[T | None, bool]
"""The parsed record, if usable, and whether something in the line could not be read."""


def number(value: Any) -> float | None:
    """A number; NaN and infinite values are valid."""
    if type(value) is float and (value != value or -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER or math.isinf(value)):
        return value
    return value if type(value) is int and -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER else None


def amount(value: Any) -> float | None:
    """A finite number that is not negative: seconds, bytes, rates."""
    return value if type(value) in (float, int) and 0 <= value <= _LARGEST_NUMBER else None


def whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def process_id(value: Any) -> int | None:
    """A positive process id: 0 and negative numbers address process groups in kill(2)."""
    return value if type(value) is int and 0 < value < 2**31 else None


def exit_status(value: Any) -> int | None:
    """An exit code, or a negative signal number."""
    return value if type(value) is int and -128 <= value <= 255 else None


def rank_number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1_000_000 else None


def time_stamp(value: Any) -> float | None:
    return value if type(value) in (float, int) and 0 <= value <= _LATEST_TIME else None


def text(value: Any) -> str | None:
    return value if type(value) is str else None


def flag(value: Any) -> bool | None:
    return value if type(value) is bool else None


def texts(value: Any) -> tuple[str, ...] | None:
    return tuple(value) if type(value) is list and all(type(item) is str for item in value) else None


def numbers(value: Any) -> tuple[float, ...] | None:
    if type(value) is not list:
        return None
    for item in value:
        if number(item) is None:
            return None
    return tuple(value)


def wholes(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if type(value) is list and all(whole(item) is not None for item in value) else None


def rows_of_numbers(value: Any) -> tuple[tuple[float, ...], ...] | None:
    if type(value) is not list:
        return None
    rows = []
    for item in value:
        row = numbers(item)
        if row is None:
            return None
        rows.append(row)
    return tuple(rows)


def anything(value: Any) -> Any:
    """A value of any type, up to a nesting depth that readers can traverse."""
    return value if _is_shallow(value) else None


def section(value: Any) -> dict[str, Any] | None:
    return value if type(value) is dict and _is_shallow(value) else None


def fields(
    record: Mapping[str, Any], checks: Mapping[str, Check], required: tuple[str, ...] = ()
) -> Parsed[dict[str, Any]]:
    """The fields that pass their check. Unknown fields (of a later version) and null are left out."""
    values: dict[str, Any] = {}
    damaged = False
    for name, value in record.items():
        check = checks.get(name)
        if check is None or value is None:
            continue
        good = check(value)
        if good is None:
            damaged = True
        else:
            values[name] = good
    for name in required:
        if name not in values:
            return None, True
    return values, damaged


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            item for each in level if isinstance(each, (dict, list))
            for item in (each.values() if isinstance(each, dict) else each)
        ]  # fmt: skip
        if not level:
            return True
    return False
