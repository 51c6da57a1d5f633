"""Seeded permutations that never change: not with the library version, the machine or the number of ranks.

NumPy does not promise the same shuffle in its next release, and a cursor saved before an upgrade must mean the same
document after it. So the order is defined here, by SplitMix64 (Steele, Lea, Flood 2014) and a stable sort.
"""

import numpy as np

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def permutation(n: int, *key: int) -> np.ndarray:
    """The permutation of `range(n)` named by `key`, as int64. The same numbers in another order are another key."""
    state = 0
    for part in key:
        state = _mix(state ^ (part & _MASK))
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(state)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")
