"""docs/EVAL.md: its commands and its Python example run on a small model; those of the harness name what exists."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nsa_train.cli.main import app
from nsa_train.infer.evaluation.far_tasks import _CANDIDATES, _PAIRS, BUILT_IN, CHAINS, FAR_TASKS, HOPS
from nsa_train.record.evaluations import read_evaluations
from tests.docs.blocks import blocks, nsa_commands, unknown_words
from tests.trained_runs import save_run, settings

PAGE = Path(__file__).parents[2] / "docs" / "EVAL.md"
TEXT = PAGE.read_text(encoding="utf-8")
HARNESS = {"--metadata", "--model_args"}


@pytest.mark.nightly
def test_every_command_and_the_example_run(tmp_path, monkeypatch, capsys):
    """In this process: a new one for every command would spend most of its time on imports."""
    documents = [json.dumps(dict(id=str(n), text=BUILT_IN[n:])) for n in range(20)]
    (tmp_path / "held.jsonl").write_text("\n".join(documents))
    (tmp_path / "README.md").write_text(BUILT_IN)
    data = {"dataset": "local", "path": str(tmp_path / "held.jsonl"), "held_out": 0.4}
    run = tmp_path / "artifacts" / "run"
    save_run(run, settings(data=data))
    save_run(tmp_path / "artifacts" / "dense", settings(data=data, model={"attention": ["dense"]}))
    (run / "events.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    commands = [words for block in blocks(PAGE) if not block.needs for words in nsa_commands(block.code)]
    assert len(commands) >= 6
    for words in commands:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{words}\n{done.output}\n{done.exception!r}"
    (evaluation,) = read_evaluations(run)
    assert set(evaluation.far_tasks) == set(FAR_TASKS)
    assert evaluation.held_out["seq_len"] == 128
    assert evaluation.agreement["rows"] == 8
    (example,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    capsys.readouterr()
    exec(compile(example, str(PAGE), "exec"), {})
    assert len(capsys.readouterr().out.split()) == 2


def test_commands_of_the_harness_parse():
    wanted = [block for block in blocks(PAGE) if block.needs]
    assert {block.needs for block in wanted} == {"install"}
    for block in wanted:
        subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
        for words in nsa_commands(block.code):
            assert unknown_words([word for word in words if word not in HARNESS]) is None


def test_the_table_of_tasks_is_that_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+):", TEXT, re.MULTILINE)
    assert {task: int(n) for task, n in rows} == dict(
        zip(FAR_TASKS, (_CANDIDATES, _CANDIDATES, CHAINS, _PAIRS), strict=True)
    )
    assert (CHAINS, HOPS, _PAIRS) == (4, 3, 16)
