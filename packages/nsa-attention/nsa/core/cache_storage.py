"""Tensors of one layer's KV cache: slots of the three branches, the pages that rows share, and the counters.

B batch
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nsa.core.cache_slots import CacheSlots, ExclusiveUse, KeySlots, PagedSlots
from nsa.core.page_table import PageCopies, PageTable
from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.interface import TokenDecoder

MakeDecoder = Callable[..., TokenDecoder]


class LayerStorage:
    """What the cache of one layer holds.

    rewind: `crop` can remove up to this many tokens at any time; it costs copies of w + l + 2 · rewind tokens. Without
        it a row can be cropped only while its rings have lost nothing (see `crop`).
    shared: whether the window's, and the compressed branch's, raw keys and values are those of the selected branch.
    pages: pages of the pool that all rows share; `append` refuses when it has run out of them. None: enough for all.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        batch: int,
        max_len: int,
        n_groups: int,
        d_k: int,
        d_v: int,
        device: torch.device,
        dtype: torch.dtype,
        rewind: int = 0,
        shared: tuple[bool, bool] = (False, False),
        pages: int | None = None,
    ) -> None:
        if batch < 1 or max_len < 1 or rewind < 0 or (pages is not None and pages < 1):
            raise ConfigError(
                f"a cache for {batch} rows of {max_len} tokens with rewind {rewind} and {pages} pages was requested. "
                f"Set batch, max_len and pages to 1 or more, rewind to 0 or more."
            )
        self.geometry, self.max_len, self.dtype = geometry, max_len, dtype
        self.batch, self.n_groups, self.d_k, self.d_v = batch, n_groups, d_k, d_v
        self.rewind, self.shared, self.pages = rewind, shared, pages
        self.exclusive = ExclusiveUse()
        self.page_table = PageTable(batch, geometry.n_blocks(max_len), geometry.l_sel, pages, device)

        def both(*shape: int, widths: tuple[int, int] = (d_k, d_v)) -> tuple[Tensor, Tensor]:
            k, v = (torch.zeros(*shape, width, device=device, dtype=dtype) for width in widths)
            return k, v

        def paged(states: int, widths: tuple[int, int] = (d_k, d_v)) -> KeySlots:
            data = both(n_groups, self.page_table.n_stored, states, widths=widths)
            return KeySlots(*(PagedSlots(x, self.page_table) for x in data))

        def ring(n: int) -> KeySlots:
            return KeySlots(*(CacheSlots(x) for x in both(batch, n_groups, n + 1)))

        selected_states, compressed_states = self._states_per_page()
        self.selected = paged(selected_states)
        self.window = self.selected if shared[0] else ring(geometry.w)
        self.compressed = paged(compressed_states, self._compressed_widths())
        self.tail = self.selected if shared[1] else ring(geometry.l)
        # Longer rings of the same tokens, from which `crop` fills the short ones again.
        self._past_window = None if shared[0] or not rewind else ring(geometry.w + rewind)
        self._past_tail = None if shared[1] or not rewind else ring(geometry.l + rewind)
        self._first_entry = geometry.l // geometry.d - 1  # the slot of compressed entry 0: where its block ends
        self.length_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.device = self.length_B.device
        self.n_compressed_B = torch.zeros_like(self.length_B)
        self._pos_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._window_pos_B1 = torch.zeros_like(self._pos_B1)
        self._highest_B = torch.zeros_like(self.length_B)  # length before the last crop, if it was greater
        self._decoders: dict[MakeDecoder, tuple[dict[str, Any], TokenDecoder]] = {}
        self.prepared: tuple[object, TokenDecoder | None] = (None, None)
        """The module that decoded last with this cache, and its decoder: looking it up at every step takes time."""
        # Kept here so that appending needs no transfer from the device:
        self._longest = 0  # never below the true maximum
        self._headroom = self.page_table.headroom([0] * batch)  # tokens that need no new page, never above the truth

    def _states_per_page(self) -> tuple[int, int]:
        """Slots of a page for the selected branch, and for the compressed branch."""
        return self.geometry.l_sel, self.geometry.l_sel // self.geometry.d

    def _compressed_widths(self) -> tuple[int, int]:
        """Widths of a compressed key and value."""
        return self.d_k, self.d_v

    def n_bytes(self) -> int:
        return sum(slots.data.nbytes for slots in self._all_slots())

    def _all_slots(self) -> Iterator[CacheSlots]:
        """Every stream once, whatever is shared."""
        streams = (self.selected, self.window, self.compressed, self.tail, self._past_window, self._past_tail)
        yield from {id(slots): slots for stream in streams if stream for slots in stream.both}.values()

    def _check_croppable(self, row: int, length: int, highest: int) -> None:
        """Refuse if a ring has overwritten tokens that the row would need again."""
        g = self.geometry
        needs = (
            (self.shared[0], self._past_window or self.window, max(0, length - g.w)),
            (self.shared[1], self._past_tail or self.tail, g.n_compressed(length) * g.d),
        )
        for in_pages, ring, first_needed in needs:
            if not in_pages and first_needed < min(length, highest - ring.n):
                raise ConfigError(
                    f"row {row} cannot be cropped to {length} tokens: it had {highest}, the cache was made with "
                    f"rewind={self.rewind}, and tokens from {first_needed} on that the next ones need are overwritten. "
                    f"Make it with rewind={highest - length} or more, or reset it and run the tokens again."
                )

    def _copy_pages(self, copies: PageCopies, source: "LayerStorage") -> None:
        if any(copies):
            for mine, theirs in ((self.selected, source.selected), (self.compressed, source.compressed)):
                for to, at in zip(mine.both, theirs.both, strict=True):
                    to.copy_pages(copies, at)
