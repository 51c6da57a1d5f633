"""docs/GENERATE.md: its commands exist, those that need no training run, and its Python example runs as it stands."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="generation is in the hf extra")

from tests.docs.blocks import ROOT, blocks, nsa_commands, run_blocks, unknown_words
from tests.trained_runs import write_run

PAGE = ROOT / "docs" / "GENERATE.md"
BLOCKS = blocks(PAGE)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A folder with a tiny model where the page has the quickstart's."""
    folder = tmp_path_factory.mktemp("checkout")
    write_run(folder / "artifacts" / "cpu_quickstart")
    shutil.copy(ROOT / "README.md", folder)
    return folder


@pytest.mark.parametrize("words", [words for block in BLOCKS for words in nsa_commands(block.code)], ids=" ".join)
def test_commands_and_options_exist(words):
    assert unknown_words(words) is None


def test_blocks_say_what_they_need_and_parse():
    assert {block.needs for block in BLOCKS} == {"", "train", "serve"}
    for block in BLOCKS:
        subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)


@pytest.mark.nightly
def test_blocks_that_need_nothing_run(checkout):
    run_blocks(PAGE, checkout, timeout_s=280)


@pytest.mark.nightly
def test_the_python_example_runs_as_it_stands(checkout, monkeypatch, capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(checkout)
    exec(compile(example, PAGE.name, "exec"), {})
    assert capsys.readouterr().out
