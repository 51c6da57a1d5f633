"""Prepared dataset: shuffled rows of S tokens; row i is tokens [i·S, (i+1)·S) of the concatenated shards.

Every token is in exactly one row. Only the last row of the set has padding (the end-of-document token, excluded by its
loss mask). Rows are addressed by their position in the endless sequence of epochs, so a batch is a pure function of the
settings and that position: no state, no dependence on the number of ranks.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from nsa.errors import ConfigError, DataError
from nsa_train.data.permutation import derive_key, feistel_permutation
from nsa_train.data.rows.batch import Batch, EndOfData, Segment
from nsa_train.data.shards.reader import ShardReader

# The order is computed for this many rows at a time and cached: for the few rows of one batch, numpy's overhead per
# call would cost more than reading the tokens.
_CHUNK_ROWS = 1024


class PreparedRows:
    kind = "prepared"

    def __init__(
        self,
        reader: ShardReader,
        seq_len: int,
        *,
        shuffle_seed: int | None,
        max_epochs: int | None = None,
        with_provenance: bool = False,
        mask_document_ends: bool = True,
    ) -> None:
        """`shuffle_seed=None` keeps the set's own order. `max_epochs=None` repeats forever, each epoch in a new order;
        a row beyond the last epoch raises DataError."""
        if seq_len < 1:
            raise ConfigError(f"seq_len is {seq_len}: a row needs at least one token.")
        if max_epochs is not None and max_epochs < 1:
            raise ConfigError(f"max_epochs is {max_epochs}: set at least 1, or None to repeat forever.")
        if reader.total_tokens == 0:
            raise DataError(
                f"split {reader.split!r} of {reader.folder.url} holds no tokens. Prepare more documents; for the "
                "validation split, prepare with a larger --held-out."
            )
        self.reader = reader
        self.seq_len = seq_len
        self.rows_per_epoch = -(-reader.total_tokens // seq_len)
        self.max_epochs = max_epochs
        self._shuffle_seed = shuffle_seed
        self._with_provenance = with_provenance
        self._mask_document_ends = mask_document_ends
        limit = reader.cache_limit_bytes
        if shuffle_seed is not None and limit is not None and reader.total_bytes > limit:
            raise ConfigError(
                f"{reader.folder.url} holds {reader.total_bytes} bytes of tokens but the cache holds {limit}: a "
                "shuffle would fetch a whole shard for almost every row. Raise data.cache_gib, or copy the set to "
                "local disk."
            )
        self._chunks_per_epoch = -(-self.rows_per_epoch // _CHUNK_ROWS)
        self._chunk = lru_cache(maxsize=8)(self._compute_chunk)

    @property
    def identity(self) -> dict[str, object]:
        """Values that determine the tokens at each position; a cursor is valid only for equal values."""
        seed = self._shuffle_seed
        return {
            "kind": self.kind,
            "data": self.reader.manifest.fingerprint,
            "split": self.reader.split,
            "seq_len": self.seq_len,
            "shuffle": None if seed is None else [seed, None, 16],  # the last two as in existing cursors
        }

    def check_rows(self, first: int, stop: int) -> None:
        """Raise for rows beyond the last epoch; for the whole global batch, so that all ranks stop at the same step."""
        if self.max_epochs is not None and stop > (end := self.max_epochs * self.rows_per_epoch):
            raise EndOfData(
                f"rows {first} to {stop} were requested, but {self.max_epochs} epoch(s) of {self.rows_per_epoch} rows "
                f"end at {end} ({max(end - first, 0)} rows do not fill a batch). Train fewer steps, prepare more data, "
                "or allow more epochs."
            )

    def rows(self, row_ids: np.ndarray) -> Batch:
        """The rows at these positions of the endless sequence of epochs."""
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
            mask_document_ends=self._mask_document_ends,
        )

    def stored_rows(self, row_ids: np.ndarray) -> np.ndarray:
        """Row of the set at each position of the endless sequence of epochs."""
        epochs, places = np.divmod(row_ids, self.rows_per_epoch)
        if self._shuffle_seed is None:
            return places
        chunks = epochs * self._chunks_per_epoch + places // _CHUNK_ROWS
        within = places % _CHUNK_ROWS
        stored = np.empty_like(places)
        for chunk in set(chunks.tolist()):
            chosen = chunks == chunk
            stored[chosen] = self._chunk(chunk)[within[chosen]]
        return stored

    def _compute_chunk(self, number: int) -> np.ndarray:
        epoch, part = divmod(number, self._chunks_per_epoch)
        first = part * _CHUNK_ROWS
        assert self._shuffle_seed is not None
        positions = np.arange(first, min(first + _CHUNK_ROWS, self.rows_per_epoch), dtype=np.int64)
        return feistel_permutation(self.rows_per_epoch, derive_key(self._shuffle_seed, epoch), positions)

    def _provenance(self, stored: Sequence[int]) -> tuple[tuple[Segment, ...], ...]:
        total = self.reader.total_tokens
        return tuple(self.reader.segments(r * self.seq_len, min((r + 1) * self.seq_len, total)) for r in stored)


def _boundaries(ends: np.ndarray, start: int, seq_len: int) -> np.ndarray:
    """0, the document ends inside the row, seq_len: strictly increasing."""
    inside = len(ends) - 1 if len(ends) and ends[-1] == start + seq_len else len(ends)
    cu = np.empty(inside + 2, dtype=np.int32)
    cu[0] = 0
    np.subtract(ends[:inside], start, out=cu[1:-1], casting="unsafe")
    cu[-1] = seq_len
    return cu
