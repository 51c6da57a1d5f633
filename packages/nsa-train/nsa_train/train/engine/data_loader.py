"""The engine's data loader over row streams: each data-parallel rank gets its share of every global batch.

The saved state is the stream's cursor after the last batch taken; it holds neither rank nor world size. Ranks that
stream documents directly divide the reading: each reads and tokenizes its share of the units and shares the tokens
through a folder of the run.
"""

import logging
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from olmo_core.data.collator import DataCollator
from olmo_core.data.data_loader import TextDataLoaderBase
from olmo_core.distributed.utils import all_gather_object, broadcast_object

from nsa.errors import CheckpointError
from nsa.model.loss import IGNORE
from nsa_train import names
from nsa_train.data.prefetcher import BatchPrefetcher, PrefetchSettings
from nsa_train.data.rows.batch import Batch
from nsa_train.data.rows.row_stream import State
from nsa_train.data.rows.specs import DirectData, RowData, check_batch
from nsa_train.data.unit_exchange import ExchangeSettings
from nsa_train.train.distributed import RankInfo
from nsa_train.train.held_out_loss import next_token_labels

_log = logging.getLogger(__name__)

Tensors = dict[str, Any]


_ATTEMPTS_TO_REMOVE = 100


class RowLoader(TextDataLoaderBase):
    """Loader of rows: with `prefetch`, batches are built ahead in a separate process; without it, between steps."""

    def __init__(
        self,
        data: RowData,
        *,
        global_rows: int,
        ranks: RankInfo,
        work_dir: Path,
        prefetch: PrefetchSettings | None = None,
        on_documents: Callable[[int], None] = lambda count: None,
    ) -> None:
        check_batch(data, global_rows, ranks.data_world)
        super().__init__(
            collator=DataCollator(pad_token_id=0),
            work_dir=work_dir,
            global_batch_size=global_rows * data.seq_len,
            dp_world_size=ranks.data_world,
            dp_rank=ranks.data_rank,
            fs_local_rank=ranks.rank,
        )
        self.data, self.global_rows, self.ranks = data, global_rows, ranks
        self._prefetch = prefetch
        self._prefetcher: BatchPrefetcher | None = None
        self._state: State | None = None
        self._documents = 0
        self._on_documents = on_documents

    @property
    def total_batches(self) -> int | None:
        """Unknown: a run is as long as its steps, and the streams count their epochs themselves."""
        return None

    def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
        """Nothing to do: the stream defines the order."""
        self._epoch = epoch or 1

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self._state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.close()
        self._state = state_dict["cursor"]

    def get_mock_batch(self) -> Tensors:
        """Build a batch as large as a real one, for the engine's trial step before training."""
        rows, seq_len = self.global_rows // self.ranks.data_world, self.data.seq_len
        tokens = torch.zeros(rows, seq_len, dtype=torch.long)
        labels = torch.zeros_like(tokens)
        labels[:, -1] = IGNORE
        return {"input_ids": tokens, "labels": labels}

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        if self.ranks.first:
            _remove(self.work_dir / names.DATA_EXCHANGE)

    def _iter_batches(self) -> Iterator[Tensors]:
        for batch, state in self._prefetched() if self._prefetch else self._read():
            self._state = state
            self._documents += batch.documents
            self._on_documents(self._documents)
            yield to_engine(batch)

    def _prefetched(self) -> Iterator[tuple[Batch, State | None]]:
        self._prefetcher = prefetcher = BatchPrefetcher(
            _divide_reading(self.data, self.ranks, self.work_dir),
            global_rows=self.global_rows,
            rank=self.ranks.data_rank,
            world=self.ranks.data_world,
            settings=self._prefetch,
            state=self._state,
        )
        prefetcher.warm_up()
        for batch in prefetcher:
            yield batch, prefetcher.state_dict()

    def _read(self) -> Iterator[tuple[Batch, State | None]]:
        data = _divide_reading(self.data, self.ranks, self.work_dir)
        if isinstance(data, DirectData) and data.exchange is not None:
            data = replace(data, exchange=replace(data.exchange, timeout_s=data.loader_timeout_s))
        stream = data.open()
        if self._state is not None:
            stream.load_state_dict(self._state)
        try:
            while True:
                batch = stream.next_batch(self.global_rows, self.ranks.data_rank, self.ranks.data_world)
                yield batch, stream.state_dict()
        finally:
            stream.close()


def _divide_reading(data: RowData, ranks: RankInfo, work_dir: Path) -> RowData:
    """Divide the reading of documents among the ranks, which must all call this at the same time; rows stay the same.

    Ranks whose run folder is on a disk of their own cannot exchange tokens: then each reads everything.
    """
    if not isinstance(data, DirectData) or ranks.world == 1 or not dist.is_initialized():
        return data
    folder, problem = broadcast_object(_new_exchange(work_dir) if ranks.first else ("", ""))
    if problem:
        raise CheckpointError(f"{folder} cannot be made ({problem}): ranks share tokens there. Check the run folder.")
    if not all(all_gather_object(Path(folder).is_dir())):
        if ranks.first:
            _log.warning("%s is not seen by every rank: each rank reads and tokenizes all of the data. Put the run "
                        "folder on a shared file system, or prepare the data.", work_dir)  # fmt: skip
        return data
    return replace(data, exchange=ExchangeSettings(folder, ranks.rank, ranks.world))


def _remove(folder: Path) -> None:
    """Remove a folder into which other ranks may still write: a file that appears meanwhile keeps it from going."""
    for _ in range(_ATTEMPTS_TO_REMOVE):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


def _new_exchange(work_dir: Path) -> tuple[str, str]:
    """A new folder for every start, so that no rank reads old files; and why it could not be made, or \"\"."""
    parent = work_dir / names.DATA_EXCHANGE
    folder = parent / uuid.uuid4().hex
    try:
        shutil.rmtree(parent, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        return str(folder), str(error.strerror)
    return str(folder), ""


def to_engine(batch: Batch) -> Tensors:
    """Input ids, labels and document lengths as the engine's train module reads them; it splits batches along rows."""
    tokens = torch.from_numpy(batch.tokens.astype(np.int64))
    tensors: Tensors = {"input_ids": tokens, "labels": next_token_labels(batch)}
    lengths = [np.diff(cu) for cu in batch.cu_doc_lens]
    if any(len(row) > 1 for row in lengths):
        doc_lens = torch.zeros(len(lengths), max(len(row) for row in lengths), dtype=torch.int32)
        for r, row in enumerate(lengths):
            doc_lens[r, : len(row)] = torch.from_numpy(row)
        tensors |= {"doc_lens": doc_lens, "max_doc_lens": [int(row.max()) for row in lengths]}
    return tensors
