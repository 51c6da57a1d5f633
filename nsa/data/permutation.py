"""A shuffled order that is computed, not stored: a keyed bijection of [0, n).

An alternating Feistel network permutes the next power of two, and values that land at or above n are sent through it
again until they fall inside (cycle walking; fewer than two passes on average). The state is (n, seed, epoch), any
position can be asked for directly, and the answer knows nothing of ranks. `order.py` lists a whole permutation, which
suits the few thousand units of a stream; trillions of tokens need this one.
"""

import numpy as np

from nsa.errors import ConfigError

MAX_ROWS = 2**62
_ROUNDS = 6
_SMALLEST_BITS = 6  # below 64 values the halves are too narrow to mix; walk inside 64 instead
_MASK64 = 2**64 - 1


def mix64(value: int) -> int:
    """The splitmix64 finaliser: every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """One 64-bit key from several integers; (1, 2) and (2, 1) differ."""
    key = 0
    for part in parts:
        key = mix64(key ^ mix64(part & _MASK64))
    return key


def _mix_array(values: np.ndarray, key: int) -> np.ndarray:
    x = values ^ np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """A bijection of [0, n) chosen by `key`; exact for n up to 2**62."""

    def __init__(self, n: int, key: int) -> None:
        if not 0 < n <= MAX_ROWS:
            raise ConfigError(f"a shuffled order needs 1 to 2**62 rows, got {n}. Check that the data is not empty.")
        self.n = n
        bits = max((n - 1).bit_length(), _SMALLEST_BITS)
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = [derive_key(key, i) for i in range(_ROUNDS)]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The row at each position of the shuffled order."""
        return self._walk(positions, forward=True)

    def inverse(self, rows: np.ndarray) -> np.ndarray:
        """The position at which each row comes."""
        return self._walk(rows, forward=False)

    def _walk(self, values: np.ndarray, *, forward: bool) -> np.ndarray:
        start = np.asarray(values)
        assert start.size == 0 or (start.min() >= 0 and start.max() < self.n), "position outside the order"
        if self.n == 1:
            return np.zeros(start.shape, dtype=np.int64)
        result = self._pass(start.astype(np.uint64).reshape(-1), forward)
        outside = np.flatnonzero(result >= self.n)
        while outside.size:
            result[outside] = self._pass(result[outside], forward)
            outside = outside[result[outside] >= self.n]
        return result.astype(np.int64).reshape(start.shape)

    def _pass(self, values: np.ndarray, forward: bool) -> np.ndarray:
        low = values & self._low_mask
        high = values >> self._low_bits
        for i in range(_ROUNDS) if forward else reversed(range(_ROUNDS)):
            if i % 2 == 0:
                high = high ^ (_mix_array(low, self._keys[i]) & self._high_mask)
            else:
                low = low ^ (_mix_array(high, self._keys[i]) & self._low_mask)
        return (high << self._low_bits) | low


class WindowedOrder:
    """Shuffles blocks of neighbouring rows, then rows inside a window of several blocks.

    A plain permutation touches every shard within a few batches; from a remote store behind a cache that is smaller
    than the data, each row would fetch a whole shard. Here only `window_blocks` blocks are in use at a time, and the
    order stays a bijection. The last, shorter block keeps the last place, so every other place holds a full block.
    """

    def __init__(self, n: int, key: int, *, block_rows: int, window_blocks: int) -> None:
        if block_rows < 1 or window_blocks < 1:
            raise ConfigError(
                f"block_rows is {block_rows} and window_blocks {window_blocks}: both must be at least 1. Raise them."
            )
        self.n = n
        self._key = key
        self._block_rows = block_rows
        self._window_blocks = window_blocks
        self._window_rows = block_rows * window_blocks
        self._full_blocks = n // block_rows
        self._blocks = Permutation(self._full_blocks, derive_key(key, 1)) if self._full_blocks else None

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        places = np.asarray(positions, dtype=np.int64)
        windows = places // self._window_rows
        rows = np.empty_like(places)
        for window in np.unique(windows).tolist():
            chosen = windows == window
            start = window * self._window_rows
            inside = Permutation(min(self._window_rows, self.n - start), derive_key(self._key, 2, window))
            shuffled = inside(places[chosen] - start)
            blocks = window * self._window_blocks + shuffled // self._block_rows
            if self._blocks is not None:
                full = blocks < self._full_blocks
                blocks[full] = self._blocks(blocks[full])
            rows[chosen] = blocks * self._block_rows + shuffled % self._block_rows
        return rows
