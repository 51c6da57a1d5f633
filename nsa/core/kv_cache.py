"""What decode must remember, per branch: everything preallocated, nothing ever copied to grow.

Selected: all raw keys and values, in pages of l_sel, a page being a selection block. Window: a ring of the last w.
Compressed: one entry per d tokens, emitted once its l tokens have come. Tail: the raw tokens that the next compressed
blocks still need. Rows of a batch may have different lengths; what is padding goes to a spare slot at the end.

B batch · S new tokens · G kv groups · X width · E compressed blocks that S tokens may complete
"""

from collections.abc import Callable
from functools import cached_property
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.decoder import CacheView, TokenDecoder

_LENGTH_DTYPES = (torch.int64, torch.int32)

MakeDecoder = Callable[..., TokenDecoder]
Compress = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class BranchStreams(NamedTuple):
    """Keys and values of the three branches: [B, S, G, K or V]."""

    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor


class BranchKeys(NamedTuple):
    """What a branch attends over, and where its queries stand on that axis (see `nsa.kernels.reference`)."""

    k: Tensor
    v: Tensor
    pos_BS: Tensor
    start_BS: Tensor


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


class LayerCache:
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
    ) -> None:
        if batch < 1 or max_len < 1:
            raise ConfigError(
                f"a cache for {batch} rows of {max_len} tokens was asked for: it needs one of each at least. "
                f"Set batch and max_len to 1 or more."
            )
        self.geometry, self.max_len, self.dtype = geometry, max_len, dtype
        self.batch, self.n_groups, self.d_k, self.d_v = batch, n_groups, d_k, d_v
        self.exclusive = ExclusiveUse()

        def slots(n: int, width: int) -> "_CacheSlots":
            return _CacheSlots(torch.zeros(batch, n_groups, n + 1, width, device=device, dtype=dtype))

        n_raw = geometry.n_blocks(max_len) * geometry.l_sel
        n_compressed = geometry.n_compressed(max_len)
        self.selected = slots(n_raw, d_k), slots(n_raw, d_v)
        self.window = slots(geometry.w, d_k), slots(geometry.w, d_v)
        self.compressed = slots(n_compressed, d_k), slots(n_compressed, d_v)
        self.tail = slots(geometry.l, d_k), slots(geometry.l, d_v)
        self.length_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.device = self.length_B.device
        self.n_compressed_B = torch.zeros_like(self.length_B)
        self._pos_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._window_pos_B1 = torch.zeros_like(self._pos_B1)
        self._decoders: dict[MakeDecoder, tuple[dict[str, Any], TokenDecoder]] = {}
        self.prepared: tuple[object, TokenDecoder | None] = (None, None)
        """Whoever decoded last with this cache, and the decoder it was given: asking anew at every step takes time."""
        self._longest = 0  # never below the true maximum; kept here so that appending needs no transfer

    def positions(self, n_new: int) -> Tensor:
        """Positions of the next n_new tokens: [B, S]."""
        return self.length_B[:, None] + torch.arange(n_new, device=self.length_B.device)

    def append(
        self, new: BranchStreams, new_lens_B: Tensor | None, compress: Compress, decoder: TokenDecoder | None = None
    ) -> tuple[BranchKeys, BranchKeys, BranchKeys]:
        """Take in the new tokens; return what the compressed, selected and window branches attend over.

        `new_lens_B` says how many tokens of each row are real (default all); the rest of a row is padding. `decoder`
        may take in one token per row faster than is done here.
        """
        with self.exclusive:
            return self.append_held(new, new_lens_B, compress, decoder)

    def append_held(
        self, new: BranchStreams, new_lens_B: Tensor | None, compress: Compress, decoder: TokenDecoder | None = None
    ) -> tuple[BranchKeys, BranchKeys, BranchKeys]:
        """`append` for a caller that holds `exclusive`, or that is being compiled."""
        n_new = new.k_sel.shape[1]
        if n_new == 1 and new_lens_B is None and decoder is not None and decoder.take_in is not None:
            self._check_room(n_new, None)
            if decoder.take_in(new):  # refuses what does not fit, as is done below
                self._emit_compressed(compress)
            return self._newest
        self._check_shapes(new)
        new_lens_B = None if new_lens_B is None else self._checked_lengths(new_lens_B, n_new)
        self._check_room(n_new, new_lens_B)
        pos_BS = self.positions(n_new)
        end_B1 = (self.length_B + (n_new if new_lens_B is None else new_lens_B))[:, None]
        real_BS = pos_BS < end_B1
        zero_BS = torch.zeros_like(pos_BS)

        self._append_compressed(new.k_cmp, new.v_cmp, pos_BS, end_B1, compress)
        k_cmp, v_cmp = (slots.content() for slots in self.compressed)

        for slots, x in zip(self.selected, (new.k_sel, new.v_sel), strict=True):
            slots.write(pos_BS, real_BS, x)
        k_sel, v_sel = (slots.content() for slots in self.selected)

        window = self._append_window(new.k_win, new.v_win, pos_BS, end_B1)
        self.length_B += end_B1[:, 0] - self.length_B
        inside_BS = pos_BS.clamp(max=self.max_len - 1)  # padding may stand past the end, where there are no keys
        if n_new == 1:
            self._pos_B1.copy_(inside_BS)
            return self._newest
        return BranchKeys(k_cmp, v_cmp, inside_BS, zero_BS), BranchKeys(k_sel, v_sel, inside_BS, zero_BS), window

    def decoder(self, make: MakeDecoder, **sizes: Any) -> TokenDecoder:
        """The decoder that `make` prepares for this cache, made once for these sizes."""
        if make in self._decoders:
            made_for, decoder = self._decoders[make]
            if made_for == sizes:
                return decoder
        tail_k, tail_v = (slots.content() for slots in self.tail)
        remembered = CacheView((tail_k, tail_v), *self._newest, self.length_B, self.n_compressed_B)
        decoder = make(remembered, **sizes)
        self._decoders[make] = sizes, decoder
        return decoder

    @cached_property
    def _newest(self) -> tuple[BranchKeys, BranchKeys, BranchKeys]:
        """What one new token per row attends over: always the same tensors."""
        zero_B1 = torch.zeros_like(self._pos_B1)
        streams = ((self.compressed, self._pos_B1), (self.selected, self._pos_B1), (self.window, self._window_pos_B1))
        compressed, selected, window = (BranchKeys(k.content(), v.content(), pos, zero_B1) for (k, v), pos in streams)
        return compressed, selected, window

    def __getstate__(self) -> dict[str, Any]:
        """A copy has tensors of its own, and what was prepared for these does not fit them."""
        return {name: value for name, value in vars(self).items() if name != "_newest"} | {
            "_decoders": {},
            "prepared": (None, None),
        }

    def n_bytes(self) -> int:
        streams = (*self.selected, *self.window, *self.compressed, *self.tail)
        return sum(slots.data.nbytes for slots in streams)

    def _append_compressed(self, k: Tensor, v: Tensor, pos_BS: Tensor, end_B1: Tensor, compress: Compress) -> None:
        g, n_new, before_B1 = self.geometry, pos_BS.shape[1], self.length_B[:, None]
        raw_k, raw_v = (
            torch.cat((tail.last(g.l, self.length_B), x), 1) for tail, x in zip(self.tail, (k, v), strict=True)
        )
        block_BE = self.n_compressed_B[:, None] + torch.arange(n_new // g.d + 1, device=pos_BS.device)
        block_pos_BE = block_BE * g.d
        begin_BE = (block_pos_BE - (before_B1 - g.l)).clamp(max=n_new)  # raw_k begins l tokens before the new ones
        complete_BE = block_pos_BE + g.l <= end_B1
        for slots, x in zip(self.compressed, compress(raw_k, raw_v, begin_BE, block_pos_BE), strict=True):
            slots.write(block_BE, complete_BE, x)
        self.n_compressed_B += complete_BE.sum(1)
        for tail, x in zip(self.tail, (k, v), strict=True):
            tail.write_ring(pos_BS, end_B1, x)

    def _emit_compressed(self, compress: Compress) -> None:
        """The entries of blocks that end with the newest token, for the rows where one does."""
        g, zero_B1 = self.geometry, self._newest[0].start_BS
        raw_k, raw_v = (tail.last(g.l, self.length_B) for tail in self.tail)
        block_pos_B1 = self.length_B[:, None] - g.l
        block_B1 = block_pos_B1 // g.d
        complete_B1 = (block_pos_B1 >= 0) & (block_B1 * g.d == block_pos_B1)
        for slots, x in zip(self.compressed, compress(raw_k, raw_v, zero_B1, block_pos_B1), strict=True):
            slots.write(block_B1, complete_B1, x)
        self.n_compressed_B += complete_B1[:, 0]

    def _append_window(self, k: Tensor, v: Tensor, pos_BS: Tensor, end_B1: Tensor) -> BranchKeys:
        w = self.geometry.w
        if pos_BS.shape[1] == 1:  # the ring is the window: read it in place, in whatever order it lies
            for ring, x in zip(self.window, (k, v), strict=True):
                ring.write_ring(pos_BS, end_B1, x)
            self._window_pos_B1.copy_(pos_BS.clamp(max=w - 1))
            return self._newest[2]
        seen = [torch.cat((ring.last(w - 1, self.length_B), x), 1) for ring, x in zip(self.window, (k, v), strict=True)]
        for ring, x in zip(self.window, (k, v), strict=True):
            ring.write_ring(pos_BS, end_B1, x)
        return BranchKeys(seen[0], seen[1], pos_BS, (w - 1 - self.length_B[:, None]).expand_as(pos_BS))

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
        """The number of real tokens per row, such that no row takes in fewer than none or more than there are."""
        if new_lens_B.shape != (self.batch,) or new_lens_B.dtype not in _LENGTH_DTYPES:
            raise ConfigError(
                f"new_lens_B is {new_lens_B.dtype} of shape {list(new_lens_B.shape)}: it says how many of the {n_new} "
                f"new tokens are real in each of the cache's {self.batch} rows. Pass int64 of shape [{self.batch}]."
            )
        if new_lens_B.device != self.length_B.device:
            raise ConfigError(
                f"new_lens_B is on {new_lens_B.device} and the cache on {self.length_B.device}. Move it there."
            )
        # On an accelerator reading the values would stall it; cut to what fits, no value can write elsewhere.
        if new_lens_B.is_cpu and not torch.compiler.is_compiling():
            if not all(0 <= n <= n_new for n in new_lens_B.tolist()):
                raise ConfigError(
                    f"new_lens_B is {new_lens_B.tolist()[:8]} and {n_new} tokens are new: a row takes in 0 to {n_new} "
                    f"of them. Pass the number of real tokens of each row."
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


class _CacheSlots:
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
