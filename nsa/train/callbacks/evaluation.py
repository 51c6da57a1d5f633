"""Loss on rows that training never sees, the same rows every time."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from olmo_core.train.callbacks import Callback

from nsa.data.rows.batch import Batch, EndOfData
from nsa.data.rows.opening import RowData
from nsa.errors import DataError
from nsa.model.loss import IGNORE
from nsa.train.loader import to_engine
from nsa.train.ranks import Agreement, Ranks


class Verdict(NamedTuple):
    step: int
    val_loss: float
    tokens: int
    seconds: float


@dataclass
class Evaluation(Callback):
    data: RowData
    rows: int
    """Of one forward pass, over all ranks."""
    batches: int
    every: int
    ranks: Ranks
    agreement: Agreement
    say: Callable[[Verdict], None]
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
        began = time.perf_counter()
        self._last_step = self.step
        nats, tokens = 0.0, 0.0
        for batch in self._kept or self._read():
            loss, count = self._score(to_engine(batch))
            nats, tokens = nats + loss, tokens + count
            self.stay_alive()
        nats, tokens = self.agreement.sum([nats, tokens])
        self.say(Verdict(self.step, nats / max(1.0, tokens), int(tokens), time.perf_counter() - began))

    def _score(self, tensors: dict[str, Any]) -> tuple[float, float]:
        labels = tensors.pop("labels")
        output = self.trainer.train_module.eval_batch(tensors, labels=labels)
        counted = labels != IGNORE
        losses = output.ce_loss.double().cpu().masked_fill(~counted, 0)
        return float(losses.sum()), float(counted.sum())

    def _read(self) -> list[Batch]:
        """Kept in memory: a held-out split of 0.1 % is found by reading a thousand times as much."""
        stream = self.data.open()
        try:
            for _ in range(self.batches):
                self._kept.append(stream.next_batch(self.rows, self.ranks.rank, self.ranks.world))
        except EndOfData:
            if not self._kept:
                raise DataError(
                    f"{self.data} gives not even one batch of {self.rows} rows to evaluate on. Raise data.held_out, or "
                    f"set train.eval_every=0."
                ) from None
        return self._kept
