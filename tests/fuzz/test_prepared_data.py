"""Fuzz targets: manifests and shards of prepared sets, and tokenizer files.

Oracles: the rows, documents and hashes of the undamaged set, and a tokenizer that was saved and read again.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from nsa.errors import DataError, NSAError
from nsa_train.data.rows.specs import PreparedData
from nsa_train.data.shards.manifest import (
    MANIFEST_NAME,
    TRAIN,
    ShardManifest,
    _parse_manifest,
    find_document,
    first_documents,
    length_stats,
    read_manifest,
    verify_set,
)
from nsa_train.data.shards.reader import ShardReader
from nsa_train.data.tokenizer import ByteTokenizer, load_tokenizer, parse_tokenizer, train_bpe
from nsa_train.storage import StorageFolder
from tests.fuzz.campaign import FuzzCampaign
from tests.fuzz.mutations import edited_folder, edits_of_folder, json_bytes, mutated_bytes, mutated_json
from tests.nsa_train.data.shard_sets import documents, write_set
from tests.trained_runs import files_of

DOCUMENTS = documents(60)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A set of two shards and its files."""
    folder = tmp_path_factory.mktemp("prepared")
    write_set(folder, DOCUMENTS)
    return folder, files_of(folder)


def tokens_by_shard(folder: Path, manifest: ShardManifest) -> Iterator[tuple[str, list[int]]]:
    reader = ShardReader(StorageFolder(str(folder)), manifest=manifest)
    start = 0
    for shard in manifest.splits[TRAIN]:
        out = np.zeros(shard.tokens, manifest.numpy_dtype)
        if shard.tokens:
            reader.copy_window(start, start + shard.tokens, out)
        yield shard.name, out.tolist()
        start += shard.tokens


def rows_of(folder: Path) -> list[Any]:
    stream = PreparedData(str(folder), 32, seed=1, with_provenance=True).open()
    return [(b.tokens.tolist(), b.provenance) for b in (stream.next_batch(2) for _ in range(40))]


def seal(content: Any) -> Any:
    """A manifest whose own hash fits, as anybody with write access can make it."""
    if isinstance(content, dict):
        content.pop("sha256", None)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        content["sha256"] = hashlib.sha256(canonical).hexdigest()
    return content


def test_manifests(fuzz: FuzzCampaign, prepared: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """A damaged manifest is refused; one that was sealed again gives the stored tokens of the shards that it names."""
    folder, files = prepared
    original = _parse_manifest(files[MANIFEST_NAME], "m")
    stored = dict(tokens_by_shard(folder, original))
    good = json.loads(files[MANIFEST_NAME])

    def check(raw: bytes) -> None:
        with edited_folder(folder, files, [[MANIFEST_NAME, "empty", MANIFEST_NAME]]):
            (folder / MANIFEST_NAME).write_bytes(raw)
            place = StorageFolder(str(folder))
            manifest = read_manifest(place)
            assert manifest.fingerprint == hashlib.sha256(_canonical(raw)).hexdigest()
            assert 0 <= manifest.eos_id < manifest.vocab_size
            assert min(min(manifest.totals(split).values()) for split in manifest.splits) >= 0
            assert manifest == original or manifest.fingerprint != original.fingerprint
            if manifest.dtype == original.dtype:
                assert all(tokens == stored[name] for name, tokens in tokens_by_shard(folder, manifest))
            rows_of(folder)
            list(verify_set(place, manifest))
            for split in manifest.splits:
                stats = length_stats(place, manifest, split)
                assert stats.documents == manifest.totals(split)["documents"]
            document = find_document(place, manifest, TRAIN, 3)
            assert document.tokens >= 1
            first_documents(place, manifest, TRAIN, documents=2, max_tokens=10)

    cases = st.one_of(
        mutated_json(good).map(seal).map(json_bytes),
        mutated_json(good["splits"][TRAIN][0])
        .map(lambda shard: seal(good | {"splits": {**good["splits"], TRAIN: [shard, good["splits"][TRAIN][1]]}}))
        .map(json_bytes),
        mutated_json(good).map(json_bytes),
        mutated_bytes(files[MANIFEST_NAME]),
    )
    fuzz.run(cases, check, examples=400, good=[files[MANIFEST_NAME]])


def _canonical(raw: bytes) -> bytes:
    content = json.loads(raw)
    del content["sha256"]
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def test_shards(fuzz: FuzzCampaign, prepared: tuple[Path, dict[str, bytes]]) -> None:
    """Data that is read from a damaged set is what was written, and `nsa data verify` names exactly the damaged
    files."""
    folder, files = prepared
    place = StorageFolder(str(folder))
    manifest = _parse_manifest(files[MANIFEST_NAME], "m")
    rows = rows_of(folder)
    shown = first_documents(place, manifest, TRAIN, documents=60, max_tokens=100)
    assert [document.ids[:-1] for document in shown] == [tokens.tolist() for _, tokens in DOCUMENTS]
    shard_files = [name for name in files if name != MANIFEST_NAME]

    def check(edits: list[list[Any]]) -> None:
        with edited_folder(folder, files, edits):
            changed = {name for name in shard_files if _content(folder / name) != files[name]}
            assert {damaged.name for damaged in verify_set(place, manifest)} == changed
            refused: list[DataError] = []
            for read, expected in (
                (lambda: rows_of(folder), rows),
                (lambda: first_documents(place, manifest, TRAIN, documents=60, max_tokens=100), shown),
                (lambda: dict(tokens_by_shard(folder, manifest)).keys(), {s.name for s in manifest.splits[TRAIN]}),
            ):
                try:
                    assert read() == expected
                except DataError as error:
                    refused.append(error)
            assert bool(refused) == bool(changed)
            for error in refused:
                raise error

    fuzz.run(edits_of_folder(shard_files), check, examples=300, good=[[]], read_seed=json.loads)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


TEXTS = ["hello world", "", "zq<|endoftext|> 漢", "naïve  Größe\n\t12"]


def test_tokenizer_files(fuzz: FuzzCampaign, tmp_path: Path) -> None:
    """Ids are below the vocabulary size, and a tokenizer that was saved and read again gives the same ids."""
    path = tmp_path / "t.json"
    train_bpe(["hello world some words", "naïve Größe 漢字"] * 20, 300, path)
    good = json.loads(path.read_bytes())
    small = good | {"model": good["model"] | {"merges": good["model"]["merges"][:3]}}
    byte = ByteTokenizer().to_json().encode()

    def check(raw: bytes) -> None:
        path.write_bytes(raw)
        tokenizer = load_tokenizer(str(path))
        encoded = tokenizer.encode_batch(TEXTS)
        for ids in encoded:
            assert ids.size == 0 or ids.max() < tokenizer.vocab_size
            tokenizer.decode(ids)
        assert 0 <= tokenizer.eos_id < tokenizer.vocab_size
        try:
            again = parse_tokenizer(tokenizer.to_json().encode(), path, eos_token=tokenizer.eos_id)
        except NSAError as error:
            raise AssertionError("a tokenizer that was loaded cannot be saved") from error
        assert (again.vocab_size, again.fingerprint) == (tokenizer.vocab_size, tokenizer.fingerprint)
        assert [ids.tolist() for ids in again.encode_batch(TEXTS)] == [ids.tolist() for ids in encoded]

    cases = st.one_of(
        mutated_json(small).map(json_bytes), mutated_json(small).map(json_bytes), mutated_bytes(path.read_bytes(), byte)
    )
    fuzz.run(cases, check, examples=500, good=[json_bytes(good), byte])
