"""Preallocated KV cache for the three branches: append, crop, reorder, reset.

Selected: all raw keys and values, in pages of l_sel, a page being a selection block. Window: a ring of the last w.
Compressed: one entry per d tokens, appended when its l tokens are there. Tail: a ring of the last l raw tokens of the
compressed branch, which its next entries need. Branches that share keys and values share slots: then window and tail
are the selected branch's pages. Rows of a batch may have different lengths; padding goes to a spare slot at the end.

B batch · S new tokens · G kv groups · X width · E compressed blocks that S tokens may complete
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nsa.core.branches import BranchKeys, BranchStreams
from nsa.core.cache_slots import CacheSlots, ExclusiveUse, KeySlots
from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.interface import CachedKeys, CacheView, TokenDecoder, one_page_per_row

_LENGTH_DTYPES = (torch.int64, torch.int32)

MakeDecoder = Callable[..., TokenDecoder]
Compress = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class LayerCache:
    """The cache of one layer.

    rewind: `crop` can remove up to this many tokens at any time; it costs copies of w + l + 2 · rewind tokens. Without
        it a row can be cropped only while its rings have lost nothing (see `crop`).
    shared: whether the window's, and the compressed branch's, raw keys and values are those of the selected branch.
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
    ) -> None:
        if batch < 1 or max_len < 1 or rewind < 0:
            raise ConfigError(
                f"a cache for {batch} rows of {max_len} tokens with rewind {rewind} was requested. Set batch and "
                f"max_len to 1 or more, rewind to 0 or more."
            )
        self.geometry, self.max_len, self.dtype = geometry, max_len, dtype
        self.batch, self.n_groups, self.d_k, self.d_v = batch, n_groups, d_k, d_v
        self.rewind, self.shared = rewind, shared
        self.exclusive = ExclusiveUse()

        def slots(n: int) -> KeySlots:
            shape = (batch, n_groups, n + 1)
            return KeySlots(*(torch.zeros(*shape, width, device=device, dtype=dtype) for width in (d_k, d_v)))

        self.selected = slots(geometry.n_blocks(max_len) * geometry.l_sel)
        self.window = self.selected if shared[0] else slots(geometry.w)
        self.compressed = slots(geometry.n_compressed(max_len))
        self.tail = self.selected if shared[1] else slots(geometry.l)
        # Longer rings of the same tokens, from which `crop` fills the short ones again.
        self._past_window = None if shared[0] or not rewind else slots(geometry.w + rewind)
        self._past_tail = None if shared[1] or not rewind else slots(geometry.l + rewind)
        self.length_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.device = self.length_B.device
        self.n_compressed_B = torch.zeros_like(self.length_B)
        self._pos_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._window_pos_B1 = torch.zeros_like(self._pos_B1)
        self._highest_B = torch.zeros_like(self.length_B)  # length before the last crop, if it was greater
        self._decoders: dict[MakeDecoder, tuple[dict[str, Any], TokenDecoder]] = {}
        self.prepared: tuple[object, TokenDecoder | None] = (None, None)
        """The module that decoded last with this cache, and its decoder: looking it up at every step takes time."""
        self._longest = 0  # never below the true maximum; kept here so that appending needs no transfer

    def positions(self, n_new: int) -> Tensor:
        """Positions of the next n_new tokens: [B, S]."""
        return self.length_B[:, None] + torch.arange(n_new, device=self.length_B.device)

    def append(
        self, new: BranchStreams, new_lens_B: Tensor | None, compress: Compress, decoder: TokenDecoder | None = None
    ) -> tuple[BranchKeys, BranchKeys, BranchKeys]:
        """Append the new tokens; return what the compressed, selected and window branches attend over.

        `new_lens_B`: how many tokens of each row are real (default all); the rest of a row is padding. `decoder` may
        append one token per row faster than is done here.
        """
        with self.exclusive:
            return self.append_held(new, new_lens_B, compress, decoder)

    def append_held(
        self, new: BranchStreams, new_lens_B: Tensor | None, compress: Compress, decoder: TokenDecoder | None = None
    ) -> tuple[BranchKeys, BranchKeys, BranchKeys]:
        """`append` for a caller that holds `exclusive`, or that is being compiled."""
        n_new = new.k_sel.shape[1]
        if n_new == 1 and new_lens_B is None and decoder is not None and decoder.append is not None:
            self._check_room(n_new, None)
            if decoder.append(new):  # refuses what does not fit, as is done below
                self._emit_compressed(compress)
            if self.rewind:
                self._append_past(new, self._pos_B1, self.length_B[:, None])
            return self._newest
        self._check_shapes(new)
        new_lens_B = None if new_lens_B is None else self._checked_lengths(new_lens_B, n_new)
        self._check_room(n_new, new_lens_B)
        pos_BS = self.positions(n_new)
        end_B1 = (self.length_B + (n_new if new_lens_B is None else new_lens_B))[:, None]
        zero_BS = self._newest[0].start_BS.expand_as(pos_BS)

        self._append_compressed(new.k_cmp, new.v_cmp, pos_BS, end_B1, compress)
        self.selected.write(pos_BS, pos_BS < end_B1, (new.k_sel, new.v_sel))
        window = self._append_window(new.k_win, new.v_win, pos_BS, end_B1)
        if self.rewind:
            self._append_past(new, pos_BS, end_B1)
        self.length_B += end_B1[:, 0] - self.length_B
        inside_BS = pos_BS.clamp(max=self.max_len - 1)  # padding may stand past the end, where there are no keys
        if n_new == 1:
            self._pos_B1.copy_(inside_BS)
            return self._newest
        compressed, selected = (
            BranchKeys(*slots.content(), inside_BS, zero_BS) for slots in (self.compressed, self.selected)
        )
        return compressed, selected, window

    def decoder(self, make: MakeDecoder, **sizes: Any) -> TokenDecoder:
        """The decoder that `make` prepares for this cache, made once for these sizes."""
        if make in self._decoders:
            made_for, decoder = self._decoders[make]
            if made_for == sizes:
                return decoder
        compressed, selected, window = (
            CachedKeys(one_page_per_row(k, v), pos, start) for k, v, pos, start in self._newest
        )
        tail = one_page_per_row(*self.tail.content())
        remembered = CacheView(tail, compressed, selected, window, self.length_B, self.n_compressed_B)
        decoder = make(remembered, **sizes)
        self._decoders[make] = sizes, decoder
        return decoder

    @cached_property
    def _newest(self) -> tuple[BranchKeys, BranchKeys, BranchKeys]:
        """What one new token per row attends over: always the same tensors."""
        zero_B1 = torch.zeros_like(self._pos_B1)
        streams = ((self.compressed, self._pos_B1), (self.selected, self._pos_B1), (self.window, self._window_pos_B1))
        compressed, selected, window = (BranchKeys(*slots.content(), pos, zero_B1) for slots, pos in streams)
        return compressed, selected, window

    def __getstate__(self) -> dict[str, Any]:
        """A copy has tensors of its own, and what was prepared for these does not fit them."""
        return {name: value for name, value in vars(self).items() if name != "_newest"} | {
            "_decoders": {},
            "prepared": (None, None),
        }

    def n_bytes(self) -> int:
        return sum(slots.data.nbytes for slots in self._all_slots())

    def reset(self) -> None:
        """Empty every row."""
        with self.exclusive:
            for counter in (self.length_B, self.n_compressed_B, self._highest_B):
                counter.zero_()
            self._longest = 0

    def crop(self, length: int | Sequence[int] | Tensor) -> None:
        """Keep the first `length` tokens of each row (one number, or one per row); shorter rows stay as they are. A
        negative number removes that many tokens.

        Possible for up to `rewind` tokens, and without it while the rings still hold what the next tokens need: always
        if branches share keys and values, else as long as a row never had more than w tokens (or than the compressed
        branch's tail holds); to length 0 always. Refused otherwise, with nothing changed.
        """
        with self.exclusive:
            before = self.length_B.tolist()
            after = [
                min(had, n) if n >= 0 else max(0, had + n) for had, n in zip(before, self._per_row(length), strict=True)
            ]
            highest = [max(pair) for pair in zip(self._highest_B.tolist(), before, strict=True)]
            for row, (had, keep, high) in enumerate(zip(before, after, highest, strict=True)):
                if keep < had:
                    self._check_croppable(row, keep, high)
            self._highest_B.copy_(torch.tensor([high if n else 0 for high, n in zip(highest, after, strict=True)]))
            self.length_B.copy_(torch.tensor(after))
            self.n_compressed_B.copy_(torch.tensor([self.geometry.n_compressed(n) for n in after]))
            for ring, past in ((self.window, self._past_window), (self.tail, self._past_tail)):
                if past is not None:
                    ring.refill(past, self.length_B)
            self._longest = max(after)

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Replace row i by row rows[i], as beam search needs it. In place: prepared decoders keep addresses."""
        index_B = self._checked_rows("reorder", rows, self.batch)
        with self.exclusive:
            for slots in self._all_slots():
                used = slots.data[:, :, : min(slots.n, self._longest)]
                used.copy_(used.index_select(0, index_B))
            for counter in (self.length_B, self.n_compressed_B, self._highest_B):
                counter.copy_(counter.index_select(0, index_B))

    def grown(self, max_len: int = 0, rewind: int = 0) -> "LayerCache":
        """A cache of the same tokens that holds at least `max_len` and whose `crop` reaches back at least `rewind`,
        though no further than this one's for the tokens it has."""
        made = self._like(max_len=max(max_len, self.max_len), rewind=max(rewind, self.rewind))
        with self.exclusive:
            for mine, theirs in ((made.selected, self.selected), (made.compressed, self.compressed)):
                for new, old in zip(mine.both, theirs.both, strict=True):
                    used = min(old.n, self._longest)
                    new.data[:, :, :used].copy_(old.data[:, :, :used])
            rings = (
                (self.shared[0], self.window, self._past_window, made.window, made._past_window),
                (self.shared[1], self.tail, self._past_tail, made.tail, made._past_tail),
            )
            for in_pages, ring, past, new_ring, new_past in rings:
                if not in_pages:
                    new_ring.refill(ring, self.length_B)
                    if new_past is not None:
                        new_past.refill(past or ring, self.length_B)
            made._copy_counters(self, None)
            # Longer rings lack what was overwritten before, as if their rows had been longer by the difference.
            if longer := made.rewind - self.rewind:
                made._highest_B.copy_(torch.maximum(self._highest_B, self.length_B) + longer)
        return made

    def picked(self, rows: Sequence[int] | Tensor) -> "LayerCache":
        """A cache whose row i is this one's row rows[i]; a row may be taken several times."""
        index_B = self._checked_rows("picked", rows)
        made = self._like(batch=len(index_B))
        with self.exclusive:
            for new, old in zip(made._all_slots(), self._all_slots(), strict=True):
                torch.index_select(old.data, 0, index_B, out=new.data)
            made._copy_counters(self, index_B)
        return made

    def _like(self, **changes: int) -> "LayerCache":
        """An empty cache of the same kind."""
        names = ("batch", "max_len", "n_groups", "d_k", "d_v", "device", "dtype", "rewind", "shared")
        return LayerCache(self.geometry, **{name: getattr(self, name) for name in names} | changes)

    def _checked_rows(self, method: str, rows: Sequence[int] | Tensor, count: int | None = None) -> Tensor:
        index_B = torch.as_tensor(rows, device=self.device)
        count = index_B.numel() if count is None else count
        if index_B.shape != (count,) or index_B.dtype not in _LENGTH_DTYPES:
            raise ConfigError(
                f"{method} was given {index_B.dtype} of shape {list(index_B.shape)}: it needs the old row of each of "
                f"{count} rows. Pass int64 of shape [{count}]."
            )
        if index_B.is_cpu and not all(0 <= row < self.batch for row in index_B.tolist()):
            raise ConfigError(
                f"{method} was given rows {index_B.tolist()[:8]} and the cache has 0 to {self.batch - 1}."
            )
        return index_B

    def _copy_counters(self, other: "LayerCache", rows: Tensor | None) -> None:
        for name in ("length_B", "n_compressed_B", "_highest_B"):
            counter = getattr(other, name)
            getattr(self, name).copy_(counter if rows is None else counter.index_select(0, rows))
        self._longest = other._longest

    def _all_slots(self) -> Iterator[CacheSlots]:
        """Every stream once, whatever is shared."""
        streams = (self.selected, self.window, self.compressed, self.tail, self._past_window, self._past_tail)
        yield from {id(slots): slots for stream in streams if stream for slots in stream.both}.values()

    def _per_row(self, length: int | Sequence[int] | Tensor) -> list[int]:
        given = length.tolist() if isinstance(length, Tensor) else length
        rows = list(given) if isinstance(given, Sequence) else [given] * self.batch
        if len(rows) != self.batch or not all(isinstance(n, int) for n in rows):
            raise ConfigError(f"crop was given {length!r}: it needs a length, or one for each of {self.batch} rows.")
        return rows

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
        self.compressed.write(block_BE, complete_BE, compress(raw_k, raw_v, begin_BE, block_pos_BE))
        self.n_compressed_B += complete_BE.sum(1)
        if not self.shared[1]:
            self.tail.write_ring(pos_BS, end_B1, (k, v))

    def _emit_compressed(self, compress: Compress) -> None:
        """The entries of blocks that end with the newest token, for the rows where one does."""
        g, zero_B1 = self.geometry, self._newest[0].start_BS
        raw_k, raw_v = self.tail.last(g.l, self.length_B)
        block_pos_B1 = self.length_B[:, None] - g.l
        block_B1 = block_pos_B1 // g.d
        complete_B1 = (block_pos_B1 >= 0) & (block_B1 * g.d == block_pos_B1)
        self.compressed.write(block_B1, complete_B1, compress(raw_k, raw_v, zero_B1, block_pos_B1))
        self.n_compressed_B += complete_B1[:, 0]

    def _append_window(self, k: Tensor, v: Tensor, pos_BS: Tensor, end_B1: Tensor) -> BranchKeys:
        w = self.geometry.w
        # With shared slots the new tokens are already there; those before them are read the same way.
        before = self.window.last(w - 1, self.length_B) if pos_BS.shape[1] > 1 else None
        if not self.shared[0]:
            self.window.write_ring(pos_BS, end_B1, (k, v))
        if before is None:  # the ring is the window: read it in place, in whatever order it lies
            self._window_pos_B1.copy_(pos_BS.clamp(max=self.window.n - 1))
            return self._newest[2]
        k, v = torch.cat((before[0], k), 1), torch.cat((before[1], v), 1)
        return BranchKeys(k, v, pos_BS, (w - 1 - self.length_B[:, None]).expand_as(pos_BS))

    def _check_shapes(self, new: BranchStreams) -> None:
        """Refuse tokens that are not for this cache."""
        batch, n_new = new.k_sel.shape[:2]
        k_shape, v_shape = (batch, n_new, self.n_groups, self.d_k), (batch, n_new, self.n_groups, self.d_v)
        if batch != self.batch or [x.shape for x in new] != [k_shape, v_shape] * 3:
            raise ConfigError(
                f"the cache holds {self.batch} rows, {self.n_groups} groups, keys of {self.d_k} and values of "
                f"{self.d_v}, and was given keys and values of shapes {[list(x.shape) for x in new]}. Make one with "
                f"the same module's new_cache({batch}, …)."
            )

    def _checked_lengths(self, new_lens_B: Tensor, n_new: int) -> Tensor:
        """The number of real tokens per row, such none negative and none above the number of new tokens."""
        if new_lens_B.shape != (self.batch,) or new_lens_B.dtype not in _LENGTH_DTYPES:
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

    def _check_room(self, n_new: int, new_lens_B: Tensor | None) -> None:
        self._longest += n_new
        if self._longest > self.max_len:  # padding may have made the count too high
            self._longest = int((self.length_B + (n_new if new_lens_B is None else new_lens_B)).max())
        if self._longest > self.max_len:
            raise ConfigError(
                f"the cache holds {self.max_len} tokens and {self._longest} are needed: it never grows. "
                f"Make it with max_len={self._longest} or more."
            )


class NSACache:
    """One `LayerCache` per layer."""

    def __init__(self, layers: list[LayerCache]) -> None:
        self.layers = layers
        self.exclusive = ExclusiveUse()

    @property
    def length_B(self) -> Tensor:
        return self.layers[0].length_B

    def n_bytes(self) -> int:
        return sum(layer.n_bytes() for layer in self.layers)

    def reset(self) -> None:
        """Empty every row."""
        self._each(lambda layer: layer.reset())

    def crop(self, length: int | Sequence[int] | Tensor) -> None:
        """Keep the first `length` tokens of each row; see `LayerCache.crop`."""
        self._each(lambda layer: layer.crop(length))

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Replace row i by row rows[i], as beam search needs it."""
        self._each(lambda layer: layer.reorder(rows))

    def _each(self, change: Callable[[LayerCache], None]) -> None:
        """All layers have the same sizes and lengths: what one refuses, the first refuses before anything changed."""
        with self.exclusive:
            for layer in self.layers:
                change(layer)
