"""ops/slurm/train.sbatch and `nsa data prepare` on a real Slurm: two virtual nodes on loopback, real small work."""

import subprocess
import sys
from pathlib import Path

import pytest

from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.data.prepare.plan import make_plan
from nsa_train.data.prepare.run import prepare
from nsa_train.data.shards.manifest import MANIFEST_NAME, read_manifest
from nsa_train.record.events import EventKind, read_events
from nsa_train.record.heartbeat_record import last_beat, read_beats
from nsa_train.shipped import CORPUS
from nsa_train.storage import StorageFolder
from nsa_train.train.launch.launcher import LOGS
from tests.nsa_train.train.runs import ROOT, write_config
from tests.ops.needs import programs, root
from tests.ops.slurm_cluster import SlurmCluster, SlurmJob

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]  # several waits of at most slurm_cluster.WAIT_S
SCRIPT = ROOT / "ops/slurm/train.sbatch"
STEPS = 100
"""Enough for a signal to arrive before the last one."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def cluster():
    commands = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sinfo", "scontrol", "scancel", "srun")
    root()
    cluster = SlurmCluster(programs(*commands))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
    assert cluster.processes() == []


class Training:
    """The template with a small model, in a folder of its own."""

    def __init__(self, cluster: SlurmCluster, at: Path, *words: str, options: tuple[str, ...] = ()) -> None:
        self.cluster, self.folder, self.log = cluster, at / "run", at / "slurm.log"
        self.job: SlurmJob = cluster.submit(
            SCRIPT, "--gpus-per-node=2", "--cpus-per-task=2", f"--output={self.log}", *options,
            words=[str(write_config(at)), f"train.out_dir={self.folder}", *words],
            PREFLIGHT="0", GRACE="60", VENV=sys.prefix,
        )  # fmt: skip

    def wait_for_steps(self, more: int = 3) -> int:
        goal = self.step() + more
        self.cluster.wait_for(f"step {goal}", lambda: self.step() >= goal or self.over())
        assert not self.over(), self.said()
        return goal

    def over(self) -> bool:
        return self.job.facts().get("JobState") in ENDED

    def end(self) -> tuple[str, str, str]:
        facts = self.job.wait_for(*ENDED)
        return facts["JobState"], facts["ExitCode"], facts["Restarts"]

    def step(self, rank: int = 0) -> int:
        beat = last_beat(self.folder / names.heartbeat(rank), names.PROGRESS)
        return beat.step if beat else 0

    def starts(self) -> list[int]:
        """The step at which each life of the run began."""
        return [beat.step for beat in read_beats(self.folder / names.heartbeat(0)) if beat.msg == names.START]

    def steps(self) -> list[int]:
        return [beat.step for beat in read_beats(self.folder / names.heartbeat(0)) if beat.msg == names.PROGRESS]

    def newest(self) -> int | None:
        return CheckpointFolder(self.folder / names.CHECKPOINTS).find_resumable().step

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def test_a_job_warned_of_its_time_limit_saves_and_is_requeued_until_it_finishes(cluster, tmp_path):
    run = Training(cluster, tmp_path, f"train.steps={STEPS}")
    run.wait_for_steps(1)
    cluster.ask("scancel", "--batch", "--signal=USR1", run.job.number)  # what --signal=B:USR1@300 sends
    assert run.end() == ("COMPLETED", "0:0", "1"), run.said()
    first, second = run.starts()
    assert first == 0
    assert 0 < second < STEPS
    assert run.steps() == list(range(1, STEPS + 1)), "no step is lost or done twice"
    assert run.newest() == STEPS
    assert [beat.msg for beat in read_beats(run.folder / names.heartbeat(1))].count(names.START) == 2
    stops = [event.step for event in read_events(run.folder) if event.kind == EventKind.STOP]
    assert stops == [second, second], "the ranks' record and the launcher's"
    assert sorted(path.name for path in (run.folder / LOGS).iterdir()) == ["cycle0", "cycle1"], "none began wrongly"
    assert "requeued" in run.said()


def test_a_preempted_job_is_requeued_and_continues(cluster, tmp_path):
    run = Training(cluster, tmp_path, f"train.steps={STEPS}")
    run.wait_for_steps(1)
    script = tmp_path / "urgent.sh"
    script.write_text("#!/bin/sh\nsleep 1\n")
    urgent = cluster.submit(script, "--partition=urgent", "--nodes=2", "--exclusive", f"--output={tmp_path}/urgent.log")
    urgent.wait_for("COMPLETED")
    assert run.end() == ("COMPLETED", "0:0", "1"), run.said()
    assert len(run.starts()) == 2
    assert run.steps() == list(range(1, STEPS + 1))


def test_a_lost_node_is_replaced_by_another(cluster, tmp_path):
    run = Training(cluster, tmp_path, "train.steps=3000", "train.save_every=20")
    cluster.wait_for("a checkpoint", lambda: (run.folder / names.CHECKPOINTS / "latest").exists())
    lost = run.job.facts()["NodeList"]
    cluster.lose(lost)
    try:
        cluster.wait_for("a second life", lambda: len(run.starts()) == 2)
        facts = run.job.facts()
        assert (facts["NodeList"] != lost, facts["Restarts"]) == (True, "1")
        assert run.starts()[1] >= 20
        (run.folder / names.HALT).write_text("enough seen\n")
        assert run.end() == ("FAILED", "11:0", "1"), run.said()
    finally:
        cluster.bring_back(lost)


def test_two_nodes_train_one_run_and_a_halted_job_is_not_requeued(cluster, tmp_path):
    run = Training(cluster, tmp_path, "train.steps=4900", options=("--nodes=2", "--gpus-per-node=1"))
    run.wait_for_steps(1)
    assert sorted(path.name for path in run.folder.glob(names.HEARTBEATS)) == [names.heartbeat(0), names.heartbeat(1)]
    (run.folder / names.HALT).write_text("enough seen\n")
    assert run.end() == ("FAILED", "11:0", "0"), run.said()
    beats = [last_beat(run.folder / names.heartbeat(rank)) for rank in (0, 1)]
    assert [beat.msg for beat in beats if beat] == [names.HALTED, names.HALTED]
    assert run.newest() == run.step()
    assert "requeued" not in run.said()


def test_a_cancelled_job_saves_and_is_not_requeued(cluster, tmp_path):
    run = Training(cluster, tmp_path, "train.steps=4900")
    run.wait_for_steps(1)
    cluster.ask("scancel", run.job.number)
    assert run.job.wait_for("CANCELLED")["Restarts"] == "0"
    cluster.wait_for("the end of the script", lambda: "nsa launch ended with 10" in run.said())
    cluster.wait_for("idle nodes", cluster.idle)
    assert run.job.facts()["JobState"] == "CANCELLED"
    assert run.newest() == run.step()
    assert "requeued" not in run.said()


def test_a_wrong_config_fails_with_its_code_and_is_not_requeued(cluster, tmp_path):
    run = Training(cluster, tmp_path, "train.stepz=3")
    assert run.end() == ("FAILED", "20:0", "0"), run.said()
    assert "Did you mean train.steps?" in run.said()


def test_a_preparation_runs_as_an_array_and_writes_the_same_set(cluster, tmp_path):
    """Eight tasks, at most three at once, then the manifest; the same command again finds the set finished."""
    out, log = tmp_path / "set", tmp_path / "log"
    command = [
        sys.executable, "-m", "nsa_train.cli", "data", "prepare", str(CORPUS), str(out), "--held-out", "0.05",
        "--units-per-task", "1", "--workers", "3", "--slurm-partition", "batch", "--slurm-log", str(log),
        "--slurm-time", "00:10:00",
    ]  # fmt: skip
    submitted = subprocess.run(command, env=cluster.env, capture_output=True, text=True, check=True).stdout
    manifest_job = SlurmJob(cluster, submitted.partition(" and ")[2].partition(",")[0])
    facts = manifest_job.wait_for(*ENDED)
    said = "\n".join(path.read_text() for path in log.glob("*.out"))
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), said
    plan = make_plan(str(CORPUS), "byte", held_out_fraction=0.05, units_per_task=1)
    local = prepare(plan, str(tmp_path / "local"), workers=2)
    assert len(plan.tasks()) == 8
    assert read_manifest(StorageFolder(str(out))) == local
    assert (out / MANIFEST_NAME).read_bytes() == (tmp_path / "local" / MANIFEST_NAME).read_bytes()
    again = subprocess.run(command, env=cluster.env, capture_output=True, text=True, check=True).stdout
    assert "finished" in again
