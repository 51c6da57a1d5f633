"""What travels through the data package: a document, and the same document as tokens with its place in the stream."""

import hashlib
from dataclasses import dataclass

import numpy as np

_HASH_RANGE = 2**64


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    text: str


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """One document's place in the global order; the same for every world size.

    `unit` and `row` count along the seeded order, not along the files: `unit` is the place in the epoch's permutation
    of units, `row` the place in that unit's permutation of rows. `documents` and `tokens` were yielded before this one.
    """

    epoch: int
    unit: int
    row: int
    documents: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenDoc:
    """A tokenised document, without the end-of-document token: whoever packs it appends that."""

    doc_id: str
    tokens: np.ndarray
    position: StreamPosition


def is_held_out(doc_id: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split.

    A hash of the id alone: the answer survives another order, another file layout and another machine, and a larger
    fraction holds out everything a smaller one did.
    """
    digest = hashlib.blake2b(doc_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * _HASH_RANGE
