"""The runbook is executed: every block in order, in one shell, in a folder that looks like a checkout."""

import subprocess
from pathlib import Path

import pytest

from nsa_train.watch.conditions import CONDITIONS
from tests.docs.blocks import blocks, nsa_commands, run_blocks, unknown_words

ROOT = Path(__file__).parents[2]
RUNBOOK = ROOT / "docs" / "RUNBOOK.md"
BLOCKS = blocks(RUNBOOK)
NEEDS = {"", "gpu", "host", "install"}


def test_blocks_say_what_they_need_in_words_we_know():
    assert {block.needs for block in BLOCKS} <= NEEDS
    assert sum(not block.needs for block in BLOCKS) >= 12


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_block_that_can_run_here_does(tmp_path):
    run_blocks(RUNBOOK, tmp_path, timeout_s=880, new_interpreters=True)


def test_blocks_for_other_machines_parse():
    for block in filter(lambda block: block.needs, BLOCKS):
        checked = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True)
        assert checked.returncode == 0, f"line {block.line}: {checked.stderr}"


def test_commands_and_options_exist():
    commands = [(block.line, words) for block in BLOCKS for words in nsa_commands(block.code)]
    assert len(commands) > 30
    unknown = [(line, *words, reason) for line, words in commands if (reason := unknown_words(words)) is not None]
    assert unknown == []


def test_every_condition_has_its_place_and_its_advice():
    text = RUNBOOK.read_text(encoding="utf-8")
    for name in CONDITIONS:
        assert f'<a id="{name}"></a>' in text, f"run python -m tools.docs.regenerate: {name} is missing"
