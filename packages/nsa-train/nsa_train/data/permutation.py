"""Shuffling order: stateless seeded permutations of [0, n), computed from (n, seed, epoch) and never stored.

Both orders below are part of the on-disk format. A data cursor saved before an upgrade must mean the same documents
after it, so neither uses a random generator of a library (NumPy does not promise the same shuffle in its next release)
and neither depends on the machine or the number of ranks. Both are built on SplitMix64 (Steele, Lea, Flood 2014).

- `seeded_permutation` lists the whole order by sorting n random keys: used by the direct document stream and the demo
  corpus, which shuffle a few thousand units or rows at a time.
- `FeistelPermutation` computes any position on demand (a Feistel network) in constant memory: used for the rows of
  prepared sets, where n can reach 2**62. `WindowedPermutation` restricts it to a moving window of blocks.

They cannot be merged into one: existing cursors point into both.
"""

import numpy as np

from nsa.errors import ConfigError

_MAX_ROWS = 2**62
_ROUNDS = 6
_SMALLEST_BITS = 6  # below 64 values the halves are too narrow to mix; cycle-walk inside 64 instead
_MASK64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix64(value: int) -> int:
    """One SplitMix64 step: every input bit reaches every output bit."""
    value = (value + _GOLDEN_GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK64
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """One 64-bit key from several integers; (1, 2) and (2, 1) differ."""
    key = 0
    for part in parts:
        key = _mix64(key ^ _mix64(part & _MASK64))
    return key


def _finalize(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function on an array of uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def seeded_permutation(n: int, *key: int) -> np.ndarray:
    """The permutation of `range(n)` selected by `key`, as int64. The same integers in another order are another key."""
    state = 0  # not derive_key, which mixes each part once more: existing cursors fix this formula
    for part in key:
        state = _mix64(state ^ (part & _MASK64))
    random_keys = _finalize(np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN_GAMMA) + np.uint64(state))
    return np.argsort(random_keys, kind="stable")


class FeistelPermutation:
    """A bijection of [0, n) selected by `key`; exact for n up to 2**62.

    An alternating Feistel network permutes the next power of two; values at or above n go through it again until they
    fall inside (cycle walking, fewer than two passes on average).
    """

    def __init__(self, n: int, key: int) -> None:
        if not 0 < n <= _MAX_ROWS:
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
        """The position of each row in the shuffled order."""
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
                high = high ^ (_finalize(low ^ np.uint64(self._keys[i])) & self._high_mask)
            else:
                low = low ^ (_finalize(high ^ np.uint64(self._keys[i])) & self._low_mask)
        return (high << self._low_bits) | low


class WindowedPermutation:
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
        self._blocks = FeistelPermutation(self._full_blocks, derive_key(key, 1)) if self._full_blocks else None

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions, dtype=np.int64)
        windows = positions // self._window_rows
        rows = np.empty_like(positions)
        for window in np.unique(windows).tolist():
            chosen = windows == window
            start = window * self._window_rows
            inside = FeistelPermutation(min(self._window_rows, self.n - start), derive_key(self._key, 2, window))
            shuffled = inside(positions[chosen] - start)
            blocks = window * self._window_blocks + shuffled // self._block_rows
            if self._blocks is not None:
                full = blocks < self._full_blocks
                blocks[full] = self._blocks(blocks[full])
            rows[chosen] = blocks * self._block_rows + shuffled % self._block_rows
        return rows
