"""Storage of the KV cache: pages of a pool, the table of each row's pages, rings of slots, and the one-thread lock.

The table is on the host, in integers: no tensor is read. A page may belong to several rows (after `reorder`); it is
copied before one of them writes to it (copy-on-write).

B batch · S new tokens · N tokens read · G kv groups · X width
"""

from collections.abc import Sequence
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.errors import ConfigError
from nsa.kernels.interface import KeyPages


class PageCopies(NamedTuple):
    """Pages to be copied, from `source[i]` to `target[i]`, and pages to be cleared: kernels multiply what they do not
    see by 0, and what an earlier row left there may be infinite."""

    source: list[int]
    target: list[int]
    cleared: list[int]


class PageTable:
    """The block table [batch, pages per row], the free pages, and how many rows use each page.

    n_pages: of the pool. None: enough for every row; each row then has all its pages from the start, in order, so that
        its tokens can be read as one tensor and appending needs no allocation until rows are reordered.
    """

    def __init__(
        self, batch: int, pages_per_row: int, page_tokens: int, n_pages: int | None, device: torch.device
    ) -> None:
        self.page_tokens, self.pages_per_row = page_tokens, pages_per_row
        self.reserved = n_pages is None
        self.n_pages = batch * pages_per_row if n_pages is None else n_pages
        # Two pages more: zeros, where a row has no page; and where writes that must not happen go, which is never read.
        self._blank, self.spare = self.n_pages, self.n_pages + 1
        self.n_stored = self.n_pages + 2
        self.table_BP = torch.full((batch, pages_per_row), self._blank, dtype=torch.int32, device=device)
        self._rows: list[list[int]] = [[] for _ in range(batch)]
        self._users = [0] * self.n_pages
        self._free = list(range(self.n_pages))[::-1]
        self.in_order = False
        """Whether row i has the pages from i · pages_per_row on, in order."""
        if self.reserved:
            self._reserve_in_order()

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, begin: Sequence[int], end: Sequence[int]) -> PageCopies:
        """Give every row pages of its own for the tokens from `begin` to `end`; the pages to copy to that end.

        Rows get a page's worth more than they ask for if there are enough, so that rows of different lengths ask for
        more at the same step. Refused, with nothing changed, if the pool has too few pages.
        """
        size = self.page_tokens
        most = self.pages_per_row * size
        for ahead in (size, 0):
            wanted = [min(most, n + ahead) if n > at else 0 for at, n in zip(begin, end, strict=True)]
            left: dict[int, int] = {}  # rows that still use a page when those before have copied it
            needs = [self._missing(row, at, n, left) for row, (at, n) in enumerate(zip(begin, wanted, strict=True))]
            needed = sum(len(need) for need in needs)
            if needed <= self.n_free:
                break
        else:
            raise ConfigError(
                f"the cache's pool has {self.n_pages} pages of {size} tokens, {self.n_free} of them free, and {needed} "
                f"more are needed. End rows with reset([…]) or crop them, or make the cache with "
                f"pages={self.n_pages + needed - self.n_free} or more."
            )
        copies = PageCopies([], [], [])
        placed: tuple[list[int], list[int], list[int]] = ([], [], [])
        for row, need in enumerate(needs):
            mine = self._rows[row]
            for number in need:
                page = self._free.pop()
                self._users[page] = 1
                if number < len(mine):
                    copies.source.append(mine[number])
                    copies.target.append(page)
                    self._users[mine[number]] -= 1
                    mine[number] = page
                else:
                    mine.append(page)
                    copies.cleared.append(page)
                for at, value in zip(placed, (row, number, page), strict=True):
                    at.append(value)
        if placed[0]:
            at_row, at_number, pages = (torch.tensor(at, device=self.table_BP.device) for at in placed)
            self.table_BP[at_row, at_number] = pages.to(torch.int32)
            self.in_order = False
        return copies

    def release(self, row: int, length: int) -> None:
        """Return the pages past the row's first `length` tokens; a row keeps those reserved for it."""
        mine, n_kept = self._rows[row], self._pages_of(length)
        if self.reserved and all(self._users[page] == 1 for page in mine[n_kept:]):
            return
        for page in mine[n_kept:]:
            self._drop(page)
        if mine[n_kept:]:
            self.table_BP[row, n_kept : len(mine)] = self._blank
        del mine[n_kept:]

    def release_all(self) -> None:
        if self.reserved:
            if not self.in_order:
                self._reserve_in_order()
            return
        for row in range(len(self._rows)):
            self.release(row, 0)

    def reorder(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Row i gets the pages of row rows[i], which has lengths[rows[i]] tokens. Nothing is copied."""
        if list(rows) == list(range(len(self._rows))):
            return
        before = self._rows
        self._rows = [
            mine if i == row else before[row][: self._pages_of(lengths[row])]
            for i, (row, mine) in enumerate(zip(rows, before, strict=True))
        ]
        # What another row uses too is shared; past its tokens a row may have pages that no other row may use.
        for i, row in enumerate(rows):
            if i != row:
                for page in self._rows[i]:
                    self._users[page] += 1
        for i, row in enumerate(rows):
            if i != row:
                for page in before[i]:
                    self._drop(page)
        device = self.table_BP.device
        index = torch.tensor(list(rows), device=device)
        owned_B1 = torch.tensor([len(mine) for mine in self._rows], device=device)[:, None]
        is_owned_BP = torch.arange(self.pages_per_row, device=device) < owned_B1
        self.table_BP.copy_(torch.where(is_owned_BP, self.table_BP.index_select(0, index), self._blank))
        self.in_order = False

    def headroom(self, lengths: Sequence[int]) -> int:
        """Tokens that can be appended to every row without taking pages."""
        size = self.page_tokens

        def of_row(mine: list[int], length: int) -> int:
            number, used = divmod(length, size)
            may_write = not used or (number < len(mine) and self._users[mine[number]] == 1)
            return len(mine) * size - length if may_write else 0

        return min(of_row(mine, length) for mine, length in zip(self._rows, lengths, strict=True))

    def adopt(self, other: "PageTable", rows: Sequence[int], lengths: Sequence[int]) -> PageCopies:
        """Become, from empty, a table whose row i holds what `other` holds in row rows[i]: the pages to copy there.

        lengths: of the rows of `other`. Pages that rows share there are shared here, unless all are reserved.
        """
        if self.reserved:
            used = [(i, row, self._pages_of(lengths[row])) for i, row in enumerate(rows)]
            return PageCopies(
                [page for _, row, n in used for page in other._rows[row][:n]],
                [page for i, _, n in used for page in self._rows[i][:n]],
                [],
            )
        mine_of: dict[int, int] = {}
        needed = {page for row in rows for page in other._rows[row][: self._pages_of(lengths[row])]}
        if len(needed) > self.n_free:
            raise ConfigError(
                f"the pool has {self.n_pages} pages and {len(needed)} are needed for the rows that it takes over. "
                f"Make the cache with pages={len(needed)} or more."
            )
        for i, row in enumerate(rows):
            for page in other._rows[row][: self._pages_of(lengths[row])]:
                if page not in mine_of:
                    mine_of[page] = self._free.pop()
                self._users[mine_of[page]] += 1
                self._rows[i].append(mine_of[page])
            self.table_BP[i, : len(self._rows[i])] = torch.tensor(self._rows[i], dtype=torch.int32)
        return PageCopies(list(mine_of), list(mine_of.values()), [])

    def _reserve_in_order(self) -> None:
        for row in range(len(self._rows)):
            begin = row * self.pages_per_row
            self._rows[row] = list(range(begin, begin + self.pages_per_row))
        self._users, self._free, self.in_order = [1] * self.n_pages, [], True
        self.table_BP.copy_(torch.arange(self.n_pages, dtype=torch.int32).view(self.table_BP.shape))

    def _pages_of(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_tokens)

    def _missing(self, row: int, begin: int, end: int, left: dict[int, int]) -> list[int]:
        """Numbers of the pages that the row must be given to write the tokens from `begin` to `end`."""
        mine, pages = self._rows[row], []
        for number in range(begin // self.page_tokens, self._pages_of(end)):
            if number < len(mine):
                page = mine[number]
                left[page] = left.get(page, self._users[page]) - 1
                if not left[page]:  # no other row uses it
                    continue
            pages.append(number)
        return pages

    def _drop(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            self._free.append(page)


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
        return ExclusiveUse, ()  # a copy belongs to its owner


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
        """Slots while the rows' pages are in order. A pool that has not enough pages for that: the sizes alone."""
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
        """Pages as a decoder reads them."""
        k, v = self.both
        if isinstance(k, PagedSlots):
            return KeyPages(k.pages(), v.pages(), k.table.table_BP)
        table_B1 = torch.arange(len(k.data), dtype=torch.int32, device=k.data.device)[:, None]
        return KeyPages(k.pages(), v.pages(), table_B1)
