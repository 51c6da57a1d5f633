"""Decoder interface: one new token per row over a KV cache, offered by a backend beside its four functions.

It is built once per cache, because at batch 1 describing the cache takes as long as attending over it.

B batch · n slots · G kv groups · R heads per group · K key dim · V value dim · N chosen blocks
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

Keys = tuple[Tensor, Tensor, Tensor, Tensor]
"""A branch's keys and values [B, n, G, K or V], where the newest token stands on that axis, where position 0 lies."""


class CacheView(NamedTuple):
    """A cache's own tensors: they are written in place and never replaced."""

    tail: tuple[Tensor, Tensor]
    """Rings of the last l raw tokens, from which compressed entries are made."""
    compressed: Keys
    selected: Keys
    window: Keys
    """A ring of the last w tokens."""
    length_B: Tensor
    n_compressed_B: Tensor


class TokenDecoder(Protocol):
    """Made from a cache, the number of heads per group, whether compressed entries are plain means of the tail
    (`means`: then the decoder may emit them itself), the geometry and the scale."""

    @property
    def append(self) -> Callable[[tuple[Tensor, ...]], bool] | None:
        """Appends one new token per row (keys and values of the compressed, selected and window branch, [B, 1, G, K or
        V]), advances lengths and positions; true if a row now ends a compressed block that the cache has to emit.
        Raises for tokens of another shape or device, and for rows without room. None: the cache appends by itself.
        """

    def attend(self, q_B1GRK: Tensor, gates_B1GR3: Tensor) -> tuple[Tensor, Tensor]:
        """The three branches mixed by the gates, [B, 1, G, R, V], and the chosen blocks, [B, 1, G, N]."""
