"""Storage of the KV cache: preallocated slots and rings with a spare slot for padding, and the one-thread lock.

B batch · S new tokens · N tokens read · G kv groups · X width
"""

from collections.abc import Sequence
from threading import RLock

import torch
from torch import Tensor

from nsa.errors import ConfigError


class ExclusiveUse:
    """`with cache.exclusive:` one thread at a time; another one is refused rather than kept waiting.

    A cache holds one continuation of its rows: tokens of two threads would mix, and the compiled kernels keep addresses
    of the step that is running. The same thread may enter again.
    """

    __slots__ = ("_acquire", "_release")

    def __init__(self) -> None:
        lock = RLock()
        self._acquire, self._release = lock.acquire, lock.release

    def __enter__(self) -> None:
        if not self._acquire(False):
            raise ConfigError(
                "the cache is in use by another thread: it holds one continuation, which two threads would mix. "
                "Give each thread a cache of its own (new_cache, or copy.deepcopy of this one)."
            )

    def __exit__(self, *_: object) -> None:
        self._release()

    def __reduce__(self) -> tuple[type["ExclusiveUse"], tuple[()]]:
        return ExclusiveUse, ()  # a copy belongs to whoever made it


class CacheSlots:
    """n addressable slots and a spare one where writes that must not happen go: [B, G, n + 1, X].

    A group's slots lie next to each other, because a group is what attends over them.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.n = data.shape[2] - 1
        self._row_B1 = torch.arange(data.shape[0], device=data.device)[:, None]

    def content(self) -> Tensor:
        """[B, n, G, X], in place."""
        return self.data[:, :, : self.n].transpose(1, 2)

    def write(self, slot_BS: Tensor, keep_BS: Tensor, x_BSGX: Tensor) -> None:
        self.data.transpose(1, 2)[self._row_B1, torch.where(keep_BS, slot_BS, self.n)] = x_BSGX.to(self.data.dtype)

    def write_ring(self, pos_BS: Tensor, end_B1: Tensor, x_BSGX: Tensor) -> None:
        """Keep the last n tokens before `end`: two tokens never land in one slot, so order does not matter."""
        self.write(pos_BS % self.n, (pos_BS < end_B1) & (pos_BS >= end_B1 - self.n), x_BSGX)

    def last(self, count: int, length_B: Tensor) -> Tensor:
        """The `count` tokens before position `length` of a ring, oldest first; zeros or leftovers before position 0."""
        slot_BN = (length_B[:, None] - count + torch.arange(count, device=length_B.device)) % self.n
        return self.data.transpose(1, 2)[self._row_B1, slot_BN]


class KeySlots:
    """Slots of a branch's keys and values."""

    def __init__(self, data_k: Tensor, data_v: Tensor) -> None:
        self.both = CacheSlots(data_k), CacheSlots(data_v)
        self.n = self.both[0].n

    def content(self) -> tuple[Tensor, Tensor]:
        k, v = self.both
        return k.content(), v.content()

    def write(self, slot_BS: Tensor, keep_BS: Tensor, new: Sequence[Tensor]) -> None:
        for slots, x_BSGX in zip(self.both, new, strict=True):
            slots.write(slot_BS, keep_BS, x_BSGX)

    def write_ring(self, pos_BS: Tensor, end_B1: Tensor, new: Sequence[Tensor]) -> None:
        for slots, x_BSGX in zip(self.both, new, strict=True):
            slots.write_ring(pos_BS, end_B1, x_BSGX)

    def last(self, count: int, length_B: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.both
        return k.last(count, length_B), v.last(count, length_B)

    def refill(self, past: "KeySlots", length_B: Tensor) -> None:
        """A ring's last tokens before the rows' lengths, from another ring: as many as both can hold."""
        n = min(self.n, past.n)
        pos_BS = length_B[:, None] - n + torch.arange(n, device=length_B.device)
        self.write(pos_BS % self.n, pos_BS >= 0, past.last(n, length_B))
