"""The two programs under the launcher: the agent, which is torch's elastic agent, and what each rank starts as.

A chain of parents: launcher → agent → rank. Each asks the kernel to be killed when its parent dies, so that no rank
goes on training, and writing checkpoints, after the launcher that would restart it is gone.
"""

import ctypes
import json
import os
import signal
import sys
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from nsa.files import write_atomic
from nsa.train.launch.node_address import interface_of, loopback_interface, read_secret

_MODULE = "nsa.train.launch.agent"
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def leave_signals() -> tuple[signal.Signals, ...]:
    """Signals that make a run save and exit. SIGHUP is left out where it is ignored: `nohup` requests that."""
    always = signal.SIGTERM, signal.SIGINT
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*always, signal.SIGHUP)


@dataclass(frozen=True)
class AgentSpec:
    """What an agent needs to know; it travels as JSON on its command line."""

    program: list[str]
    logs: str
    nproc: int
    min_nodes: int
    max_nodes: int
    rdzv_endpoint: str
    rdzv_id: str
    listen: str
    """The address of this node."""
    secret_file: str | None
    """The secret that several nodes share; the command line shows where it is, not what it is."""
    launcher_pid: int
    shutdown_s: int

    def command(self) -> list[str]:
        return [sys.executable, "-m", _MODULE, "agent", json.dumps(asdict(self))]

    @property
    def outcome(self) -> Path:
        """Rank → exit code of the ranks of this node that failed first; written when the agent ends by itself."""
        return Path(self.logs) / "outcome.json"


def rank_log(logs: Path, rank: int) -> Path:
    return logs / f"rank{rank}.log"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, and end now if it already has."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(f"parent {parent} is gone: a rank must not outlive its agent")


def run_agent(spec: AgentSpec) -> int:
    die_with_parent(spec.launcher_pid)
    # A scheduler may signal every process of a job. The ranks save and leave; the agent must be there until they have.
    for number in (*leave_signals(), signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _stay)
    # Ranks that share a store with the rendezvous often meet a former life's keys: 5 of 12 restarts clean, with it 12.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if spec.nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    alone, secret = spec.secret_file is None, None if spec.secret_file is None else read_secret(Path(spec.secret_file))
    _choose_interface(spec, alone)

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from nsa.train.launch.rendezvous import ONE_NODE, SEVERAL_NODES, meeting_id, register

    register(spec.listen, secret)
    config = LaunchConfig(
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        nproc_per_node=spec.nproc,
        run_id=spec.rdzv_id if secret is None else meeting_id(secret, spec.rdzv_id),
        rdzv_backend=ONE_NODE if alone else SEVERAL_NODES,
        rdzv_endpoint=spec.rdzv_endpoint,
        local_addr=spec.listen,
        max_restarts=0,  # the launcher restarts: it looks at the cause and at the checkpoints first
        monitor_interval=0.1,
        signals_to_handle="SIGQUIT",
        shutdown_timeout=spec.shutdown_s,
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(spec.logs) / "torchrun")),
    )
    start = ("-m", _MODULE, "rank", spec.logs, str(os.getpid()), *spec.program)
    try:
        elastic_launch(config, sys.executable)(*start)
    except ChildFailedError as error:
        _tell(spec, {rank: failure.exitcode for rank, failure in error.failures.items()})
        return 1
    _tell(spec, {})
    return 0


def run_rank(logs: Path, agent_pid: int, program: list[str]) -> None:
    """Become the program, with this rank's log as its output."""
    die_with_parent(agent_pid)  # survives exec
    log = os.open(rank_log(logs, int(os.environ["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execvp(program[0], program)


def _choose_interface(spec: AgentSpec, alone: bool) -> None:
    """Have the process groups of the ranks listen where the agent does."""
    if alone:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback_interface()
    elif name := interface_of(spec.listen):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _tell(spec: AgentSpec, codes: Mapping[int, int]) -> None:
    write_atomic(spec.outcome, json.dumps(codes))


def _stay(number: int, frame: types.FrameType | None) -> None:
    """A handler, not SIG_IGN: what is ignored stays ignored in the ranks."""


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        sys.exit(run_agent(AgentSpec(**json.loads(sys.argv[2]))))
    run_rank(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
