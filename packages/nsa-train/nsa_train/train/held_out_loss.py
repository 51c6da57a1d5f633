"""Held-out loss and accuracy: exact means over rows of a data set, in total and by position in the document.

Accuracy is the share of counted tokens that are the model's most likely token. On rows whose loss mask marks answers
it says how many tokens of the answers are right.

`nsa eval` computes them here. The trainer's evaluations sum the same token scores where they are computed
(`nsa_train.train.callbacks.evaluation`): ranks that divide the tokens of a row never hold those of a whole one.

B rows · S tokens · P position buckets
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nsa.model.loss import IGNORE, TokenScores
from nsa_train.data.rows.batch import Batch

_FIRST_BUCKET = 128
"""Positions of the first bucket; every later one begins where the last ended and is as long as all before it."""
_ENDS = torch.tensor([_FIRST_BUCKET << shift for shift in range(48)])

ScoreTokens = Callable[[Batch, Tensor], TokenScores]
"""(batch, labels [B, S]) → scores of every token [B, S]; values without a label are not read."""


class _PositionLoss(NamedTuple):
    """Mean loss of the tokens predicted from positions `begin` to `end` − 1 of their documents."""

    begin: int
    end: int
    tokens: int
    loss: float
    """Nats per token."""
    standard_error: float | None
    """Standard error of the mean; rows are the independent samples, so one row has none."""
    bits_per_byte: float | None
    accuracy: float
    """Share of the tokens that are the model's most likely token."""


@dataclass
class LossSums:
    """Running sums of losses and hits; all means and errors are computed from them at the end."""

    bytes_per_token_V: Tensor | None = None
    """Bytes of text that each token id stands for; None if they are not known."""
    nats: float = 0.0
    tokens: float = 0.0
    hits: float = 0.0
    """Tokens that are the model's most likely token."""
    rows: int = 0
    _sums: Tensor = field(default_factory=lambda: torch.zeros(8, len(_ENDS) + 2, dtype=torch.float64))
    """By bucket, and last for all: nats, tokens, bytes, hits, rows, and over rows nats², nats × tokens, tokens²."""

    def add(self, scores_BS: TokenScores, labels_BS: Tensor, position_BS: Tensor) -> None:
        counted_BS = labels_BS != IGNORE
        losses_BS = scores_BS.losses.cpu().double().masked_fill(~counted_BS, 0)
        hits_BS = scores_BS.hits.cpu() & counted_BS
        self.nats += float(losses_BS.sum())
        self.tokens += float(counted_BS.sum())
        self.hits += float(hits_BS.sum())
        self.rows += len(losses_BS)
        bucket_BS = torch.bucketize(position_BS, _ENDS, right=True)
        nats_BP = _by_bucket(losses_BS, bucket_BS)
        tokens_BP = _by_bucket(counted_BS.double(), bucket_BS)
        bytes_BP = torch.zeros_like(nats_BP)
        if self.bytes_per_token_V is not None:
            bytes_BS = self.bytes_per_token_V[labels_BS.clamp(min=0)] * counted_BS
            bytes_BP = _by_bucket(bytes_BS.double(), bucket_BS)
        hits_BP, rows_BP = _by_bucket(hits_BS.double(), bucket_BS), (tokens_BP > 0).double()
        squares = (nats_BP**2, nats_BP * tokens_BP, tokens_BP**2)
        parts = (nats_BP, tokens_BP, bytes_BP, hits_BP, rows_BP, *squares)
        self._sums += torch.stack([part.sum(0) for part in parts])

    @property
    def loss(self) -> float:
        """Nats per token; 0 without any token."""
        return self.nats / max(1.0, self.tokens)

    @property
    def accuracy(self) -> float:
        """Share of the tokens that are the model's most likely token; 0 without any token."""
        return self.hits / max(1.0, self.tokens)

    @property
    def standard_error(self) -> float | None:
        nats, tokens, _, _, *more = self._sums[:, -1].tolist()
        return _standard_error(nats, tokens, *more)

    @property
    def bits_per_byte(self) -> float | None:
        return _bits_per_byte(self.nats, float(self._sums[2, -1]))

    def by_position(self) -> list[_PositionLoss]:
        """Buckets that hold tokens, nearest position first."""
        parts = []
        for place, sums in enumerate(self._sums.T[:-1].tolist()):
            nats, tokens, n_bytes, hits, *more = sums
            if tokens:
                begin, end = _FIRST_BUCKET << place >> 1 if place else 0, _FIRST_BUCKET << place
                error, per_byte = _standard_error(nats, tokens, *more), _bits_per_byte(nats, n_bytes)
                parts.append(_PositionLoss(begin, end, int(tokens), nats / tokens, error, per_byte, hits / tokens))
        return parts


def held_out_loss(
    batches: Iterable[Batch],
    score_tokens: ScoreTokens,
    *,
    bytes_per_token_V: Tensor | None = None,
    after_batch: Callable[[], None] = lambda: None,
) -> LossSums:
    """Sums over `batches`; `after_batch` is called after each forward pass."""
    sums = LossSums(bytes_per_token_V)
    for batch in batches:
        labels_BS = next_token_labels(batch)
        sums.add(score_tokens(batch, labels_BS), labels_BS, positions_in_documents(batch))
        after_batch()
    return sums


def batch_inputs(batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Token ids [B, S] and cumulative document lengths, rows end to end; None if every row is one document."""
    tokens_BS = torch.from_numpy(batch.tokens.astype(np.int64))
    packed = any(len(cu) > 2 for cu in batch.cu_doc_lens)
    return tokens_BS, torch.from_numpy(batch.flat_cu_doc_lens()) if packed else None


def next_token_labels(batch: Batch) -> Tensor:
    """Labels [B, S]: the next token of the row, or IGNORE where there is none or it does not count in the loss.

    Documents are cut only at the ends of rows, so that every boundary inside a row is the end of a document.
    """
    tokens_BS = torch.from_numpy(batch.tokens.astype(np.int64))
    labels_BS = torch.full_like(tokens_BS, IGNORE)
    labels_BS[:, :-1] = tokens_BS[:, 1:]
    if batch.loss_mask is not None:
        labels_BS[:, :-1].masked_fill_(~torch.from_numpy(batch.loss_mask)[:, 1:], IGNORE)
    if batch.mask_document_ends:
        for label_S, cu in zip(labels_BS, batch.cu_doc_lens, strict=True):
            label_S[torch.from_numpy(cu[1:-1] - 1).long()] = IGNORE
    return labels_BS


def positions_in_documents(batch: Batch) -> Tensor:
    """Position [B, S] of every token since its document began in the row: what a query can see, minus one."""
    position_BS = np.tile(np.arange(batch.tokens.shape[1]), (len(batch.tokens), 1))
    for row_S, cu in zip(position_BS, batch.cu_doc_lens, strict=True):
        row_S -= np.repeat(cu[:-1], np.diff(cu))
    return torch.from_numpy(position_BS)


def _by_bucket(values_BS: Tensor, bucket_BS: Tensor) -> Tensor:
    """Sums of each row by bucket, and of the whole row."""
    sums_BP = values_BS.new_zeros(len(values_BS), len(_ENDS) + 1).scatter_add_(1, bucket_BS, values_BS)
    return torch.cat([sums_BP, values_BS.sum(1, keepdim=True)], 1)


def _bits_per_byte(nats: float, n_bytes: float) -> float | None:
    return nats / math.log(2) / n_bytes if n_bytes else None


def _standard_error(
    nats: float, tokens: float, rows: float, nats2: float, product: float, tokens2: float
) -> float | None:
    """Standard error of nats / tokens, a ratio of sums over rows: tokens of one row are not independent."""
    if rows < 2:
        return None
    mean = nats / tokens
    squares = max(0.0, nats2 - 2 * mean * product + mean**2 * tokens2)
    return math.sqrt(squares * rows / (rows - 1)) / tokens
