import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.data.permutation import MAX_ROWS, Permutation, WindowedOrder, derive_key
from nsa.errors import ConfigError


@given(n=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_every_row_comes_exactly_once(n: int, key: int) -> None:
    order = Permutation(n, key)
    rows = order(np.arange(n))
    assert np.array_equal(np.sort(rows), np.arange(n))
    assert np.array_equal(order.inverse(rows), np.arange(n))


@given(
    n=st.integers(1, 300),
    key=st.integers(0, 2**64 - 1),
    block_rows=st.integers(1, 60),
    window_blocks=st.integers(1, 9),
)
@settings(max_examples=40, deadline=None)
def test_windowed_order_is_a_bijection_too(n: int, key: int, block_rows: int, window_blocks: int) -> None:
    order = WindowedOrder(n, key, block_rows=block_rows, window_blocks=window_blocks)
    assert np.array_equal(np.sort(order(np.arange(n))), np.arange(n))


def test_windowed_order_uses_few_blocks_at_a_time_but_moves_everything() -> None:
    order = WindowedOrder(10_000, 5, block_rows=100, window_blocks=4)
    rows = order(np.arange(10_000))
    for start in range(0, 10_000, 400):
        assert len(np.unique(rows[start : start + 400] // 100)) <= 4
    assert (rows == np.arange(10_000)).mean() < 0.01


@pytest.mark.parametrize("n", [MAX_ROWS, MAX_ROWS - 1, 2**61 + 12345, 2**32, 2**32 + 1, 7_324_218_750])
def test_huge_orders_are_exact_at_both_ends(n: int) -> None:
    order = Permutation(n, 42)
    places = np.concatenate([np.arange(1000), np.arange(n - 1000, n, dtype=np.int64)])
    rows = order(places)
    assert rows.min() >= 0
    assert rows.max() < n
    assert len(np.unique(rows)) == len(places)
    assert np.array_equal(order.inverse(rows), places)


def test_one_position_gives_what_the_whole_order_gives() -> None:
    order = Permutation(997, 3)
    whole = order(np.arange(997))
    assert [int(order(np.asarray([i]))[0]) for i in range(997)] == whole.tolist()


def test_orders_of_different_keys_are_unrelated() -> None:
    n = 4096
    orders = [Permutation(n, derive_key(7, epoch))(np.arange(n)) for epoch in range(8)]
    for i in range(8):
        for j in range(i):
            assert (orders[i] == orders[j]).sum() < 12  # 1 expected by chance


def test_neighbours_are_spread_evenly() -> None:
    """Where the first tenth of the rows lands: each tenth of the order gets a fair part (chi-square, 9 degrees)."""
    n = 100_000
    places = Permutation(n, 11).inverse(np.arange(n // 10))
    counts = np.histogram(places, bins=10, range=(0, n))[0]
    expected = n / 100
    assert ((counts - expected) ** 2 / expected).sum() < 28  # 0.1 % of fair orders exceed this


@pytest.mark.parametrize("n", [0, -1, MAX_ROWS + 1])
def test_impossible_sizes_are_refused(n: int) -> None:
    with pytest.raises(ConfigError, match=r"1 to 2\*\*62 rows"):
        Permutation(n, 0)
