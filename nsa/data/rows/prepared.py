"""Fixed rows over a prepared set: row i is tokens [i·S, (i+1)·S) of all shards joined, in a computed shuffled order.

Every token is in exactly one row. The last row of the set is filled up with the end-of-document token, which its loss
mask excludes; it is the only row with padding. Rows are addressed by their place in the endless sequence of epochs, so
a batch is a pure function of the settings and that place: no state, no dependence on the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nsa.data.permutation import FeistelPermutation, WindowedPermutation, derive_key
from nsa.data.rows.batch import Batch, EndOfData, Segment, rows_of_rank
from nsa.data.shards.reader import ShardReader
from nsa.errors import ConfigError, DataError

# The order is computed this many rows at a time and kept: for the few rows of one batch, numpy's overhead per call
# would cost more than the tokens.
_STRETCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class ShuffleSettings:
    """`block_rows` keeps neighbouring rows together for a remote set larger than its cache; None mixes everything."""

    seed: int
    block_rows: int | None = None
    window_blocks: int = 16


class PreparedRows:
    kind = "prepared"

    def __init__(
        self,
        reader: ShardReader,
        seq_len: int,
        *,
        shuffle: ShuffleSettings | None,
        max_epochs: int | None = None,
        global_rows: int | None = None,
        with_provenance: bool = False,
    ) -> None:
        """`shuffle=None` keeps the set's own order. `max_epochs=None` repeats without end, each epoch in a new order;
        otherwise asking for a row beyond them raises DataError. `global_rows` is what `batch` divides among ranks."""
        if seq_len < 1:
            raise ConfigError(f"seq_len is {seq_len}: a row needs at least one token. Raise it.")
        if max_epochs is not None and max_epochs < 1:
            raise ConfigError(f"max_epochs is {max_epochs}: give at least 1, or none to repeat without end.")
        if reader.total_tokens == 0:
            raise DataError(
                f"split {reader.split!r} of {reader.folder.url} holds no tokens. Prepare more documents, or raise the "
                "held-out fraction if this is the validation split."
            )
        self.reader = reader
        self.seq_len = seq_len
        self.rows_per_epoch = -(-reader.total_tokens // seq_len)
        self.max_epochs = max_epochs
        self._shuffle = shuffle
        self._global_rows = global_rows
        self._with_provenance = with_provenance
        limit = reader.cache_limit_bytes
        if shuffle is not None and shuffle.block_rows is None and limit is not None and reader.total_bytes > limit:
            raise ConfigError(
                f"{reader.folder.url} holds {reader.total_bytes} bytes of tokens but the cache {limit}: a full shuffle "
                "would fetch a whole shard for almost every row. Set shuffle.block_rows (e.g. the rows of one shard), "
                "raise the cache limit, or copy the set to local disk."
            )
        self._order = lru_cache(maxsize=4)(self._build_order)
        self._stretches_per_epoch = -(-self.rows_per_epoch // _STRETCH_ROWS)
        self._stretch = lru_cache(maxsize=8)(self._compute_stretch)

    @property
    def identity(self) -> dict[str, object]:
        """What decides which tokens stand at which place; a cursor is only valid under the same."""
        shuffle = self._shuffle
        return {
            "kind": self.kind,
            "data": self.reader.manifest.fingerprint,
            "split": self.reader.split,
            "seq_len": self.seq_len,
            "shuffle": [shuffle.seed, shuffle.block_rows, shuffle.window_blocks] if shuffle else None,
        }

    def batch(self, step: int, rank: int, world: int) -> Batch:
        """The rows of one rank at one step: a pure function, whatever was asked before."""
        if self._global_rows is None:
            raise ConfigError(
                "batch(step, rank, world) needs global_rows, the rows of one step over all ranks. Set it."
            )
        share = rows_of_rank(self._global_rows, rank, world)
        first = step * self._global_rows
        self.check_rows(first, first + self._global_rows)
        return self.rows(np.arange(first + share.start, first + share.stop, dtype=np.int64))

    def check_rows(self, first: int, stop: int) -> None:
        """Refuse rows beyond the last epoch, for the whole global batch, so that every rank stops at the same step."""
        if self.max_epochs is not None and stop > (end := self.max_epochs * self.rows_per_epoch):
            raise EndOfData(
                f"rows {first} to {stop} were asked for, but {self.max_epochs} epoch(s) of {self.rows_per_epoch} rows "
                f"end at {end} ({max(end - first, 0)} rows do not fill a batch). Train fewer steps, prepare more data, "
                "or allow more epochs."
            )

    def rows(self, row_ids: np.ndarray) -> Batch:
        """The rows at these places of the endless sequence."""
        stored = self.stored_rows(row_ids)
        seq_len, total = self.seq_len, self.reader.total_tokens
        tokens = np.empty((len(stored), seq_len), dtype=self.reader.manifest.dtype)
        boundaries = []
        documents = 0
        mask: np.ndarray | None = None
        for r, row in enumerate(stored.tolist()):
            start = row * seq_len
            stop = min(start + seq_len, total)
            ends = self.reader.copy_window(start, stop, tokens[r])
            documents += len(ends)
            if stop - start < seq_len:
                tokens[r, stop - start :] = self.reader.manifest.eos_id
                mask = np.ones(tokens.shape, dtype=bool) if mask is None else mask
                mask[r, stop - start :] = False
            boundaries.append(_boundaries(ends, start, seq_len))
        return Batch(
            tokens=tokens,
            cu_doc_lens=tuple(boundaries),
            loss_mask=mask,
            row_ids=row_ids,
            epoch=int(row_ids[-1]) // self.rows_per_epoch,
            documents=documents,
            provenance=self._provenance(stored.tolist()) if self._with_provenance else None,
        )

    def stored_rows(self, row_ids: np.ndarray) -> np.ndarray:
        """Which row of the set stands at each place of the endless sequence."""
        epochs, places = np.divmod(row_ids, self.rows_per_epoch)
        if self._shuffle is None:
            return places
        stretches = epochs * self._stretches_per_epoch + places // _STRETCH_ROWS
        within = places % _STRETCH_ROWS
        stored = np.empty_like(places)
        for stretch in set(stretches.tolist()):
            chosen = stretches == stretch
            stored[chosen] = self._stretch(stretch)[within[chosen]]
        return stored

    def _compute_stretch(self, number: int) -> np.ndarray:
        epoch, part = divmod(number, self._stretches_per_epoch)
        first = part * _STRETCH_ROWS
        return self._order(epoch)(np.arange(first, min(first + _STRETCH_ROWS, self.rows_per_epoch), dtype=np.int64))

    def _provenance(self, stored: Sequence[int]) -> tuple[tuple[Segment, ...], ...]:
        total = self.reader.total_tokens
        return tuple(self.reader.segments(r * self.seq_len, min((r + 1) * self.seq_len, total)) for r in stored)

    def _build_order(self, epoch: int) -> FeistelPermutation | WindowedPermutation:
        assert self._shuffle is not None
        key = derive_key(self._shuffle.seed, epoch)
        if self._shuffle.block_rows is None:
            return FeistelPermutation(self.rows_per_epoch, key)
        return WindowedPermutation(
            self.rows_per_epoch,
            key,
            block_rows=self._shuffle.block_rows,
            window_blocks=self._shuffle.window_blocks,
        )


def _boundaries(ends: np.ndarray, start: int, seq_len: int) -> np.ndarray:
    """0, the document ends inside the row, seq_len: strictly increasing."""
    inside = len(ends) - 1 if len(ends) and ends[-1] == start + seq_len else len(ends)
    cu = np.empty(inside + 2, dtype=np.int32)
    cu[0] = 0
    np.subtract(ends[:inside], start, out=cu[1:-1], casting="unsafe")
    cu[-1] = seq_len
    return cu
