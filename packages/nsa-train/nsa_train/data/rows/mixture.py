"""Data mixture: rows of several prepared sets in fixed proportions, in an order computed from the weights alone.

After any number of rows every set has had its share of them, to within one row. The order has a period of as many rows
as the whole weights add up to, so the set of a row and its place there are a function of the row's number: a mixture
resumes at any row and with any number of ranks, as one prepared set does.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import gcd, lcm
from typing import Protocol

import numpy as np

from nsa.errors import ConfigError
from nsa_train.data.rows.batch import Batch, EndOfData

LONGEST_PERIOD = 10_000


def whole_weights(weights: Mapping[str, float]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportions of these weights, as they are written in decimals.

    Raises ConfigError if they add up to more than `LONGEST_PERIOD`.
    """
    exact = [Fraction(str(weight)) for weight in weights.values()]
    common = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    whole = [weight // gcd(*whole) for weight in whole]
    if sum(whole) > LONGEST_PERIOD:
        raise ConfigError(
            f"the weights of data.mixture are {', '.join(map(str, whole))} in whole numbers, together {sum(whole):,}: "
            f"the order of the sets repeats after so many rows, and must after at most {LONGEST_PERIOD:,}. Write them "
            f"with fewer digits, e.g. 0.7, 0.2 and 0.1."
        )
    return tuple(whole)


@cache
def order_of_sets(weights: tuple[int, ...]) -> np.ndarray:
    """Number of the set of each row of a period (Tijdeman's solution of the chairman assignment problem).

    Among the sets that lag enough, the one that must be next first: then none is ever a row ahead or behind, which the
    set that lags most would not guarantee.
    """
    period, slack = sum(weights), max(2, 2 * len(weights) - 2)
    order = np.empty(period, dtype=np.int32)
    counts = [0] * len(weights)
    for row in range(period):
        lags = [slack * ((row + 1) * weight - period * n) for weight, n in zip(weights, counts, strict=True)]
        lagging = (each for each, lag in enumerate(lags) if lag >= period)
        order[row] = chosen = min(lagging, key=lambda each: ((slack - 1) * period - lags[each]) / weights[each])
        counts[chosen] += 1
    return order


class MixtureOrder:
    """The set of every row, and how many rows of each set come before it."""

    def __init__(self, weights: tuple[int, ...]) -> None:
        """`weights`: see `whole_weights`."""
        self.weights, self._order = weights, order_of_sets(weights)
        chosen = self._order[:, None] == np.arange(len(weights))
        self._before = np.concatenate([np.zeros_like(chosen[:1], np.int64), chosen.cumsum(0)])

    def counts(self, rows: int) -> list[int]:
        """How many of the first rows are of each set."""
        periods, rest = divmod(rows, len(self._order))
        return [periods * weight + int(n) for weight, n in zip(self.weights, self._before[rest], strict=True)]

    def places(self, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Number of the set of each row, and the row's number in that set."""
        periods, rest = np.divmod(row_ids, len(self._order))
        chosen = self._order[rest]
        return chosen, periods * np.array(self.weights)[chosen] + self._before[rest, chosen]


class RowsOfSet(Protocol):
    """What a mixture asks of a set: `PreparedRows`."""

    seq_len: int

    @property
    def identity(self) -> dict[str, object]: ...
    def check_rows(self, first: int, stop: int) -> None: ...
    def rows(self, row_ids: np.ndarray) -> Batch: ...


class MixedRows:
    kind = "mixture"

    def __init__(self, sets: Mapping[str, RowsOfSet], order: MixtureOrder) -> None:
        """`sets` by the names that messages use."""
        self._sets, self._order = dict(sets), order
        self.seq_len = next(iter(self._sets.values())).seq_len

    @property
    def identity(self) -> dict[str, object]:
        """Values that determine the tokens at each position; a cursor is valid only for equal values."""
        sets = [[weight, rows.identity] for weight, rows in zip(self._order.weights, self._sets.values(), strict=True)]
        return {"kind": self.kind, "seq_len": self.seq_len, "sets": sets}

    def check_rows(self, first: int, stop: int) -> None:
        """Raise for rows beyond the last epoch of any set."""
        begins, ends = self._order.counts(first), self._order.counts(stop)
        for (name, rows), begin, end in zip(self._sets.items(), begins, ends, strict=True):
            try:
                rows.check_rows(begin, end)
            except EndOfData as error:
                raise EndOfData(f"{name}, a set of data.mixture, has no more rows: {error}") from error

    def rows(self, row_ids: np.ndarray) -> Batch:
        (chosen, places), parts = self._order.places(row_ids), []
        for number, rows in enumerate(self._sets.values()):
            mine = np.flatnonzero(chosen == number)
            if len(mine):
                parts.append((mine, rows.rows(places[mine])))
        return _joined(parts, row_ids)


def _joined(parts: Sequence[tuple[np.ndarray, Batch]], row_ids: np.ndarray) -> Batch:
    """One batch of the rows of several, each with its places in it."""
    where = np.concatenate([places for places, _ in parts]).argsort()
    batches = [batch for _, batch in parts]
    masks = [np.ones(each.tokens.shape, bool) if each.loss_mask is None else each.loss_mask for each in batches]
    boundaries = [cu for each in batches for cu in each.cu_doc_lens]
    segments = [row for each in batches for row in each.provenance or ()]
    return Batch(
        tokens=np.concatenate([each.tokens for each in batches])[where],
        cu_doc_lens=tuple(boundaries[place] for place in where),
        loss_mask=None if all(each.loss_mask is None for each in batches) else np.concatenate(masks)[where],
        row_ids=row_ids,
        epoch=max(each.epoch for each in batches),
        documents=sum(each.documents for each in batches),
        provenance=tuple(segments[place] for place in where) if segments else None,
        mask_document_ends=batches[0].mask_document_ends,
    )
