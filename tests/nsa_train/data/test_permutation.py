import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.errors import ConfigError
from nsa_train.data.permutation import (
    _MAX_ROWS,
    derive_key,
    feistel_permutation,
    seeded_permutation,
)


@given(n=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_every_row_comes_exactly_once(n: int, key: int) -> None:
    rows = feistel_permutation(n, key, np.arange(n))
    assert np.array_equal(np.sort(rows), np.arange(n))


@pytest.mark.parametrize("n", [_MAX_ROWS, _MAX_ROWS - 1, 2**61 + 12345, 2**32, 2**32 + 1, 7_324_218_750])
def test_huge_orders_are_exact_at_both_ends(n: int) -> None:
    places = np.concatenate([np.arange(1000), np.arange(n - 1000, n, dtype=np.int64)])
    rows = feistel_permutation(n, 42, places)
    assert rows.min() >= 0
    assert rows.max() < n
    assert len(np.unique(rows)) == len(places)


def test_one_position_gives_what_the_whole_order_gives() -> None:
    whole = feistel_permutation(997, 3, np.arange(997))
    assert [int(feistel_permutation(997, 3, np.asarray([i]))[0]) for i in range(997)] == whole.tolist()


def test_orders_of_different_keys_are_unrelated() -> None:
    n = 4096
    orders = [feistel_permutation(n, derive_key(7, epoch), np.arange(n)) for epoch in range(8)]
    for i in range(8):
        for j in range(i):
            assert (orders[i] == orders[j]).sum() < 12  # 1 expected by chance


def test_neighbours_are_spread_evenly() -> None:
    """The first tenth of the rows is spread evenly: each tenth of the order gets a fair part (chi-square, 9
    degrees)."""
    n = 100_000
    places = np.flatnonzero(feistel_permutation(n, 11, np.arange(n)) < n // 10)
    counts = np.histogram(places, bins=10, range=(0, n))[0]
    expected = n / 100
    assert ((counts - expected) ** 2 / expected).sum() < 28  # 0.1 % of fair orders exceed this


@pytest.mark.parametrize("n", [0, -1, _MAX_ROWS + 1])
def test_impossible_sizes_are_refused(n: int) -> None:
    with pytest.raises(ConfigError):
        feistel_permutation(n, 0, np.arange(0))


def digest(rows: np.ndarray) -> str:
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()[:16]


# Fixed values: saved data cursors point into these orders, so a run that resumes must compute the same ones.


@pytest.mark.parametrize(
    ("n", "key", "expected"),
    [
        (1, (3,), [0]),
        (8, (11, 1, 0), [3, 1, 4, 5, 0, 2, 6, 7]),
        (12, (0, 1, 0), [6, 3, 1, 5, 4, 0, 8, 2, 7, 9, 10, 11]),
        (12, (7, 2, 3, 41), [6, 2, 10, 9, 7, 1, 11, 4, 5, 3, 0, 8]),
        (9, (-1, 2**64 + 5), [7, 2, 8, 1, 5, 6, 3, 4, 0]),
    ],
)
def test_seeded_permutations_never_change(n: int, key: tuple[int, ...], expected: list[int]) -> None:
    assert seeded_permutation(n, *key).tolist() == expected


def test_a_long_seeded_permutation_never_changes() -> None:
    assert digest(seeded_permutation(5000, 1234, 2, 5, 77)) == "14917bb9f8af30d8"


@pytest.mark.parametrize(
    ("n", "key", "first", "expected_digest"),
    [
        (1, 0, [0], "af5570f5a1810b7a"),
        (10, 0, [6, 2, 1, 8, 3], "514e4d9aab3cf8b1"),
        (64, 5, [54, 5, 39, 53, 34], "6bf00d8e8bf1e827"),
        (97, derive_key(7, 0), [50, 61, 58, 49, 85], "aa78f3eeb9533fbd"),
        (10_000, derive_key(7, 3), [4232, 6361, 1128, 1574, 9151], "1e0d5b6c60c71ba4"),
        (7_324_218_750, derive_key(1234, 2), [4205674617, 5021319638, 4043091499], "c947abecbf4fac78"),
        (2**62, 42, [2975491512553692228, 4117948717734611532], "4e40b9e0e9a1d523"),
    ],
)
def test_feistel_permutations_never_change(n: int, key: int, first: list[int], expected_digest: str) -> None:
    rows = feistel_permutation(n, key, np.arange(min(n, 10_000)))
    assert rows[: len(first)].tolist() == first
    assert digest(rows) == expected_digest


def test_derived_keys_never_change() -> None:
    keys = [derive_key(), derive_key(0), derive_key(7, 0), derive_key(7, 1), derive_key(-1, 2**63)]
    assert keys == [0, 12035550249420947055, 14602521892564604090, 11300706942943552286, 18340498366473823786]


def test_a_seeded_permutation_holds_every_item_once_and_depends_on_the_order_of_its_key() -> None:
    for n in (0, 1, 2, 1000):
        assert sorted(seeded_permutation(n, 5, 6)) == list(range(n))
    assert not np.array_equal(seeded_permutation(100, 1, 2), seeded_permutation(100, 2, 1))
    assert not np.array_equal(seeded_permutation(100, 1, 0), seeded_permutation(100, 1, 1))


def test_seeded_permutations_are_uniform() -> None:
    """Every item lands in every tenth of the order about equally often."""
    places = np.stack([np.argsort(seeded_permutation(50, seed)) for seed in range(2000)])
    counts = np.stack([np.bincount(places[:, i] // 5, minlength=10) for i in range(50)])
    assert np.abs(counts - 200).max() < 75
