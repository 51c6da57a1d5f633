"""The page about export and import is executed."""

from pathlib import Path

import pytest

from tests.docs.blocks import blocks, nsa_commands, run_blocks, unknown_words

PAGE = Path(__file__).parents[2] / "docs" / "EXPORT.md"
COMMANDS = [words for block in blocks(PAGE) for words in nsa_commands(block.code)]


@pytest.mark.timeout(600)
@pytest.mark.nightly  # new processes and a training run; each command has fast tests of its own
def test_every_block_runs(tmp_path, monkeypatch):
    pytest.importorskip("olmo_core", reason="the engine is in the train extra")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_blocks(PAGE, tmp_path, timeout_s=580)


def test_commands_and_options_exist():
    assert len(COMMANDS) >= 5
    assert [words for words in COMMANDS if unknown_words(words) is not None] == []
