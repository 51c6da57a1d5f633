"""Synthetic data for tests, smoke runs and experiments. Never used as a fallback for missing data.

Row i is a function of (task, vocabulary, length, seed, i) alone.

- `uniform`: independent random tokens; nothing to learn but the vocabulary size.
- `copy`:    random tokens, a separator, the same tokens again; only the repetition counts in the loss.
- `needle`:  a marked key and value in random tokens, then a query with the key; only the value counts in the loss.
"""

import numpy as np

from nsa.data.permutation import derive_key
from nsa.data.rows.batch import Batch
from nsa.data.tokenizer import token_dtype
from nsa.errors import ConfigError
from nsa.options import SYNTHETIC_TASKS, SyntheticTask

_SMALLEST_VOCAB = 8
_KEY_LEN = 2


class SyntheticRows:
    kind = "synthetic"

    def __init__(self, task: SyntheticTask, *, vocab_size: int, seq_len: int, seed: int, value_len: int = 4) -> None:
        if task not in SYNTHETIC_TASKS:
            raise ConfigError(f"synthetic task {task!r} is unknown. Choose one of {list(SYNTHETIC_TASKS)}.")
        if vocab_size < _SMALLEST_VOCAB:
            raise ConfigError(f"vocab_size is {vocab_size}: synthetic tasks need at least {_SMALLEST_VOCAB}.")
        shortest = {"uniform": 1, "copy": 3, "needle": 2 * (1 + _KEY_LEN + value_len)}[task]
        if seq_len < shortest:
            raise ConfigError(f"seq_len is {seq_len}: the {task} task needs at least {shortest}.")
        self.task = task
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self._seed = seed
        self._value_len = value_len
        self._dtype = token_dtype(vocab_size)

    @property
    def identity(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "task": self.task,
            "vocab_size": self.vocab_size,
            "seq_len": self.seq_len,
            "seed": self._seed,
            "value_len": self._value_len,
        }

    def check_rows(self, first: int, stop: int) -> None:
        """Synthetic rows never end."""

    def rows(self, row_ids: np.ndarray) -> Batch:
        shape = (len(row_ids), self.seq_len)
        tokens = np.empty(shape, dtype=self._dtype)
        mask = np.zeros(shape, dtype=bool)
        for r, row in enumerate(row_ids.tolist()):
            rng = np.random.Generator(np.random.Philox(key=derive_key(self._seed, row)))
            getattr(self, f"_fill_{self.task}")(rng, tokens[r], mask[r])
        whole_row = np.asarray([0, self.seq_len], dtype=np.int32)
        return Batch(
            tokens=tokens,
            cu_doc_lens=(whole_row,) * len(row_ids),
            loss_mask=None if self.task == "uniform" else mask,
            row_ids=row_ids,
            epoch=0,
            documents=len(row_ids),
        )

    def _fill_uniform(self, rng: np.random.Generator, tokens: np.ndarray, mask: np.ndarray) -> None:
        tokens[:] = rng.integers(0, self.vocab_size, self.seq_len)

    def _fill_copy(self, rng: np.random.Generator, tokens: np.ndarray, mask: np.ndarray) -> None:
        separator = self.vocab_size - 1
        length = (self.seq_len - 1) // 2
        tokens[:] = separator  # a row of even length has one more at its end, not in the loss
        payload = rng.integers(0, separator, length)
        tokens[:length] = payload
        tokens[length + 1 : 2 * length + 1] = payload
        mask[length + 1 : 2 * length + 1] = True

    def _fill_needle(self, rng: np.random.Generator, tokens: np.ndarray, mask: np.ndarray) -> None:
        marker, query = self.vocab_size - 1, self.vocab_size - 2
        tokens[:] = rng.integers(0, query, self.seq_len)
        needle = 1 + _KEY_LEN + self._value_len
        question = self.seq_len - needle
        place = int(rng.integers(0, question - needle + 1))
        tokens[place] = marker
        tokens[question] = query
        tokens[question + 1 :] = tokens[place + 1 : place + needle]
        mask[question + 1 + _KEY_LEN :] = True
