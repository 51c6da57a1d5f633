"""`python -m proofs.drill` as a command: a scenario of every class for every change, all of them every night."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from proofs import import_path
from proofs.drill.suite import NODE_SCENARIOS, SCENARIOS, scenario

ROOT = Path(__file__).parents[3]
# One of each class, beside the two of the first test. Those of several nodes take minutes each: they run every night,
# and so do those that signal a run: with ten busy processes per core a run was over before its signal came.
EVERY_CHANGE = (
    "nan_gradient", "slow_rank", "killed_rank", "corrupt_shard", "killed_agent", "clock_jump", "damaged_checkpoint",
    "metric_sink_down", "bad_yaml",
)  # fmt: skip


def drill(*words: str, timeout_s: float) -> tuple[int, list[dict], str]:
    result = subprocess.run(
        [sys.executable, "-m", "proofs.drill", "--json", *words],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": import_path()}, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    return result.returncode, json.loads(result.stdout), result.stderr


def test_a_killed_trainer_and_a_full_disk(tmp_path):
    keep = tmp_path / "kept"
    code, rows, said = drill("--only", "full_disk", "--only", "killed_trainer", "--keep", str(keep), timeout_s=580)
    assert [row["unmet"] for row in rows] == [[], []], f"{rows}\n{said}"
    assert code == 0
    killed, full = rows
    assert killed["detected_by"] == "watchdog: process_gone"
    assert killed["after_s"] >= 2
    assert "bitwise equal" in killed["resumed"]
    assert full["left_behind"].startswith("exit 22, verified checkpoint")
    assert {"calm", "full_disk", "killed_trainer"} == {path.name for path in keep.iterdir()}
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if str(keep) in line]
    assert "2 of 2 rows hold" in said


def rows_of(request, test: str, *words: str) -> dict[str, dict]:
    """Run one drill with the scenarios for which this test was selected; their rows by name."""
    tests = [item for item in request.session.items if getattr(item, "originalname", "") == test]
    names = [item.callspec.params["name"] for item in tests]
    _, found, _ = drill(*words, *(word for name in names for word in ("--only", name)), timeout_s=3500)
    titles = {scenario(name).title: name for name in names}
    return {titles[row["fault"]]: row for row in found}


@pytest.fixture(scope="module")
def rows(request) -> dict[str, dict]:
    return rows_of(request, "test_a_row_holds")


@pytest.fixture(scope="module")
def rows_of_nodes(request, permitted) -> dict[str, dict]:
    return rows_of(request, "test_a_row_of_several_nodes_holds", "--nodes")


def test_every_class_is_played_for_every_change():
    played = {scenario(name).run.__module__ for name in ("full_disk", "killed_trainer", *EVERY_CHANGE)}
    assert played == {each.run.__module__ for each in SCENARIOS.values()}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name", [name if name in EVERY_CHANGE else pytest.param(name, marks=pytest.mark.nightly) for name in SCENARIOS]
)
def test_a_row_holds(rows, name):
    assert rows[name]["unmet"] == []
    assert rows[name]["holds"]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NODE_SCENARIOS)
def test_a_row_of_several_nodes_holds(rows_of_nodes, name):
    assert rows_of_nodes[name]["unmet"] == []
    assert rows_of_nodes[name]["holds"]
    assert rows_of_nodes[name]["continued_s"] is not None
