"""ops/slurm/train.sbatch on a real Slurm: two virtual nodes on loopback, real ranks of a small model."""

import sys
from pathlib import Path

import pytest

from nsa.observe import names
from nsa.observe.events import Kind, read_events
from nsa.observe.heartbeat import last_beat, read_beats
from nsa.train.checkpoint.folder import CheckpointFolder
from tests.ops.needs import programs
from tests.ops.slurm_cluster import SlurmCluster, SlurmJob
from tests.train.runs import ROOT, write_config

SCRIPT = ROOT / "ops/slurm/train.sbatch"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def cluster():
    names_ = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sinfo", "scontrol", "scancel", "srun")
    cluster = SlurmCluster(programs(*names_))
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


def test_warned_of_the_time_limit_it_saves_waits_and_goes_on_to_the_end(cluster, tmp_path):
    run = Training(cluster, tmp_path, "train.steps=60", "data.synthetic_task=copy")
    run.wait_for_steps()
    cluster.ask("scancel", "--batch", "--signal=USR1", run.job.number)  # what --signal=B:USR1@300 sends
    assert run.end() == ("COMPLETED", "0:0", "1"), run.said()
    first, second = run.starts()
    assert first == 0
    assert 3 <= second < 60
    assert run.steps() == list(range(1, 61)), "no step is lost or done twice"
    assert run.newest() == 60
    assert [beat.msg for beat in read_beats(run.folder / names.heartbeat(1))].count(names.START) == 2
    stops = [event for event in read_events(run.folder) if event.kind == Kind.STOP]
    assert [event.step for event in stops] == [second, second], "the ranks' record and the launcher's"
    assert "in the queue again" in run.said()
