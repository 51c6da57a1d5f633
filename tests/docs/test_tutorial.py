"""docs/TUTORIAL.md: a newcomer's commands, run in order in an empty folder, in a process each, as the page has them."""

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks, nsa_commands, run_blocks, unknown_words

PAGE = ROOT / "docs" / "TUTORIAL.md"
MOST_COMMANDS = 10
SHORTER = (
    "train.steps=4 train.warmup_steps=1 train.log_every=2 train.eval_every=4 train.eval_batches=2 train.save_every=4"
)


def lines_of(needs: str) -> list[str]:
    return [line for block in blocks(PAGE) if block.needs == needs for line in block.code.splitlines() if line.strip()]


def test_it_takes_ten_commands_at_most():
    assert 0 < len(lines_of("")) + len(lines_of("install")[1:]) <= MOST_COMMANDS


def test_the_steps_are_those_of_the_issue():
    """Own text, train, watch, evaluate, generate, share: a command for each, and all of them exist."""
    words = [command for line in lines_of("") for command in nsa_commands(line)]
    assert [each[0] for each in words] == [
        "init", "data", "data", "train", "monitor", "report", "eval", "generate", "export",
    ]  # fmt: skip
    assert [problem for each in words if (problem := unknown_words(each))] == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_command_runs_in_an_empty_folder(tmp_path: Path):
    """The run is shorter than the page's; everything else is as printed."""
    shorten = {"nsa train my-run/config.yaml": f"nsa train my-run/config.yaml {SHORTER}"}
    shorten["nsa generate my-run/run"] = "nsa generate my-run/run --max-new-tokens 8"
    shorten["--tasks held_out_loss"] = "--tasks held_out_loss --rows 4"
    run_blocks(PAGE, tmp_path, timeout_s=560, checkout=False, replace=shorten)
    assert (tmp_path / "my-run" / "report.html").is_file()
    assert (tmp_path / "my-model" / "model.safetensors").is_file()


@pytest.mark.nightly
def test_the_whole_run_learns_what_the_page_says(tmp_path: Path):
    run_blocks(PAGE, tmp_path, timeout_s=1800, checkout=False, new_interpreters=True)
    (row,) = (tmp_path / "my-run" / "run" / "val.csv").read_text().splitlines()[-1:]
    assert float(row.split(",")[1]) < 3.5
