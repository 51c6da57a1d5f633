"""Storage of the KV cache: pages and rings of slots with spare ones for padding, and the one-thread lock.

B batch · S new tokens · N tokens read · G kv groups · X width
"""

from collections.abc import Sequence
from threading import RLock

import torch
from torch import Tensor

from nsa.core.page_table import PageCopies, PageTable
from nsa.errors import ConfigError
from nsa.kernels.interface import KeyPages


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
    """n addressable slots per row and a spare one where writes that must not happen go: [B, G, n + 1, X].

    A group's slots lie next to each other, because a group is what attends over them.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.n = data.shape[2] - 1
        self._row_B1 = torch.arange(data.shape[0], device=data.device)[:, None]

    def content(self, n_pages: int | None = None) -> Tensor:
        """[B, n, G, X]."""
        return self.in_place()

    def in_place(self) -> Tensor:
        return self.data[:, :, : self.n].transpose(1, 2)

    def put(self, address: tuple[Tensor, ...], x_BSGX: Tensor) -> None:
        self._tokens()[address] = x_BSGX.to(self.data.dtype)

    def last(self, count: int, length_B: Tensor) -> Tensor:
        """The `count` tokens before position `length` of a ring, oldest first; anything before position 0."""
        slot_BN = (length_B[:, None] - count + torch.arange(count, device=length_B.device)) % self.n
        return self._tokens()[self.address(slot_BN)]

    def reorder(self, index_B: Tensor, used: int) -> None:
        """Replace row i by row index[i], in place."""
        data = self.data[:, :, : min(self.n, used)]
        data.copy_(data.index_select(0, index_B))

    def pick_rows(self, other: "CacheSlots", index_B: Tensor) -> None:
        """Become the rows index[i] of other slots of the same size."""
        torch.index_select(other.data, 0, index_B, out=self.data)

    def copy_pages(self, copies: PageCopies, source: "CacheSlots") -> None:
        """A ring is in no page."""

    def pages(self) -> Tensor:
        """[pages, G, states, X] of `nsa.kernels.interface.KeyPages`: a page per row."""
        return self.data[:, :, : self.n]

    def _tokens(self) -> Tensor:
        return self.data.transpose(1, 2)

    def address(self, slot_BS: Tensor, keep_BS: Tensor | None = None) -> tuple[Tensor, ...]:
        """The index of these slots; where they are not to be kept, of a spare one."""
        return self._row_B1, slot_BS if keep_BS is None else torch.where(keep_BS, slot_BS, self.n)


class PagedSlots(CacheSlots):
    """Slots in pages of a pool: [G, pages, states, X].

    states: slots of a page; n: slots of a row's pages.
    """

    def __init__(self, data: Tensor, table: PageTable) -> None:
        self.data, self.table = data, table
        self.states = data.shape[2]
        self.n = table.pages_per_row * self.states

    def content(self, n_pages: int | None = None) -> Tensor:
        """[B, n, G, X]: in place while the rows' pages are in order, else a copy of the rows' first pages."""
        if self.table.in_order:
            return self.in_place()
        pages_BP = self.table.table_BP[:, :n_pages]
        copied = self.data.index_select(1, pages_BP.flatten())
        n = pages_BP.shape[1] * self.states
        return copied.view(len(self.data), len(pages_BP), n, self.data.shape[-1]).permute(1, 2, 0, 3)

    def in_place(self) -> Tensor:
        """What it is while the rows' pages are in order. A pool that has not enough pages for that: the sizes alone."""
        G, _, _, X = self.data.shape
        if not self.table.reserved:
            return self.data.new_zeros(()).expand(len(self.table.table_BP), self.n, G, X)
        return self.data[:, : self.table.n_pages].view(G, len(self.table.table_BP), self.n, X).permute(1, 2, 0, 3)

    def reorder(self, index_B: Tensor, used: int) -> None:
        """The table is reordered, which serves all that is in pages."""

    def pick_rows(self, other: CacheSlots, index_B: Tensor) -> None:
        """Pages are copied as the tables say, see `copy_pages`."""

    def copy_pages(self, copies: PageCopies, source: CacheSlots) -> None:
        """Copy pages of `source` here, and clear others."""
        at, to, cleared = (torch.tensor(pages, dtype=torch.int64, device=self.data.device) for pages in copies)
        self.data.index_fill_(1, cleared, 0)
        self.data.index_copy_(1, to, source.data.index_select(1, at))

    def last(self, count: int, length_B: Tensor) -> Tensor:
        """Zeros before position 0: there is no page."""
        pos_BN = length_B[:, None] - count + torch.arange(count, device=length_B.device)
        return self._tokens()[self.address(pos_BN.clamp(min=0))].masked_fill(pos_BN[..., None, None] < 0, 0)

    def pages(self) -> Tensor:
        return self.data.transpose(0, 1)

    def _tokens(self) -> Tensor:
        return self.data.flatten(1, 2).transpose(0, 1)

    def address(self, slot_BS: Tensor, keep_BS: Tensor | None = None) -> tuple[Tensor, ...]:
        number_BS = slot_BS // self.states
        page_BS = self.table.table_BP.gather(1, number_BS.clamp(0, self.table.pages_per_row - 1))
        at_BS = (page_BS - number_BS) * self.states + slot_BS
        return (at_BS if keep_BS is None else torch.where(keep_BS, at_BS, self.table.spare * self.states),)


class KeySlots:
    """Slots of a branch's keys and values."""

    def __init__(self, k: CacheSlots, v: CacheSlots) -> None:
        self.both = k, v
        self.n = k.n

    def write(self, slot_BS: Tensor, keep_BS: Tensor, new: Sequence[Tensor]) -> None:
        address = self.both[0].address(slot_BS, keep_BS)
        for slots, x_BSGX in zip(self.both, new, strict=True):
            slots.put(address, x_BSGX)

    def write_ring(self, pos_BS: Tensor, end_B1: Tensor, new: Sequence[Tensor]) -> None:
        """Keep the last n tokens before `end`: two tokens never land in one slot, so order does not matter."""
        self.write(pos_BS % self.n, (pos_BS < end_B1) & (pos_BS >= end_B1 - self.n), new)

    def last(self, count: int, length_B: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.both
        return k.last(count, length_B), v.last(count, length_B)

    def refill(self, past: "KeySlots", length_B: Tensor) -> None:
        """A ring's last tokens before the rows' lengths, from another ring: as many as both can hold."""
        n = min(self.n, past.n)
        pos_BS = length_B[:, None] - n + torch.arange(n, device=length_B.device)
        self.write(pos_BS % self.n, pos_BS >= 0, past.last(n, length_B))

    def pages(self) -> KeyPages:
        """As a decoder reads them."""
        k, v = self.both
        if isinstance(k, PagedSlots):
            return KeyPages(k.pages(), v.pages(), k.table.table_BP)
        table_B1 = torch.arange(len(k.data), dtype=torch.int32, device=k.data.device)[:, None]
        return KeyPages(k.pages(), v.pages(), table_B1)
