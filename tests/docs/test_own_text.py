"""docs/OWN_TEXT.md: its commands run, one after another, on a folder of files of every kind."""

import json
import re
from pathlib import Path

import pytest

from nsa_train.data.source.file import SUFFIXES
from tests.docs.blocks import ROOT, blocks, nsa_commands, run_blocks, unknown_words

pytest.importorskip("olmo_core", reason="the engine is in the train extra")
pytest.importorskip("transformers", reason="Transformers is in the hf extra")

PAGE = ROOT / "docs" / "OWN_TEXT.md"


def write_texts(folder: Path) -> None:
    words = (ROOT / "docs" / "WALKTHROUGH.md").read_text(encoding="utf-8").split("\n\n")
    (folder / "deep").mkdir(parents=True)
    for number, paragraph in enumerate(words):
        ending = ("md", "txt", "html")[number % 3]
        (folder / "deep" / f"{number}.{ending}").write_text(paragraph, encoding="utf-8")
    (folder / "copy.txt").write_text(words[1], encoding="utf-8")
    (folder / "lines.jsonl").write_text("\n".join(json.dumps({"text": paragraph}) for paragraph in words))
    (folder / "old.txt").write_bytes("naïve café".encode("cp1252"))
    (folder / "scan.pdf").write_bytes(b"%PDF")


@pytest.mark.timeout(600)
@pytest.mark.nightly  # new processes and three training runs; each command has fast tests of its own
def test_every_command_runs(tmp_path):
    write_texts(tmp_path / "my_texts")
    assert len(blocks(PAGE)) >= 5
    run_blocks(PAGE, tmp_path, timeout_s=580)
    summary = json.loads((tmp_path / "artifacts" / "summary.json").read_text())
    assert set(summary["read"]["kinds"]) == {"jsonl", "text", "markdown", "html"}
    assert {"unknown ending", "duplicate documents"} <= set(summary["read"]["skipped"])
    assert summary["read"]["encodings"]["cp1252"]["first"] == ["old.txt"]
    env = json.loads((tmp_path / "artifacts" / "mine_run" / "env.json").read_text())
    assert env["tokenizer"]["vocab_size"] == 257


def test_every_command_exists():
    for block in blocks(PAGE):
        for words in nsa_commands(block.code):
            assert unknown_words(words) is None, words


def test_the_table_names_every_ending():
    rows = re.findall(r"^\| (`\..*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {ending for row in rows for ending in re.findall(r"`(\.[\w.]+)`", row)} == set(SUFFIXES)
