"""`python -m proofs.drill --chaos` as a command. Minutes of it are played every night; the hour is run by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proofs import import_path
from proofs.drill.__main__ import app
from proofs.drill.chaos.run import unplayable
from proofs.drill.chaos.schedule import make_plan

ROOT = Path(__file__).parents[4]


def chaos(duration: str, seed: int, keep: Path, timeout_s: float) -> tuple[int, dict, str]:
    words = ["--chaos", duration, "--seed", str(seed), "--keep", str(keep)]
    command = [sys.executable, "-m", "proofs.drill", "--json", *words]
    variables = {**os.environ, "PYTHONPATH": import_path()}
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as drill:
        try:
            printed, said = drill.communicate(timeout=timeout_s)
        except KeyboardInterrupt:
            drill.terminate()
            raise
        except subprocess.TimeoutExpired:
            drill.terminate()  # not killed: it has a disk to unmount
            printed, said = drill.communicate()
            pytest.fail(f"not done within {timeout_s:.0f} s: {said}")
    return drill.returncode, json.loads(printed), said


def require_as_planned(verdict: dict, seconds: float, seed: int) -> None:
    """Require the faults in the order that the seed plans: class, step, victim, variant."""
    plan = make_plan(seed, seconds, unplayable())
    played = [(each["fault"], each["step"], each["victim"], each["variant"]) for each in verdict["faults"]]
    assert played == [(each.fault, each.step, each.victim, each.variant) for each in plan.faults]


# Seed 7: a corrupt checkpoint. Seed 47: a launcher is killed while the run recovers from a lost node.
@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("minutes", "seed"), [(2, 7), (5, 47), (5, 1), (5, 2)])
def test_chaos(tmp_path, minutes, seed):
    code, verdict, said = chaos(f"{minutes}m", seed, tmp_path / "kept", timeout_s=2300)
    assert verdict["unmet"] == [], said
    assert code == 0
    assert verdict["holds"]
    assert verdict["same_weights"]
    assert verdict["differing_steps"] == []
    assert 0 < verdict["goodput"] < 1
    require_as_planned(verdict, minutes * 60, seed)
    assert json.loads((tmp_path / "kept" / "verdict.json").read_text()) == verdict
    assert (tmp_path / "kept" / "chaos" / "run" / "events.jsonl").exists(), "the run folder was on a disk of its own"
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if str(tmp_path) in line]
    assert "faults of" in said
    print(said)


@pytest.mark.parametrize("words", [["--only", "sigterm"], ["--nodes"], ["--jobs", "2"]])
def test_options_of_scenarios_are_refused(words):
    result = CliRunner().invoke(app, ["--chaos", "5m", *words])
    assert "--chaos is one run with all faults" in str(result.exception or result.output)
    assert result.exit_code != 0
