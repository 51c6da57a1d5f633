"""Cases of several parameters: for every change as few as cover their values, every night the whole product."""

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[int, ...]
"""The place of each value in its list."""


def each_pair(*values: list[Any]) -> list[Any]:
    """Params of the product; those without the mark `nightly` have every value of each parameter with every other's."""
    return _params(values, 2)


def each_value(*values: list[Any]) -> list[Any]:
    """Params of the product; those without the mark `nightly` have every value of each parameter."""
    return _params(values, 1)


def _params(values: tuple[list[Any], ...], strength: int) -> list[Any]:
    cases = list(product(*map(range, map(len, values))))
    chosen = _covering(cases, strength)
    return [
        pytest.param(
            *(each[place] for each, place in zip(values, case, strict=True)),
            marks=() if case in chosen else pytest.mark.nightly,
        )
        for case in cases
    ]


def _covering(cases: list[Case], strength: int) -> set[Case]:
    """Chosen one by one: the case with the most combinations of `strength` places that no chosen case has."""
    missing = {combination for case in cases for combination in _combinations(case, strength)}
    chosen: set[Case] = set()
    while missing:
        best = max(cases, key=lambda case: sum(combination in missing for combination in _combinations(case, strength)))
        chosen.add(best)
        missing.difference_update(_combinations(best, strength))
    return chosen


def _combinations(case: Case, strength: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Places together with the number of their parameter."""
    return combinations(enumerate(case), strength)
