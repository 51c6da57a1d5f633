"""The page for the first person with a GPU: what can run here runs, the rest names commands that exist."""

import subprocess
from pathlib import Path

import pytest

from nsa.kernels.choice_text import kernels_text
from nsa.kernels.registry import BRANCHES, BackendChoice
from tests.docs.blocks import blocks, nsa_commands, run_blocks, unknown_words

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "FIRST_GPU.md"
BLOCKS = blocks(PAGE)
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.nightly  # the rehearsal that it runs is tested in parts by test_gpu_check
@pytest.mark.timeout(600)
def test_every_block_that_can_run_here_does(tmp_path):
    assert {block.needs for block in BLOCKS} == {"", "gpu", "install"}
    run_blocks(PAGE, tmp_path, timeout_s=580)
    assert (tmp_path / "artifacts/rehearsal/gpu_check_rehearsal.md").exists()
    assert (tmp_path / "artifacts/first_cpu/model.pt").exists()


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.needs], ids=lambda b: f"line{b.line}-{b.needs}")
def test_blocks_for_a_gpu_parse_and_name_commands_that_exist(block):
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
    for words in nsa_commands(block.code):
        assert unknown_words(words) is None


def test_the_lines_shown_are_those_that_the_commands_print():
    verified = tuple(BackendChoice(branch, "triton", verified=True) for branch in BRANCHES)
    assert f"kernels: {kernels_text(verified)}\n" in TEXT
    assert f"kernels on cuda in bf16: {kernels_text(verified)}\n" in TEXT
    assert "**expected, not recorded**" in TEXT
