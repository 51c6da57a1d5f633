"""ops/ssh/remote.sh against a real sshd on loopback: real keys, real tmux, real ranks of a small model."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.record.heartbeat_record import last_beat, read_beats
from nsa_train.train.launch.launcher import LOGS
from proofs import import_path
from tests.nsa_train.train.runs import ROOT, environment, free_port, write_config
from tests.ops.needs import programs, root

pytestmark = pytest.mark.nightly
SCRIPT = ROOT / "ops/ssh/remote.sh"
WAIT_S = 150

_SSHD_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {at}/host_key
AuthorizedKeysFile {at}/key.pub
PidFile {at}/sshd.pid
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
SetEnv TMUX_TMPDIR={at} PYTHONPATH={path} OMP_NUM_THREADS=1
"""
_SSH_CONFIG = """\
Host far
  HostName 127.0.0.1
  Port {port}
  User root
  IdentityFile {at}/key
  IdentitiesOnly yes
  UserKnownHostsFile {at}/known_hosts
  StrictHostKeyChecking accept-new
  LogLevel ERROR
"""


class Far:
    """Another machine, as far as remote.sh can see."""

    def __init__(self, at: Path, home: Path) -> None:
        self.at, self.home, self.folder = at, home, home / "run"
        root()
        tools = programs("sshd", "ssh", "ssh-keygen", "tmux", "pgrep")
        self._tmux = tools["tmux"]
        for key in ("host_key", "key"):
            subprocess.run([tools["ssh-keygen"], "-q", "-t", "ed25519", "-N", "", "-f", at / key], check=True)
        port = free_port()
        for file, text in (("sshd_config", _SSHD_CONFIG), ("ssh_config", _SSH_CONFIG)):
            (at / file).write_text(text.format(at=at, path=import_path(), port=port))
        Path("/run/sshd").mkdir(parents=True, exist_ok=True)  # sshd's own, whatever its config says
        command = [tools["sshd"], "-D", "-f", str(at / "sshd_config"), "-E", str(at / "sshd.log")]
        self.sshd = subprocess.Popen(command)
        wait_for("sshd", lambda: answers(port))
        self.env = environment(
            SSH_OPTIONS=f"-F {at}/ssh_config",
            REMOTE_DIR=str(home),
            REMOTE_VENV=sys.prefix,
            RANKS="1",
            GRACE="60",
            PREFLIGHT="0",
        )

    def remote(self, action: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(SCRIPT), action, "far", *words]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=WAIT_S)

    def step(self) -> int:
        beat = last_beat(self.folder / names.heartbeat(0), names.PROGRESS)
        return beat.step if beat else 0

    def wait_for_steps(self, more: int) -> None:
        goal = self.step() + more
        wait_for(f"step {goal}", lambda: self.step() >= goal, self.log)

    def log(self) -> str:
        return "".join(file.read_text() for file in sorted(self.home.glob(".remote/*/log")))

    def close(self) -> None:
        tmux = [self._tmux, "kill-server"]
        subprocess.run(tmux, env={**self.env, "TMUX_TMPDIR": str(self.at)}, capture_output=True, timeout=10)
        for file in self.home.glob(".remote/*/pid"):  # of a test that has failed: the launcher's ranks die with it
            pid = int(file.read_text())
            if alive(pid) and str(self.home).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        self.sshd.terminate()
        self.sshd.wait(10)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(what: str, happened, log=lambda: "") -> None:
    deadline = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not come\n{log()}"
        time.sleep(0.1)


@pytest.fixture
def far(tmp_path):
    with tempfile.TemporaryDirectory(prefix="ssh-") as at:  # short: tmux puts its socket there
        machine = Far(Path(at), tmp_path)
        try:
            yield machine
        finally:
            machine.close()


def test_a_run_is_started_watched_stopped_and_continued(far, tmp_path):
    """One that is asked to leave saves and ends with 10; the next start goes on where it was."""
    words = [str(write_config(tmp_path)), f"train.out_dir={far.folder}", "train.steps=4900"]
    unknown = far.remote("status")
    assert (unknown.returncode, "was never started" in unknown.stdout) == (1, True)
    wrong = far.remote("start", *words, "train.stepz=1")
    assert (wrong.returncode, "Did you mean train.steps?" in wrong.stderr) == (20, True)

    assert far.remote("start", *words).returncode == 0
    far.wait_for_steps(2)
    twice = far.remote("start", *words)
    assert (twice.returncode, "runs already" in twice.stdout) == (1, True)
    shown = far.remote("status")
    assert (shown.returncode, "nsa is running" in shown.stdout) == (0, True)
    assert json.loads(shown.stdout.splitlines()[-1])["rank"] == 0, "the last heartbeat"
    stopped = far.remote("stop")
    assert stopped.returncode == 10, stopped.stdout + far.log()
    saved = CheckpointFolder(far.folder / names.CHECKPOINTS).find_resumable().step
    assert saved == far.step()
    assert far.remote("status").returncode == 10

    assert far.remote("start", *words[:-1], f"train.steps={saved + 5}").returncode == 0
    wait_for("the end", lambda: far.step() == saved + 5, far.log)
    wait_for("the exit code", lambda: "ended with 0" in far.remote("status").stdout, far.log)
    beats = list(read_beats(far.folder / names.heartbeat(0)))
    assert [beat.step for beat in beats if beat.msg == names.START] == [0, saved]
    assert [beat.step for beat in beats if beat.msg == names.PROGRESS] == list(range(1, saved + 6))
    assert sorted(path.name for path in (far.folder / LOGS).iterdir()) == ["cycle0", "cycle1"], "none began wrongly"


def test_a_cut_connection_does_not_stop_the_run_and_tensorboard_is_served_through_the_tunnel(far, tmp_path):
    words = [str(write_config(tmp_path)), f"train.out_dir={far.folder}", "train.steps=4900"]
    assert far.remote("start", *words).returncode == 0
    far.wait_for_steps(2)

    local, there = free_port(), free_port()
    tunnel = subprocess.Popen(
        [str(SCRIPT), "tunnel", "far", str(local)], env={**far.env, "REMOTE_PORT": str(there)},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for("TensorBoard", lambda: fetch(f"http://127.0.0.1:{local}/data/runs") == ["."], far.log)
    finally:
        os.killpg(tunnel.pid, signal.SIGKILL)
        tunnel.wait()
    wait_for("the end of TensorBoard", lambda: not answers(there))

    sessions = subprocess.run(
        ["pgrep", "--parent", str(far.sshd.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    for pid in sessions:
        os.kill(int(pid), signal.SIGKILL)
    far.wait_for_steps(2)
    assert far.remote("stop").returncode == 10, far.log()


def fetch(address: str):
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ConnectionError, ValueError):
        return None
