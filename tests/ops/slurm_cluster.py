"""A real Slurm of two virtual nodes on loopback: munged, slurmctld and two slurmd in a folder of their own."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.nsa_train.train.runs import ROOT, environment, free_port

WAIT_S = 300.0
"""Of a loaded machine; nothing here takes a minute on a quiet one."""

GPUS_PER_NODE = 2
"""Counted by Slurm, present nowhere: the template asks for GPUs and starts one rank for each."""

_SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait={kill_wait}
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=2 RealMemory=4096 Gres=gpu:{gpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=2 RealMemory=4096 Gres=gpu:{gpus}
PartitionName=batch Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
"""


class SlurmCluster:
    def __init__(self, binaries: dict[str, str]) -> None:
        # Not pytest's folder: a socket's path has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._binaries = binaries
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {**environment(), "SLURM_CONF": str(self.folder / "slurm.conf")}
        ports: set[int] = set()
        while len(ports) < 3:
            ports.add(free_port())
        controller, n1, n2 = ports
        for name in ("state", "n1", "n2"):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(
            _SLURM_CONF.format(
                host=socket.gethostname(), folder=self.folder, controller=controller, n1=n1, n2=n2,
                gpus=GPUS_PER_NODE, kill_wait=60, grace=60,
            )
        )  # fmt: skip
        # Slurm counts device files; any will do for a job that does not open them.
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)

    def start(self) -> None:
        at = self.folder
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={at}/munge.key", f"--socket={at}/munge.socket",
            f"--pid-file={at}/munged.pid", f"--log-file={at}/munged.log", f"--seed-file={at}/munged.seed",
            "--num-threads=2",
        )  # fmt: skip
        self.wait_for("munged", (at / "munge.socket").exists)
        self._daemon("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self._start_node(node)
        self.wait_for("two idle nodes", self.idle)

    def idle(self) -> bool:
        return self.ask("sinfo", "-h", "-N", "-p", "batch", "-o", "%T") == "idle\nidle"

    def lose(self, node: str) -> None:
        """Kill a node's daemon and everything that runs under Slurm, and tell the controller, which asks rarely."""
        daemons = {daemon.pid for daemon in self._daemons}
        self._nodes[node].kill()
        self._nodes[node].wait()
        for pid in set(self.processes()) - daemons:
            os.kill(pid, signal.SIGKILL)
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def bring_back(self, node: str) -> None:
        self._start_node(node)
        self.ask("scontrol", "update", f"nodename={node}", "state=resume")
        self.wait_for("two idle nodes", self.idle)

    def _start_node(self, node: str) -> None:
        self._nodes[node] = self._daemon("slurmd", "-D", "-N", node)

    def _daemon(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("ab") as out:
            command = [self._binaries[name], *words]
            self._daemons.append(subprocess.Popen(command, env=self.env, stdout=out, stderr=out, cwd=self.folder))
        return self._daemons[-1]

    def ask(self, name: str, *words: str) -> str:
        """Run a Slurm command and return its output; empty if the controller does not answer yet."""
        command = [self._binaries[name], *words]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=30).stdout.strip()

    def submit(self, script: Path, *options: str, words: list[str] | None = None, **variables: str) -> "SlurmJob":
        command = [self._binaries["sbatch"], "--parsable", *options, str(script), *(words or [])]
        done = subprocess.run(
            command, env={**self.env, **variables}, cwd=ROOT, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return SlurmJob(self, done.stdout.strip())

    def wait_for(self, what: str, happened, seconds: float = WAIT_S) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < deadline, f"{what} did not come\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        files = [*sorted(self.folder.glob("*.log")), *sorted(self.folder.glob("*.out"))]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def stop(self) -> None:
        """Jobs first, then the daemons, then whatever still carries this cluster's name in its environment."""
        self.ask("scancel", "--full", "--signal=KILL", "--partition=batch", "--quiet")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def processes(self) -> list[int]:
        mark = f"SLURM_CONF={self.folder}/".encode()
        pids = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes():
                    pids.append(int(entry.name))
            except OSError:  # ended meanwhile
                continue
        return pids


class SlurmJob:
    def __init__(self, cluster: SlurmCluster, number: str) -> None:
        self._cluster, self.number = cluster, number

    def facts(self) -> dict[str, str]:
        """JobState, ExitCode, Restarts and the rest of `scontrol show job`."""
        words = self._cluster.ask("scontrol", "--oneliner", "show", "job", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, *states: str, seconds: float = WAIT_S) -> dict[str, str]:
        self._cluster.wait_for(
            f"job {self.number} {'/'.join(states)}", lambda: self.facts().get("JobState") in states, seconds
        )
        return self.facts()
