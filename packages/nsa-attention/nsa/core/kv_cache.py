"""Paged KV cache for the three branches: append, crop, reorder, reset.

Rows take pages of l_sel tokens from one pool; a page is a selection block. It holds the selected branch's raw keys and
values, and the compressed entries whose blocks END there: what a page holds depends on no later token, so rows with the
same beginning can share pages. Window: a ring of the last w tokens. Tail: a ring of the last l raw tokens of the
compressed branch, which its next entries need. Branches that share keys and values share slots: then window and tail
are the selected branch's pages. Rows of a batch may have different lengths; padding goes to spare slots.

B batch · S new tokens · G kv groups · X width · E compressed blocks that S tokens may complete
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from nsa.core.branches import AttendedKeys, BranchKeys, BranchStreams
from nsa.core.cache_pages import CacheSlots, ExclusiveUse, KeySlots, PageCopies, PagedSlots, PageTable
from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.custom_operator import custom_operator
from nsa.kernels.interface import CachedKeys, CacheView, NewToken, TokenDecoder, TokenForm

Compress = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_MakeDecoder = Callable[..., TokenDecoder]
_INTEGERS = (torch.int64, torch.int32)
_COUNTERS = ("length_B", "n_compressed_B", "_highest_B")
_CACHES: "WeakValueDictionary[int, LayerCache]" = WeakValueDictionary()
"""By number: an operator takes no Python objects."""
_NUMBERS = count()


class LayerCache:
    """KV cache of one layer, made by `NSAAttention.new_cache`.

    rewind: `crop` can remove up to this many tokens at any time; it costs copies of w + l + 2 · rewind tokens. Without
        it a row can be cropped only while its rings have lost nothing (see `crop`).
    shared: whether the window's, and the compressed branch's, raw keys and values are those of the selected branch.
    pages: pages of the pool that all rows share; `append` refuses when it has run out of them. None: enough for all.
    """

    _pages_tokens = _pages_entries = _entries_have_values = True
    """What layers of a kind keep: all raw tokens, compressed entries, and values of these."""
    _newest_keys: AttendedKeys | None = None

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

        self.selected = paged(geometry.l_sel if self._pages_tokens else 0)
        self.window = self.selected if shared[0] else ring(geometry.w)
        self.compressed = paged(
            geometry.l_sel // geometry.d * self._pages_entries, (d_k, d_v * self._entries_have_values)
        )
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
        self._decoders: dict[_MakeDecoder, tuple[dict[str, Any], TokenDecoder]] = {}
        self.prepared: tuple[object, TokenDecoder | None] = (None, None)
        """The module that decoded last with this cache, and its decoder: looking it up at every step takes time."""
        # Kept here so that appending needs no transfer from the device:
        self._longest = 0  # never below the true maximum
        self._headroom = self.page_table.headroom([0] * batch)  # tokens that need no new page, never above the truth
        self._enroll()

    def n_bytes(self) -> int:
        return sum(slots.data.nbytes for slots in self._all_slots())

    def _all_slots(self) -> Iterator[CacheSlots]:
        """Every stream once, whatever is shared."""
        streams = (self.selected, self.window, self.compressed, self.tail, self._past_window, self._past_tail)
        yield from {id(slots): slots for stream in streams if stream for slots in stream.both}.values()

    def _enroll(self) -> None:
        self.number = next(_NUMBERS)
        _CACHES[self.number] = self

    def positions(self, n_new: int) -> Tensor:
        """Positions of the next n_new tokens: [B, S]."""
        return self.length_B[:, None] + torch.arange(n_new, device=self.length_B.device)

    def append(
        self, new: BranchStreams, new_lens_B: Tensor | None, compress: Compress, decoder: TokenDecoder | None = None
    ) -> AttendedKeys:
        """Append the new tokens; return what the compressed, selected and window branches attend over.

        `new_lens_B`: how many tokens of each row are real (default all); the rest of a row is padding. `decoder` may
        append one token per row faster than is done here.
        """
        with self.exclusive:
            return self.append_held(new, new_lens_B, compress, decoder)

    def append_held(
        self, new: BranchStreams, new_lens_B: Tensor | None, compress: Compress, decoder: TokenDecoder | None = None
    ) -> AttendedKeys:
        """`append` for a caller that holds `exclusive`, or that is being compiled."""
        n_new = new.k_sel.shape[1]
        self._check_new_tokens(new)
        if n_new == 1 and new_lens_B is None and decoder is not None and decoder.append is not None:
            self._check_room(n_new, None)
            if decoder.append(new):
                self._emit_compressed(compress, self.length_B)
            if self.rewind:
                self._append_past(new, self._pos_B1, self.length_B[:, None])
            return self._newest  # for their sizes: the decoder reads the pages
        new_lens_B = None if new_lens_B is None else self._checked_lengths(new_lens_B, n_new)
        self._check_room(n_new, new_lens_B)
        pos_BS = self.positions(n_new)
        end_B1 = (self.length_B + (n_new if new_lens_B is None else new_lens_B))[:, None]
        return self._append_new(new, pos_BS, end_B1, compress, decoder)

    def step(
        self, decoder: TokenDecoder, token: NewToken, form: TokenForm, compress: Compress
    ) -> tuple[Tensor, Tensor]:
        """`TokenDecoder.step`, for a caller that holds `exclusive`: append a token per row and attend."""
        assert decoder.step is not None
        self.count_token()
        emit = None if form.pooling else lambda: self._emit_compressed(compress, self.length_B + 1)
        return decoder.step(token, form, emit)

    @property
    def has_room(self) -> bool:
        """Whether the next token is known to fit, without reading lengths or handing out pages."""
        return self._headroom > 0 and self._longest < self.max_len

    @property
    def counted(self) -> tuple[int, int]:
        """What the host knows without reading lengths: tokens of the longest row, and how many more need no page."""
        return self._longest, self._headroom

    @counted.setter
    def counted(self, counted: tuple[int, int]) -> None:
        self._longest, self._headroom = counted

    def count_token(self) -> None:
        """Count one more token per row on the host: refused, with nothing changed, if there is no room. `step` does it;
        a replayed step leaves it to its caller."""
        self._check_room(1, None)

    def _append_new(
        self, new: BranchStreams, pos_BS: Tensor, end_B1: Tensor, compress: Compress, decoder: TokenDecoder | None
    ) -> AttendedKeys:
        """Write tokens that are known to fit, `end` tokens in each row afterwards, and return what they attend over."""
        n_new, zero_BS = pos_BS.shape[1], torch.zeros_like(pos_BS[:, :1]).expand_as(pos_BS)
        self._append_compressed(new.k_cmp, new.v_cmp, pos_BS, end_B1, compress)
        self.selected.write(pos_BS, pos_BS < end_B1, (new.k_sel, new.v_sel))
        window = self._append_window(new.k_win, new.v_win, pos_BS, end_B1)
        if self.rewind:
            self._append_past(new, pos_BS, end_B1)
        self.length_B += end_B1[:, 0] - self.length_B
        n_pages, inside_BS = self._pages_read(pos_BS)
        if n_new == 1:
            self._pos_B1.copy_(inside_BS)
            if decoder is not None or self.page_table.in_order:
                return self._newest
        k_cmp, v_cmp = (slots.content(n_pages)[:, self._first_entry :] for slots in self.compressed.both)
        k_sel, v_sel = (slots.content(n_pages) for slots in self.selected.both)
        if window is None:
            k_win, v_win = (k_sel, v_sel) if self.shared[0] else (slots.content() for slots in self.window.both)
            window = BranchKeys(k_win, v_win, self._window_pos_B1, zero_BS)
        return BranchKeys(k_cmp, v_cmp, inside_BS, zero_BS), BranchKeys(k_sel, v_sel, inside_BS, zero_BS), window

    def _pages_read(self, pos_BS: Tensor) -> tuple[int, Tensor]:
        """Pages of each row that hold all its tokens, and the positions inside them: padding may stand past their end,
        where there are no keys."""
        n_pages = self.geometry.n_blocks(min(self._longest, self.max_len))
        return n_pages, pos_BS.clamp(max=min(self.max_len, n_pages * self.geometry.l_sel) - 1)

    def decoder(self, make: _MakeDecoder, **sizes: Any) -> TokenDecoder:
        """The decoder that `make` prepares for this cache, made once for these sizes."""
        if make in self._decoders:
            made_for, decoder = self._decoders[make]
            if made_for == sizes:
                return decoder
        zero_B1 = torch.zeros_like(self._pos_B1)
        pages = self.selected.pages()
        remembered = CacheView(
            pages if self.shared[1] else self.tail.pages(),
            CachedKeys(self.compressed.pages(), self._pos_B1, zero_B1 + self._first_entry),
            CachedKeys(pages, self._pos_B1, zero_B1),
            CachedKeys(pages if self.shared[0] else self.window.pages(), self._window_pos_B1, zero_B1),
            self.length_B,
            self.n_compressed_B,
        )
        decoder = make(remembered, **sizes)
        self._decoders[make] = sizes, decoder
        return decoder

    @property
    def _newest(self) -> AttendedKeys:
        """Keys of one new token per row: always the same tensors. While the rows' pages are not in order only
        the sizes of what is in pages count."""
        if self._newest_keys is not None:
            return self._newest_keys
        zero_B1 = torch.zeros_like(self._pos_B1)
        k_cmp, v_cmp = (slots.in_place()[:, self._first_entry :] for slots in self.compressed.both)
        k_sel, v_sel = (slots.in_place() for slots in self.selected.both)
        k_win, v_win = (slots.in_place() for slots in self.window.both)
        newest = (
            BranchKeys(k_cmp, v_cmp, self._pos_B1, zero_B1),
            BranchKeys(k_sel, v_sel, self._pos_B1, zero_B1),
            BranchKeys(k_win, v_win, self._window_pos_B1, zero_B1),
        )
        if not torch.compiler.is_compiling():
            self._newest_keys = newest
        return newest

    def __getstate__(self) -> dict[str, Any]:
        """A copy has tensors of its own, and what was prepared for these does not fit them."""
        return vars(self) | {"_newest_keys": None, "_decoders": {}, "prepared": (None, None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._enroll()

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Empty every row, or these; their pages become free."""
        with self.exclusive:
            if rows is not None:
                ended = self._checked_rows("reset", rows).tolist()
                return self.crop([0 if row in ended else self.max_len for row in range(self.batch)])
            for name in _COUNTERS:
                getattr(self, name).zero_()
            self.page_table.release_all()
            self._longest, self._headroom = 0, self.page_table.headroom([0] * self.batch)

    def crop(self, length: int | Sequence[int] | Tensor) -> None:
        """Keep the first `length` tokens of each row (one number, or one per row); shorter rows stay as they are. A
        negative number removes that many tokens.

        Possible for up to `rewind` tokens, and without it while the rings still hold what the next tokens need: always
        if branches share keys and values, else as long as a row never had more than w tokens (or than the compressed
        branch's tail holds); to length 0 always. Refused otherwise, with nothing changed.
        """
        with self.exclusive:
            after, highest = self.check_crop(length)
            self._highest_B.copy_(torch.tensor([high if n else 0 for high, n in zip(highest, after, strict=True)]))
            self.length_B.copy_(torch.tensor(after))
            self.n_compressed_B.copy_(torch.tensor([self.geometry.n_compressed(n) for n in after]))
            for ring, past in ((self.window, self._past_window), (self.tail, self._past_tail)):
                if past is not None:
                    ring.refill(past, self.length_B)
            for row, keep in enumerate(after):
                self.page_table.release(row, keep)
            self._longest, self._headroom = max(after), self.page_table.headroom(after)

    def check_crop(self, length: int | Sequence[int] | Tensor) -> tuple[list[int], list[int]]:
        """Raise if `crop` would refuse; else the rows' lengths after it, and the longest they have been."""
        before, lengths = self.length_B.tolist(), length.tolist() if isinstance(length, Tensor) else length
        rows = list(lengths) if isinstance(lengths, Sequence) else [lengths] * self.batch
        if len(rows) != self.batch or not all(isinstance(n, int) for n in rows):
            raise ConfigError(f"crop was given {length!r}: it needs a length, or one for each of {self.batch} rows.")
        after = [min(had, n) if n >= 0 else max(0, had + n) for had, n in zip(before, rows, strict=True)]
        highest = [max(pair) for pair in zip(self._highest_B.tolist(), before, strict=True)]
        for row, (had, keep, high) in enumerate(zip(before, after, highest, strict=True)):
            if keep < had:
                self._check_croppable(row, keep, high)
        return after, highest

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Replace row i by row rows[i], as beam search needs it. Rows that were one row share its pages: only rings are
        copied. In place: prepared decoders keep addresses."""
        index_B = self._checked_rows("reorder", rows, self.batch)
        with self.exclusive:
            for slots in self._all_slots():
                slots.reorder(index_B, self._longest)
            lengths, order = self.length_B.tolist(), index_B.tolist()
            self.page_table.reorder(order, lengths)
            self._headroom = self.page_table.headroom([lengths[row] for row in order])
            for name in _COUNTERS:
                counter = getattr(self, name)
                counter.copy_(counter.index_select(0, index_B))

    def grown(self, max_len: int = 0, rewind: int = 0) -> "LayerCache":
        """A cache of the same tokens that holds at least `max_len` and whose `crop` reaches back at least `rewind`,
        though no further than this one's for the tokens it has."""
        cache = self._like(max_len=max(max_len, self.max_len), rewind=max(rewind, self.rewind))
        with self.exclusive:
            cache._take_over(self, range(self.batch))
            rings = (
                (self.shared[0], self.window, self._past_window, cache.window, cache._past_window),
                (self.shared[1], self.tail, self._past_tail, cache.tail, cache._past_tail),
            )
            for in_pages, ring, past, new_ring, new_past in rings:
                if not in_pages:
                    new_ring.refill(ring, self.length_B)
                    if new_past is not None:
                        new_past.refill(past or ring, self.length_B)
            # Longer rings lack what was overwritten before, as if their rows had been longer by the difference.
            if longer := cache.rewind - self.rewind:
                cache._highest_B.copy_(torch.maximum(self._highest_B, self.length_B) + longer)
        return cache

    def picked(self, rows: Sequence[int] | Tensor) -> "LayerCache":
        """A cache whose row i is this one's row rows[i]; a row may be taken several times."""
        index_B = self._checked_rows("picked", rows)
        cache = self._like(batch=len(index_B))
        with self.exclusive:
            for new, old in zip(cache._all_slots(), self._all_slots(), strict=True):
                new.pick_rows(old, index_B)
            cache._take_over(self, index_B.tolist())
        return cache

    def _like(self, **changes: int) -> "LayerCache":
        """An empty cache of the same kind."""
        names = ("batch", "max_len", "n_groups", "d_k", "d_v", "device", "dtype", "rewind", "shared", "pages")
        return type(self)(self.geometry, **{name: getattr(self, name) for name in names} | changes)

    def _take_over(self, other: "LayerCache", rows: Sequence[int]) -> None:
        """Pages and counters of these rows of a cache of the same kind; rings are left to the caller."""
        lengths, index_B = other.length_B.tolist(), torch.tensor(rows, device=self.device)
        self._copy_pages(self.page_table.adopt(other.page_table, rows, lengths), other)
        for name in _COUNTERS:
            getattr(self, name).copy_(getattr(other, name).index_select(0, index_B))
        self._longest = other._longest
        self._headroom = self.page_table.headroom([lengths[row] for row in rows])

    def _append_past(self, new: BranchStreams, pos_BS: Tensor, end_B1: Tensor) -> None:
        for past, x in ((self._past_tail, new[:2]), (self._past_window, new[4:])):
            if past is not None:
                past.write_ring(pos_BS, end_B1, x)

    def _append_compressed(self, k: Tensor, v: Tensor, pos_BS: Tensor, end_B1: Tensor, compress: Compress) -> None:
        g, n_new, before_B1 = self.geometry, pos_BS.shape[1], self.length_B[:, None]
        tail_k, tail_v = self.tail.last(g.l, self.length_B)
        raw_k, raw_v = torch.cat((tail_k, k), 1), torch.cat((tail_v, v), 1)
        block_BE = self.n_compressed_B[:, None] + torch.arange(n_new // g.d + 1, device=pos_BS.device)
        block_pos_BE = block_BE * g.d
        begin_BE = (block_pos_BE - (before_B1 - g.l)).clamp(max=n_new)  # raw_k begins l tokens before the new ones
        complete_BE = block_pos_BE + g.l <= end_B1
        entries = compress(raw_k, raw_v, begin_BE, block_pos_BE)
        self.compressed.write(block_BE + self._first_entry, complete_BE, entries)
        self.n_compressed_B += complete_BE.sum(1)
        if not self.shared[1]:
            self.tail.write_ring(pos_BS, end_B1, (k, v))

    def _emit_compressed(self, compress: Compress, length_B: Tensor) -> None:
        """The entries of blocks that end with the newest of `length` tokens, for the rows where one does."""
        g, zero_B1 = self.geometry, self._newest[0].start_BS
        raw_k, raw_v = self.tail.last(g.l, length_B)
        block_pos_B1 = length_B[:, None] - g.l
        block_B1 = block_pos_B1 // g.d
        complete_B1 = (block_pos_B1 >= 0) & (block_B1 * g.d == block_pos_B1)
        entries = compress(raw_k, raw_v, zero_B1, block_pos_B1)
        self.compressed.write(block_B1 + self._first_entry, complete_B1, entries)
        self.n_compressed_B += complete_B1[:, 0]

    def _append_window(self, k: Tensor, v: Tensor, pos_BS: Tensor, end_B1: Tensor) -> BranchKeys | None:
        """Append and return what the new tokens see of the window; None for one token, which sees all in place."""
        w = self.geometry.w
        # With shared slots the new tokens are already there; those before them are read the same way.
        before = self.window.last(w - 1, self.length_B) if pos_BS.shape[1] > 1 else None
        if not self.shared[0]:
            self.window.write_ring(pos_BS, end_B1, (k, v))
        if before is None:  # the ring is the window, in whatever order it lies
            self._window_pos_B1.copy_(pos_BS.clamp(max=self.window.n - 1))
            return None
        k, v = torch.cat((before[0], k), 1), torch.cat((before[1], v), 1)
        return BranchKeys(k, v, pos_BS, (w - 1 - self.length_B[:, None]).expand_as(pos_BS))

    def _check_room(self, n_new: int, new_lens_B: Tensor | None) -> None:
        """Refuse, with nothing changed, tokens that do not fit; else take the pages that they need."""
        longest = self._longest + n_new
        if longest > self.max_len:  # padding may have made the count too high
            longest = int((self.length_B + (n_new if new_lens_B is None else new_lens_B)).max())
        if longest > self.max_len:
            raise ConfigError(
                f"the cache holds {self.max_len} tokens and {longest} are needed: it never grows. "
                f"Make it with max_len={longest} or more."
            )
        if torch.compiler.is_compiling() and not self.page_table.in_order:
            pools = [slots.data for stream in (self.selected, self.compressed) for slots in stream.both]
            _take_pages(self.number, n_new, new_lens_B, self.length_B, self.page_table.table_BP, pools)
        else:
            self._reserve(n_new, new_lens_B)
        self._longest = longest

    def _reserve(self, n_new: int, new_lens_B: Tensor | None) -> None:
        if n_new > self._headroom:
            self._take_pages(n_new, new_lens_B)
        self._headroom -= n_new

    def _take_pages(self, n_new: int, new_lens_B: Tensor | None) -> None:
        """Pages for the next tokens of every row: those of reordered rows that are shared are copied now."""
        before = self.length_B.tolist()
        new = [n_new] * self.batch if new_lens_B is None else new_lens_B.tolist()
        after = [had + n for had, n in zip(before, new, strict=True)]
        self._copy_pages(self.page_table.take(before, after), self)
        # Padding takes no page, and may exceed what rows have: it is counted as tokens, so the rest is what is left.
        self._headroom = max(n_new, self.page_table.headroom(before))

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

    def _check_new_tokens(self, new: BranchStreams) -> None:
        """Refuse tokens that are not for this cache."""
        batch, n_new = new.k_sel.shape[:2]
        k_shape, v_shape = (batch, n_new, self.n_groups, self.d_k), (batch, n_new, self.n_groups, self.d_v)
        if batch != self.batch or [x.shape for x in new] != [k_shape, v_shape] * 3:
            raise ConfigError(
                f"the cache holds {self.batch} rows, {self.n_groups} groups, keys of {self.d_k} and values of "
                f"{self.d_v}, and was given keys and values of shapes {[list(x.shape) for x in new]}. Make one with "
                f"the same module's new_cache({batch}, …)."
            )
        if any(x.device != self.device for x in new):
            raise ConfigError(
                f"the cache is on {self.device} and was given keys and values on "
                f"{sorted({str(x.device) for x in new})}. Move them there."
            )
        if n_new < 1:
            raise ConfigError(
                "a forward pass with a cache got 0 new tokens: there is nothing to append. Pass at least one."
            )

    def _checked_lengths(self, new_lens_B: Tensor, n_new: int) -> Tensor:
        """The number of real tokens per row, none negative and none above the number of new tokens."""
        if new_lens_B.shape != (self.batch,) or new_lens_B.dtype not in _INTEGERS:
            raise ConfigError(
                f"new_lens_B is {new_lens_B.dtype} of shape {list(new_lens_B.shape)}: it is how many of the {n_new} "
                f"new tokens are real in each of the cache's {self.batch} rows. Pass int64 of shape [{self.batch}]."
            )
        if new_lens_B.device != self.device:
            raise ConfigError(f"new_lens_B is on {new_lens_B.device} and the cache on {self.device}. Move it there.")
        # On an accelerator reading the values would stall it; cut to what fits, no value can write elsewhere.
        if new_lens_B.is_cpu and not torch.compiler.is_compiling():
            if not all(0 <= n <= n_new for n in new_lens_B.tolist()):
                raise ConfigError(
                    f"new_lens_B is {new_lens_B.tolist()[:8]} and {n_new} tokens are new: 0 to {n_new} of them are "
                    f"real in each row. Pass that number per row."
                )
            return new_lens_B
        return new_lens_B.clamp(0, n_new)

    def _checked_rows(self, method: str, rows: Sequence[int] | Tensor, count: int | None = None) -> Tensor:
        """Numbers of the cache's rows, as many as `count` says."""
        index_B = torch.as_tensor(rows if isinstance(rows, Tensor) else list(rows), device=self.device)
        if not index_B.numel() and index_B.dim() == 1:
            index_B = index_B.long()
        count = index_B.numel() if count is None else count
        if index_B.shape != (count,) or index_B.dtype not in _INTEGERS:
            raise ConfigError(
                f"{method} was given {index_B.dtype} of shape {list(index_B.shape)}: it needs the old row of each of "
                f"{count} rows. Pass int64 of shape [{count}]."
            )
        if not all(0 <= row < self.batch for row in index_B.tolist()):
            raise ConfigError(
                f"{method} was given rows {index_B.tolist()[:8]} and the cache has 0 to {self.batch - 1}."
            )
        return index_B

    def _copy_pages(self, copies: PageCopies, source: "LayerCache") -> None:
        if any(copies):
            for mine, theirs in ((self.selected, source.selected), (self.compressed, source.compressed)):
                for to, at in zip(mine.both, theirs.both, strict=True):
                    to.copy_pages(copies, at)


@custom_operator("nsa::take_pages", mutates_args=("table", "pools"))
def _take_pages(
    number: int, n_new: int, new_lens: Tensor | None, length: Tensor, table: Tensor, pools: list[Tensor]
) -> None:
    """`LayerCache._reserve` in a compiled graph, which cannot hand out pages: the lengths of rows are read on the host.
    It changes the graph's own tensors, which may be copies of the cache's."""
    cache = _CACHES[number]
    slots = [slots for stream in (cache.selected, cache.compressed) for slots in stream.both]
    own = cache.length_B, cache.page_table.table_BP, [each.data for each in slots]

    def use(length: Tensor, table: Tensor, pools: list[Tensor]) -> None:
        cache.length_B, cache.page_table.table_BP = length, table
        for each, data in zip(slots, pools, strict=True):
            each.data = data

    use(length, table, pools)
    try:
        cache._reserve(n_new, new_lens)
    finally:
        use(*own)


@_take_pages.register_fake
def _(number: int, n_new: int, new_lens: Tensor | None, length: Tensor, table: Tensor, pools: list[Tensor]) -> None:
    pass
