"""The engine's data loader over our row streams: every rank its share of one global sequence.

The saved state is the stream's cursor after the last batch taken; it names neither rank nor world size.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from olmo_core.data.collator import DataCollator
from olmo_core.data.data_loader import TextDataLoaderBase
from torch import Tensor

from nsa.data.feed.feeder import Feeder, FeedSettings
from nsa.data.rows.batch import Batch
from nsa.data.rows.opening import RowData, check_batch
from nsa.data.rows.stream import State
from nsa.model.loss import IGNORE
from nsa.train.ranks import Ranks

Tensors = dict[str, Any]


class RowLoader(TextDataLoaderBase):
    """`prefetch` makes batches ahead in a process of their own; without it they are made in between steps."""

    def __init__(
        self,
        data: RowData,
        *,
        global_rows: int,
        ranks: Ranks,
        work_dir: Path,
        prefetch: FeedSettings | None = None,
        on_documents: Callable[[int], None] = lambda count: None,
    ) -> None:
        check_batch(data, global_rows, ranks.world)
        super().__init__(
            collator=DataCollator(pad_token_id=0),
            work_dir=work_dir,
            global_batch_size=global_rows * data.seq_len,
            dp_world_size=ranks.world,
            dp_rank=ranks.rank,
            fs_local_rank=ranks.rank,
        )
        self.data, self.global_rows, self.ranks = data, global_rows, ranks
        self._prefetch = prefetch
        self._feeder: Feeder | None = None
        self._state: State | None = None
        self._documents = 0
        self._on_documents = on_documents

    @property
    def total_batches(self) -> int | None:
        """Unknown: a run is as long as its steps, and the streams count their epochs themselves."""
        return None

    def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
        """The order is the stream's own."""
        self._epoch = epoch or 1

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self._state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.close()
        self._state = state_dict["cursor"]

    def get_mock_batch(self) -> Tensors:
        """As large as a real one, for the engine's trial step."""
        rows, seq_len = self.global_rows // self.ranks.world, self.data.seq_len
        tokens = torch.zeros(rows, seq_len, dtype=torch.long)
        return {"input_ids": tokens, "labels": _shift(tokens)}

    def close(self) -> None:
        if self._feeder is not None:
            self._feeder.close()
            self._feeder = None

    def _iter_batches(self) -> Iterator[Tensors]:
        for batch, state in self._feed() if self._prefetch else self._read():
            self._state = state
            self._documents += batch.documents
            self._on_documents(self._documents)
            yield to_engine(batch)

    def _feed(self) -> Iterator[tuple[Batch, State | None]]:
        self._feeder = feeder = Feeder(
            self.data,
            global_rows=self.global_rows,
            rank=self.ranks.rank,
            world=self.ranks.world,
            settings=self._prefetch,
            state=self._state,
        )
        feeder.warm_up()
        for batch in feeder:
            yield batch, feeder.state_dict()

    def _read(self) -> Iterator[tuple[Batch, State | None]]:
        stream = self.data.open()
        if self._state is not None:
            stream.load_state_dict(self._state)
        while True:
            yield stream.next_batch(self.global_rows, self.ranks.rank, self.ranks.world), stream.state_dict()


def to_engine(batch: Batch) -> Tensors:
    """The tensors the engine's train module reads; its micro-batches are cuts along the rows."""
    tokens = torch.from_numpy(batch.tokens.astype(np.int64))
    mask = torch.from_numpy(batch.loss_mask) if batch.loss_mask is not None else None
    tensors: Tensors = {"input_ids": tokens, "labels": _shift(tokens, mask)}
    lengths = [np.diff(cu) for cu in batch.cu_doc_lens]
    if any(len(row) > 1 for row in lengths):
        doc_lens = torch.zeros(len(lengths), max(len(row) for row in lengths), dtype=torch.int32)
        for r, row in enumerate(lengths):
            doc_lens[r, : len(row)] = torch.from_numpy(row)
        tensors |= {"doc_lens": doc_lens, "max_doc_lens": [int(row.max()) for row in lengths]}
    return tensors


def _shift(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The label of a token is the next one, if that may be predicted."""
    labels = torch.full_like(tokens, IGNORE)
    labels[:, :-1] = tokens[:, 1:] if mask is None else tokens[:, 1:].masked_fill(~mask[:, 1:], IGNORE)
    return labels
