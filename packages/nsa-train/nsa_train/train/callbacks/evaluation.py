"""Callback that evaluates loss and accuracy on held-out rows, the same rows every time.

An evaluation that fails is reported and training continues: the checkpoint of its step has been started before it, and
the next evaluation tries again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from nsa.errors import DataError, NSAError
from nsa_train.data.rows.batch import Batch, EndOfData
from nsa_train.data.rows.specs import RowData
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine import Callback
from nsa_train.train.engine.data_loader import to_engine
from nsa_train.train.host_collectives import HostCollectives

# What reading or a forward pass raises; torch reports memory, shapes and devices by RuntimeError.
_FAILURES = (NSAError, OSError, RuntimeError, ValueError)


class EvaluationResult(NamedTuple):
    step: int
    val_loss: float
    tokens: int
    seconds: float
    val_accuracy: float
    """Share of the tokens that are the model's most likely token."""


@dataclass
class EvaluationCallback(Callback):
    data: RowData
    rows: int
    """Rows of one forward pass, over all ranks."""
    batches: int
    every: int
    ranks: RankInfo
    collectives: HostCollectives
    emit: Callable[[EvaluationResult], None]
    report_failure: Callable[[str | None], None]
    """Called on every rank when an evaluation failed on any; None on ranks that did not fail themselves."""
    stay_alive: Callable[[], None]
    _kept: list[Batch] = field(default_factory=list)
    _last_step: int = -1

    def post_step(self) -> None:
        if self.step % self.every == 0:
            self._evaluate()

    def post_train(self) -> None:
        if self.step != self._last_step and self.step == self.trainer.max_steps:
            self._evaluate()

    def _evaluate(self) -> None:
        """All ranks synchronize failures before the forward passes, which contain collectives, and after them."""
        began = time.perf_counter()
        self._last_step = self.step
        problem = None
        try:
            self._kept = self._kept or self._read()
        except _FAILURES as error:
            problem = _describe(error)
        (failed,) = self.collectives.any([problem is not None])
        mine = [0.0, 0.0, 0.0]
        if not failed:
            try:
                mine = self._sum_scores()
            except _FAILURES as error:
                problem = _describe(error)
            (failed,) = self.collectives.any([problem is not None])
        if failed:
            self.report_failure(problem)
            return
        nats, tokens, hits = self.collectives.sum(mine)
        counted = max(1.0, tokens)
        seconds = time.perf_counter() - began
        self.emit(EvaluationResult(self.step, nats / counted, int(tokens), seconds, hits / counted))

    def _sum_scores(self) -> list[float]:
        """Nats, tokens and hits of this rank. Ranks that share a row have different tokens of it."""
        totals = torch.zeros(3, dtype=torch.float64)
        for batch in self._kept:
            sums = self.trainer.train_module.score_batch(to_engine(batch))
            totals += torch.stack([value.double() for value in sums]).cpu()
            self.stay_alive()
        nats, tokens, hits = totals.tolist()
        return [nats, tokens, hits]

    def _read(self) -> list[Batch]:
        """Batches are kept in memory: finding a held-out split of 0.1 % means reading a thousand times as much."""
        stream, batches = self.data.open(), list[Batch]()
        try:
            for _ in range(self.batches):
                batches.append(stream.next_batch(self.rows, self.ranks.data_rank, self.ranks.data_world))
        except EndOfData:
            if not batches:
                raise DataError(
                    f"{self.data} holds less than one batch of {self.rows} rows to evaluate on. Raise data.held_out, "
                    f"or set train.eval_every=0."
                ) from None
        return batches


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
