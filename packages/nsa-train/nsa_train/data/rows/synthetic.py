"""Synthetic data for tests, smoke runs and experiments. Never used as a fallback for missing data.

Row i is a function of (task, vocabulary, length, seed, i) alone.

- `uniform`: independent random tokens; nothing to learn but the vocabulary size.
- `copy`:    random tokens, a separator, the same tokens again; only the repetition counts in the loss.
- `needle`:  a marked key and value in random tokens, then a query with the key; only the value counts in the loss.

Three tasks of far recall put 16 facts anywhere in random tokens, then at least an eighth of the row without facts, then
16 questions with their answers, which alone count in the loss (chance 1/4):

- `recall`:       a fact is one token that stands for a key and a value; the question is the key.
- `recall_pairs`: a fact is two tokens, key and value.
- `tracking`:     a fact sets a variable to a value or to an earlier variable (two tokens); chains of four.

`SyntheticRows.answer_places` says where the fact lies that answers each counted token.
"""

from typing import NamedTuple

import numpy as np

from nsa.errors import ConfigError
from nsa.options import SYNTHETIC_TASKS, SyntheticTask
from nsa_train.data.permutation import derive_key
from nsa_train.data.rows.batch import Batch
from nsa_train.data.tokenizer import token_dtype

_SMALLEST_VOCAB = 8
_KEY_LEN, _VALUE_LEN = 2, 4
_FACTS = 16
_HOPS = 4  # facts of a chain of `tracking`
_NO_FACTS = 8  # the share of a row, one in so many, between the last fact and the first question
# Ids: facts of one token, then keys (or variables), then values; the rest is filler.
_VALUES = 4  # few, because a model learns every pair of key and value as a token of its own
_FUSED, _KEYS = _FACTS * _VALUES, _FACTS
_FAR = ("recall", "recall_pairs", "tracking")


class AnswerPlace(NamedTuple):
    """Places of the query for a counted token and of its fact."""

    row: int
    """Place of the row in the batch."""
    query: int
    """Position of the token before the counted one, from which it is predicted."""
    fact: int
    """Position of the token that holds the answer."""


class SyntheticRows:
    kind = "synthetic"

    def __init__(self, task: SyntheticTask, *, vocab_size: int, seq_len: int, seed: int) -> None:
        if task not in SYNTHETIC_TASKS:
            raise ConfigError(f"synthetic task {task!r} is unknown. Choose one of {list(SYNTHETIC_TASKS)}.")
        if vocab_size < _SMALLEST_VOCAB:
            raise ConfigError(f"vocab_size is {vocab_size}: synthetic tasks need at least {_SMALLEST_VOCAB}.")
        far = task in _FAR
        if far and vocab_size <= _FUSED + _KEYS + _VALUES:
            raise ConfigError(
                f"vocab_size is {vocab_size}: the {task} task needs more than {_FUSED + _KEYS + _VALUES} ids. Set e.g. "
                f"model.vocab_size=272."
            )
        shortest = {"uniform": 1, "copy": 3, "needle": 2 * (1 + _KEY_LEN + _VALUE_LEN)}.get(task, 8 * _FACTS)
        if seq_len < shortest:
            raise ConfigError(f"seq_len is {seq_len}: the {task} task needs at least {shortest}.")
        self.task = task
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self._seed = seed
        self._dtype = token_dtype(vocab_size)

    @property
    def identity(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "task": self.task,
            "vocab_size": self.vocab_size,
            "seq_len": self.seq_len,
            "seed": self._seed,
            "value_len": _VALUE_LEN,
        }

    def check_rows(self, first: int, stop: int) -> None:
        """Synthetic rows never end."""

    def rows(self, row_ids: np.ndarray) -> Batch:
        shape = (len(row_ids), self.seq_len)
        tokens = np.empty(shape, dtype=self._dtype)
        mask = np.zeros(shape, dtype=bool)
        for r, row in enumerate(row_ids.tolist()):
            self._fill(row, tokens[r], mask[r])
        whole_row = np.asarray([0, self.seq_len], dtype=np.int32)
        return Batch(
            tokens=tokens,
            cu_doc_lens=(whole_row,) * len(row_ids),
            loss_mask=None if self.task == "uniform" else mask,
            row_ids=row_ids,
            epoch=0,
            documents=len(row_ids),
        )

    def answer_places(self, row_ids: np.ndarray) -> list[AnswerPlace]:
        """The fact of every counted token of these rows, in their order; none for `uniform`.

        For `recall` it is the one token of key and value, for `recall_pairs` the value behind its key, for `needle` and
        `copy` the earlier occurrence of the token; for `tracking` the last link alone: what the asked variable was set
        to, a value or another variable, whose own fact lies earlier in the row.
        """
        places = []
        for r, row in enumerate(row_ids.tolist()):
            tokens, mask = np.empty(self.seq_len, dtype=self._dtype), np.zeros(self.seq_len, dtype=bool)
            facts = self._fill(row, tokens, mask)
            counted = np.flatnonzero(mask).tolist()
            places += [AnswerPlace(r, at - 1, fact) for at, fact in zip(counted, facts.tolist(), strict=True)]
        return places

    def _fill(self, row: int, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Write a row and its mask; returns the position of the fact of every counted token."""
        rng = np.random.Generator(np.random.Philox(key=derive_key(self._seed, row)))
        facts: np.ndarray = getattr(self, f"_fill_{self.task}")(rng, tokens, mask)
        return facts

    def _fill_uniform(self, rng: np.random.Generator, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        tokens[:] = rng.integers(0, self.vocab_size, self.seq_len)
        return np.empty(0, dtype=np.int64)

    def _fill_copy(self, rng: np.random.Generator, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        separator = self.vocab_size - 1
        length = (self.seq_len - 1) // 2
        tokens[:] = separator  # a row of even length has one more at its end, not in the loss
        payload = rng.integers(0, separator, length)
        tokens[:length] = payload
        tokens[length + 1 : 2 * length + 1] = payload
        mask[length + 1 : 2 * length + 1] = True
        return np.arange(length)

    def _fill_recall(self, rng: np.random.Generator, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        value = rng.integers(0, _VALUES, _FACTS)
        facts = (np.arange(_FACTS) * _VALUES + value)[:, None]
        return self._hide_and_ask(rng, tokens, mask, facts, np.arange(_FACTS), value)

    def _fill_recall_pairs(self, rng: np.random.Generator, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        value = rng.integers(0, _VALUES, _FACTS)
        facts = np.stack((_FUSED + np.arange(_FACTS), _FUSED + _KEYS + value), 1)
        return self._hide_and_ask(rng, tokens, mask, facts, np.arange(_FACTS), value)

    def _fill_tracking(self, rng: np.random.Generator, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Variables in random order; each chain's first one is set to a value, every other to the one before it."""
        variable = rng.permutation(_FACTS).reshape(-1, _HOPS)
        value = rng.integers(0, _VALUES, len(variable))
        first = np.stack((variable[:, 0], _KEYS + value), 1)
        links = np.stack((variable[:, 1:], variable[:, :-1]), 2).reshape(-1, 2)
        number = np.arange(_FACTS).reshape(-1, _HOPS)
        facts = np.empty((_FACTS, 2), dtype=np.int64)
        facts[number[:, 0]], facts[number[:, 1:].ravel()] = first, links
        answer = np.empty(_FACTS, dtype=np.int64)
        answer[variable] = value[:, None]
        # Chains are mixed, but within a chain a variable is set before it is read.
        order = np.argsort(rng.permutation(np.repeat(np.arange(len(variable)), _HOPS)), kind="stable")
        mixed = np.empty_like(facts)
        mixed[order] = facts
        return self._hide_and_ask(rng, tokens, mask, _FUSED + mixed, mixed[:, 0], answer)

    def _hide_and_ask(
        self,
        rng: np.random.Generator,
        tokens: np.ndarray,
        mask: np.ndarray,
        facts: np.ndarray,
        key: np.ndarray,
        answer: np.ndarray,
    ) -> np.ndarray:
        """Facts in the order given, at random places; then the keys 0 to 15 in random order, each with its answer.

        key: of each fact. Returns the last token of the fact of every question.
        """
        questions = self.seq_len - 2 * _FACTS
        room = questions - self.seq_len // _NO_FACTS
        tokens[:] = rng.integers(_FUSED + _KEYS + _VALUES, self.vocab_size, self.seq_len)
        width = facts.shape[1]
        place = np.sort(rng.choice(room // width, _FACTS, replace=False)) * width
        for i in range(width):
            tokens[place + i] = facts[:, i]
        asked = rng.permutation(_FACTS)
        tokens[questions::2] = _FUSED + asked
        tokens[questions + 1 :: 2] = _FUSED + _KEYS + answer[asked]
        mask[questions + 1 :: 2] = True
        last = np.empty(_FACTS, dtype=np.int64)
        last[key] = place + width - 1
        return last[asked]

    def _fill_needle(self, rng: np.random.Generator, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        marker, query = self.vocab_size - 1, self.vocab_size - 2
        tokens[:] = rng.integers(0, query, self.seq_len)
        needle = 1 + _KEY_LEN + _VALUE_LEN
        question = self.seq_len - needle
        place = int(rng.integers(0, question - needle + 1))
        tokens[place] = marker
        tokens[question] = query
        tokens[question + 1 :] = tokens[place + 1 : place + needle]
        mask[question + 1 + _KEY_LEN :] = True
        return np.arange(place + 1 + _KEY_LEN, place + needle)
