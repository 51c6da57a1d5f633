"""Programs that the launcher starts: torch's elastic agent, and the wrapper that each rank starts in.

Launcher → agent → rank: each asks the kernel to be killed when its parent dies (PR_SET_PDEATHSIG), so that no rank
keeps training and writing checkpoints after the launcher that would restart it has died.
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

from nsa.errors import ConfigError
from nsa.files import write_atomic
from nsa_train.train.launch.node_address import interface_of, loopback_interface, read_secret
from nsa_train.train.signal_handlers import REGROUP, stop_signals

NO_RENDEZVOUS = 75
"""Exit code of an agent that did not meet the other nodes in time and has started no rank."""
_MODULE = "nsa_train.train.launch.agent"
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class AgentSpec:
    """Arguments of an agent, passed as JSON on its command line."""

    program: list[str]
    logs: str
    nproc: int
    min_nodes: int
    max_nodes: int
    rdzv_endpoint: str
    rdzv_id: str
    listen: str
    """Address of this node."""
    secret_file: str | None
    """File with the secret that several nodes share: a path, because command lines are public."""
    launcher_pid: int
    shutdown_s: int

    def command(self) -> list[str]:
        return [sys.executable, "-m", _MODULE, "agent", json.dumps(asdict(self))]

    @property
    def outcome(self) -> Path:
        """File: rank → exit code of the ranks of this node that failed first; written if the agent exits by itself."""
        return Path(self.logs) / "outcome.json"

    @property
    def ended_ranks(self) -> Path:
        """File: why the agent ended its ranks; written if it did."""
        return Path(self.logs) / "ended_ranks.txt"

    @property
    def no_rendezvous(self) -> Path:
        """File: why this node did not meet the others; written if the agent exits with `NO_RENDEZVOUS`."""
        return Path(self.logs) / "no_rendezvous.txt"


def rank_log(logs: Path, rank: int) -> Path:
    return logs / f"rank{rank}.log"


def started_ranks(logs: Path) -> bool:
    """Whether any rank of this node has been started since the log folder was made."""
    return any(logs.glob("rank*.log"))


def signal_children(pid: int, number: int) -> None:
    """Send a signal to every child of a process."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in children.read_text().split():
                os.kill(int(child), number)
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit now if it already has."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(f"parent {parent} is gone: a rank must not outlive its agent")


def _run_agent(spec: AgentSpec) -> int:
    die_with_parent(spec.launcher_pid)
    # A scheduler may signal every process of a job. The ranks save and exit; the agent must live until they have.
    for number in (*stop_signals(), signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _ignore_signal)
    # Ranks that share a store with the rendezvous often read keys of an earlier start: without this setting 5 of 12
    # restarts were clean, with it 12.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if spec.nproc > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    one_node = spec.secret_file is None
    secret = None if spec.secret_file is None else read_secret(Path(spec.secret_file))
    # The process groups of the ranks use the network interface of the agent.
    if one_node:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback_interface()
    elif name := interface_of(spec.listen):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from nsa_train.train.launch.rendezvous import ONE_NODE, SEVERAL_NODES, register, rendezvous_id

    register(
        spec.listen,
        secret,
        on_nodes_waiting=lambda: signal_children(os.getpid(), REGROUP),
        on_run_over=lambda reason: _end_ranks(spec, reason),
    )
    config = LaunchConfig(
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        nproc_per_node=spec.nproc,
        run_id=spec.rdzv_id if secret is None else rendezvous_id(secret, spec.rdzv_id),
        rdzv_backend=ONE_NODE if one_node else SEVERAL_NODES,
        rdzv_endpoint=spec.rdzv_endpoint,
        local_addr=spec.listen,
        max_restarts=0,  # the launcher restarts, after checking exit codes and checkpoints
        monitor_interval=0.1,
        signals_to_handle="SIGQUIT",
        shutdown_timeout=spec.shutdown_s,
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(spec.logs) / "torchrun")),
    )
    start = ("-m", _MODULE, "rank", spec.logs, str(os.getpid()), *spec.program)
    try:
        elastic_launch(config, sys.executable)(*start)
    except ChildFailedError as error:
        _write_outcome(spec, {rank: failure.exitcode for rank, failure in error.failures.items()})
        return 1
    except (RendezvousError, DistError, ConfigError) as error:
        if one_node or started_ranks(Path(spec.logs)):
            raise
        closed = "ranks of another node have not ended yet" if isinstance(error, RendezvousClosedError) else ""
        write_atomic(spec.no_rendezvous, " ".join(str(error).split()) or closed or type(error).__name__)
        return NO_RENDEZVOUS
    _write_outcome(spec, {})
    return 0


def _run_rank(logs: Path, agent_pid: int, program: list[str]) -> None:
    """Replace this process by the program, with this rank's log as its output."""
    die_with_parent(agent_pid)  # survives exec
    log = os.open(rank_log(logs, int(os.environ["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execvp(program[0], program)


def _end_ranks(spec: AgentSpec, reason: str) -> None:
    if not spec.ended_ranks.exists():
        write_atomic(spec.ended_ranks, reason)
    signal_children(os.getpid(), signal.SIGKILL)


def _write_outcome(spec: AgentSpec, codes: Mapping[int, int]) -> None:
    write_atomic(spec.outcome, json.dumps(codes))


def _ignore_signal(number: int, frame: types.FrameType | None) -> None:
    """A handler instead of SIG_IGN, which the ranks would inherit."""


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        sys.exit(_run_agent(AgentSpec(**json.loads(sys.argv[2]))))
    _run_rank(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
