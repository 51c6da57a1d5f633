"""Tokenizer files, manifests and plans with wrong values: a good load or an error of ours, never another exception."""

import copy
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nsa.cli.main import app
from nsa.data.rows.specs import PreparedData
from nsa.data.shards.inspect import find_document, length_stats, verify_set
from nsa.data.shards.manifest import MANIFEST_NAME, read_manifest
from nsa.data.tokenizer import load_tokenizer, train_bpe
from nsa.errors import ConfigError, DataError, NSAError
from nsa.storage import StorageFolder
from tests.data.shard_sets import documents, write_set

VALUES: list[Any] = [None, True, -1, 0, 3, 2**31, 2**63, 2**70, 1e400, 0.5, "", "x", "\ud800", "../up", "uint32"]
VALUES += [[], {}, [1], ["a"], {"a": 1}, {"type": "Nope"}, [[]], {"Regex": "("}]
VALUES += [{"type": "Precompiled", "precompiled_charsmap": "AQAAAA=="}]


def mutated(good: Any, rng: random.Random) -> Any:
    """One value replaced by another, or left out."""
    changed = copy.deepcopy(good)
    *parents, last = rng.choice([path for path in _paths(changed) if path])
    node = changed
    for key in parents:
        node = node[key]
    if rng.random() < 0.25:
        del node[last]
    else:
        node[last] = rng.choice(VALUES)
    return changed


def _paths(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    items = (
        list(node.items())[:30] if isinstance(node, dict) else list(enumerate(node))[:3] if type(node) is list else []
    )
    for key, child in items:
        yield from _paths(child, (*at, key))


def outcomes(path: Path, contents: Iterator[bytes], use: Callable[[], None]) -> Counter[str]:
    seen: Counter[str] = Counter()
    for content in contents:
        path.write_bytes(content)
        try:
            use()
            seen["good"] += 1
        except NSAError as error:
            seen[type(error).__name__] += 1
    return seen


def test_300_mutated_tokenizer_files(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    train_bpe(["hello world some words", "naïve Größe 漢字"] * 20, 300, path)
    good, rng = path.read_bytes(), random.Random(1)

    def contents() -> Iterator[bytes]:
        for number in range(300):
            raw = json.dumps(mutated(json.loads(good), rng)).encode()
            yield raw[: rng.randrange(len(raw))] if number % 10 == 0 else raw
        yield b"[" * 100_000  # deeper than the parser goes
        yield b"\xff\xfe"
        yield b""

    def use() -> None:
        tokenizer = load_tokenizer(str(path))
        for ids in tokenizer.encode_batch(["hello world", "", "zq<|endoftext|> 漢"]):
            assert ids.size == 0 or ids.max() < tokenizer.vocab_size
            tokenizer.decode(ids)

    seen = outcomes(path, contents(), use)
    assert seen["good"] > 30
    assert seen["ConfigError"] > 100
    assert set(seen) == {"good", "ConfigError"}


@pytest.mark.parametrize("sealed", [True, False], ids=["with a hash that fits", "as damaged"])
def test_300_mutated_manifests(tmp_path: Path, sealed: bool) -> None:
    write_set(tmp_path, documents(60))
    path, rng = tmp_path / MANIFEST_NAME, random.Random(2)
    good = json.loads(path.read_text())

    def contents() -> Iterator[bytes]:
        for _ in range(300):
            content = mutated(good, rng)
            if sealed:
                content.pop("sha256", None)
                canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
                content["sha256"] = hashlib.sha256(canonical).hexdigest()
            yield json.dumps(content).encode()
        yield b"[" * 100_000
        yield b"[]"

    def use() -> None:
        folder = StorageFolder(str(tmp_path))
        manifest = read_manifest(folder)
        stream = PreparedData(str(tmp_path), 32, seed=1, with_provenance=True).open()
        for _ in range(10):
            stream.next_batch(2)
        list(verify_set(folder, manifest))
        for split in manifest.splits:
            length_stats(folder, manifest, split)
        find_document(folder, manifest, "train", 3)
        assert isinstance(manifest.made_from, dict)

    seen = outcomes(path, contents(), use)
    assert seen["DataError"] > 150
    assert set(seen) <= {"good", "DataError"}


def test_a_shard_cannot_lie_outside_its_set(tmp_path: Path) -> None:
    write_set(tmp_path / "set", documents(60))
    path = tmp_path / "set" / MANIFEST_NAME
    content = json.loads(path.read_text())
    content["splits"]["train"][0]["name"] = "../other/000"
    del content["sha256"]
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="name"):
        read_manifest(StorageFolder(str(tmp_path / "set")))


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000, '"x"'])
def test_a_mutated_plan_of_an_unfinished_preparation(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "1", "text": "words"}\n')
    (tmp_path / "out" / "_work").mkdir(parents=True)
    (tmp_path / "out" / "_work" / "plan.json").write_text(content)
    arguments = ["data", "prepare", str(tmp_path / "a.jsonl"), str(tmp_path / "out"), "--tokenizer", "byte"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, DataError)


@pytest.mark.parametrize("more", [["--document", "0"], ["--shards"]])
def test_a_split_that_is_not_there_is_refused(tmp_path: Path, more: list[str]) -> None:
    write_set(tmp_path, documents(20))
    result = CliRunner().invoke(app, ["data", "inspect", str(tmp_path), "--split", "nope", *more])
    assert isinstance(result.exception, ConfigError)
    assert "validation" in str(result.exception)
