"""Shuffling order: stateless seeded permutations of [0, n), computed from (n, seed, epoch) and never stored.

Both orders are part of the on-disk format. A data cursor saved before an upgrade must mean the same documents
after it, so neither uses a random generator of a library (NumPy does not promise the same shuffle in its next release)
and neither depends on the machine or the number of ranks. Both are built on SplitMix64 (Steele, Lea, Flood 2014).

- `seeded_permutation` lists the whole order by sorting n random keys: used by the direct document stream, which
  shuffles a few thousand units or rows at a time.
- `feistel_permutation` computes any position on demand (a Feistel network) in constant memory: used for the rows of
  prepared sets, where n can reach 2**62.

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


def feistel_permutation(n: int, key: int, positions: np.ndarray) -> np.ndarray:
    """The rows at these positions of the order of [0, n) that `key` selects: a bijection, exact for n up to 2**62.

    An alternating Feistel network permutes the next power of two; values at or above n go through it again until they
    fall inside (cycle walking, fewer than two passes on average).
    """
    if not 0 < n <= _MAX_ROWS:
        raise ConfigError(f"a shuffled order needs 1 to 2**62 rows, got {n}. Check that the data is not empty.")
    start = np.asarray(positions)
    assert start.size == 0 or (start.min() >= 0 and start.max() < n), "position outside the order"
    if n == 1:
        return np.zeros(start.shape, dtype=np.int64)
    bits = max((n - 1).bit_length(), _SMALLEST_BITS)
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
    round_keys = [np.uint64(derive_key(key, i)) for i in range(_ROUNDS)]

    def permute(values: np.ndarray) -> np.ndarray:
        low, high = values & low_mask, values >> low_bits
        for i, round_key in enumerate(round_keys):
            if i % 2 == 0:
                high = high ^ (_finalize(low ^ round_key) & high_mask)
            else:
                low = low ^ (_finalize(high ^ round_key) & low_mask)
        return (high << low_bits) | low

    result = permute(start.astype(np.uint64).reshape(-1))
    outside = np.flatnonzero(result >= n)
    while outside.size:
        result[outside] = permute(result[outside])
        outside = outside[result[outside] >= n]
    return result.astype(np.int64).reshape(start.shape)
