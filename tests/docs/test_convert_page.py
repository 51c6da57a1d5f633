"""The page about conversion is executed."""

from pathlib import Path

import pytest

from tests.docs.blocks import blocks, nsa_commands, run_blocks, unknown_words

PAGE = Path(__file__).parents[2] / "docs" / "CONVERT.md"
COMMANDS = [words for block in blocks(PAGE) for words in nsa_commands(block.code)]


@pytest.mark.timeout(900)
@pytest.mark.nightly  # new processes and a training run; conversion has fast tests of its own
def test_every_block_runs(tmp_path, monkeypatch):
    pytest.importorskip("olmo_core", reason="the engine is in the train extra")
    pytest.importorskip("transformers", reason="Transformers is in the hf extra")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run_blocks(PAGE, tmp_path, timeout_s=880)


def test_commands_and_options_exist():
    assert len(COMMANDS) >= 8
    assert [words for words in COMMANDS if unknown_words(words) is not None] == []
