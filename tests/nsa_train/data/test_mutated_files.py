"""Manifests, splits and plans with wrong values are refused; `tests/fuzz/test_prepared_data.py` draws other ones."""

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nsa.errors import ConfigError, DataError
from nsa_train.cli.main import app
from nsa_train.data.shards.manifest import MANIFEST_NAME, read_manifest
from nsa_train.storage import StorageFolder
from tests.nsa_train.data.shard_sets import documents, write_set


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
