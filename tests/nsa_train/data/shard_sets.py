"""Small prepared sets and document streams for tests, made without `prepare`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nsa_train.data.document_stream import StreamPosition, TokenDoc
from nsa_train.data.shards.manifest import MANIFEST_NAME, TRAIN, VALIDATION, ShardManifest
from nsa_train.data.shards.writer import ShardWriter
from nsa_train.storage import StorageFolder

EOS = 256


def documents(count: int, seed: int = 0, longest: int = 90) -> list[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        (f"doc-{seed}-{i}", rng.integers(0, EOS, int(rng.integers(0, longest))).astype(np.uint16)) for i in range(count)
    ]


def write_set(
    path: Path,
    docs: list[tuple[str, np.ndarray]],
    *,
    docs_per_shard: int = 40,
    dtype: str = "uint16",
    tokenizer: str = "test",
) -> ShardManifest:
    folder = StorageFolder(str(path))
    shards = []
    for number, start in enumerate(range(0, len(docs), docs_per_shard)):
        writer = ShardWriter(f"{TRAIN}/{number:05d}-00000", np.dtype(dtype), path / "_scratch")
        for doc_id, tokens in docs[start : start + docs_per_shard]:
            writer.add(doc_id, tokens, EOS)
        shards.append(writer.finish(folder))
    (path / "_scratch").rmdir()
    manifest = ShardManifest(
        vocab_size=257,
        tokenizer_fingerprint=tokenizer,
        eos_id=EOS,
        dtype=dtype,
        made_from={"source": "memory"},
        quarantined=[],
        splits={TRAIN: shards, VALIDATION: []},
    )
    folder.write_bytes(MANIFEST_NAME, manifest.to_bytes())
    return manifest


class MemoryStream:
    """The smallest thing that behaves as a document stream: a list, reordered per epoch."""

    def __init__(self, docs: list[tuple[str, np.ndarray]], *, seed: int = 0, epochs: int = 1) -> None:
        self._docs = docs
        self._seed = seed
        self._epochs = epochs
        self._at = (0, 0)
        self._flow: Iterator[TokenDoc] | None = None

    def __iter__(self) -> "MemoryStream":
        return self

    def __next__(self) -> TokenDoc:
        if self._flow is None:
            self._flow = self._documents()
        return next(self._flow)

    def _documents(self) -> Iterator[TokenDoc]:
        epoch, row = self._at
        while epoch < self._epochs:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._docs))
            for place in range(row, len(order)):
                doc_id, tokens = self._docs[order[place]]
                yield TokenDoc(doc_id, tokens, StreamPosition(epoch, 0, place, 0, 0))
            epoch, row = epoch + 1, 0

    def state_before(self, doc: TokenDoc) -> dict[str, Any]:
        return {"epoch": doc.position.epoch, "row": doc.position.row}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._at[0], "row": self._at[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = (state["epoch"], state["row"])
        self._flow = None
