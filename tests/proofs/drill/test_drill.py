"""`python -m proofs.drill` as a command: a scenario of every class for every change, all of them every night."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import pytest
from typer.testing import CliRunner

from proofs import import_path
from proofs.drill.__main__ import app
from proofs.drill.harness import DrillProcess
from proofs.drill.result import DrillResult
from proofs.drill.suite import NODE_SCENARIOS, SCENARIOS, DrillSuite, scenario
from tests import fork_server

ROOT = Path(__file__).parents[3]
# One of each class. Those of several nodes take minutes each: they run every night, and so do those that signal a run:
# with ten busy processes per core a run was over before its signal came.
EVERY_CHANGE = (
    "nan_gradient", "slow_rank", "full_disk", "corrupt_shard", "killed_agent", "clock_jump", "damaged_checkpoint",
    "metric_sink_down", "bad_yaml",
)  # fmt: skip
_FORKED = """\
import os, runpy, shlex, sys
from dataclasses import replace
from nsa_train.train.launch import launcher
from nsa_train.train.launch.agent import die_with_parent
from tests.nsa_train.train.launch.stand_in import fork_agents
die_with_parent(os.getppid())
fork_agents()
launch, python = launcher.launch, shlex.split(sys.argv[1])
launcher.launch = lambda settings, *more: launch(replace(settings, command=python + settings.command[1:]), *more)
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Runs a module that dies with the fork server; if it launches ranks, they and their agent are forked, too."""


def drill(*words: str, timeout_s: float) -> list[dict]:
    result = subprocess.run(
        [sys.executable, "-m", "proofs.drill", "--json", *words],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": import_path()}, stdout=subprocess.PIPE, text=True, timeout=timeout_s,
    )  # fmt: skip
    return json.loads(result.stdout)


def start_forked(command: list[str], node: None, variables: dict[str, str], out: BinaryIO) -> fork_server.ForkedProcess:
    words = ["-c", _FORKED, fork_server.command_for(), *command]
    return fork_server.start(words, cwd=ROOT, env=variables, stdout=out, stderr=out)


@contextmanager
def forked_programs() -> Iterator[None]:
    """Programs of the drill are forked from one that has imported torch."""
    fork_server.run(["-c", ""], cwd=ROOT, env={})  # the server is there before several threads want one
    with mock.patch.object(DrillProcess, "_start", staticmethod(start_forked)):
        yield


def test_the_command_kills_a_trainer_and_keeps_its_runs(tmp_path):
    keep = tmp_path / "kept"
    with forked_programs():
        ended = CliRunner().invoke(app, ["--json", "--only", "killed_trainer", "--keep", str(keep)])
    rows, said = json.loads(ended.stdout), ended.stderr
    assert [row["unmet"] for row in rows] == [[]], f"{rows}\n{said}"
    assert ended.exit_code == 0
    (killed,) = rows
    assert killed["detected_by"] == "watchdog: process_gone"
    assert killed["after_s"] >= 2
    assert "bitwise equal" in killed["resumed"]
    assert {"calm", "killed_trainer"} == {path.name for path in keep.iterdir()}
    assert "1 of 1 rows hold" in said


def selected(request, test: str) -> list[str]:
    """The scenarios for which this test was selected."""
    tests = [item for item in request.session.items if getattr(item, "originalname", "") == test]
    return [item.callspec.params["name"] for item in tests]


@pytest.fixture(scope="module")
def forked_rows(request, tmp_path_factory) -> dict[str, DrillResult]:
    folder = tmp_path_factory.mktemp("drill")
    with forked_programs(), DrillSuite(folder, jobs=2) as suite:
        rows = dict(suite.run(selected(request, "test_a_row_of_each_class_holds")))
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]
    return rows


def test_every_class_is_played_for_every_change():
    played = {scenario(name).run.__module__ for name in ("killed_trainer", *EVERY_CHANGE)}
    assert played == {each.run.__module__ for each in SCENARIOS.values()}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", EVERY_CHANGE)
def test_a_row_of_each_class_holds(forked_rows, name):
    assert forked_rows[name].unmet == []


def rows_of(request, test: str, *words: str) -> dict[str, dict]:
    """Run one drill with the scenarios for which this test was selected; their rows by name."""
    names = selected(request, test)
    printed_rows = drill(*words, *(word for name in names for word in ("--only", name)), timeout_s=3500)
    titles = {scenario(name).title: name for name in names}
    return {titles[row["fault"]]: row for row in printed_rows}


@pytest.fixture(scope="module")
def rows(request) -> dict[str, dict]:
    return rows_of(request, "test_a_row_holds")


@pytest.fixture(scope="module")
def rows_of_nodes(request, permitted) -> dict[str, dict]:
    return rows_of(request, "test_a_row_of_several_nodes_holds", "--nodes")


@pytest.mark.nightly  # each process of each run is a new interpreter
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCENARIOS)
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
