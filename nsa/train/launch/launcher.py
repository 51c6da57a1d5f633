"""Keep a run going: start its ranks, look at why they ended, start them again from the last checkpoint, or stop.

Restart only what can get better: a rank that was killed, crashed, hung, or met a disk or a data server that may
recover. A wrong config or a loss that does not stay finite ends the same way the next time. Each restart waits longer,
and three cycles without a new checkpoint are the end: whatever it is, it needs a person.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nsa.checkpoint.folder import CheckpointFolder
from nsa.errors import CheckpointError, ConfigError, DataError, ExitCode, NonFiniteError, ReplicaError
from nsa.names import CHECKPOINTS
from nsa.observe.events import EventKind, LauncherAction, add_event
from nsa.observe.failure_codes import code_of_exit_status
from nsa.train.launch.agent import AgentSpec, leave_signals, rank_log
from nsa.train.launch.node_address import LOOPBACK, make_secret, own_address

LOGS = "logs"

# Ordered: if ranks end for several reasons, the first of these is the cause and the others are its wake.
_FINAL: dict[int, str] = {
    ConfigError.exit_code: "the config was refused",
    ExitCode.REFUSED: "the command line or the preflight was refused",
    ExitCode.HALTED: "it was halted",
    NonFiniteError.exit_code: "the budget of non-finite steps is used up",
    ReplicaError.exit_code: "the hardware is suspect: start it on another node",
    ExitCode.PREEMPTED: "it was asked to leave, and can be resumed",
}
_HOPEFUL: dict[int, str] = {
    DataError.exit_code: "data could not be had",
    CheckpointError.exit_code: "a checkpoint could not be written or read",
    ExitCode.HUNG: "it hung and was killed",
}
_POLL_S = 0.1
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class LaunchSettings:
    program: Callable[[bool], Sequence[str]]
    """The command of every rank; True asks it to resume from the newest checkpoint of the run folder."""
    run_folder: Path
    nproc: int
    nnodes: str = "1"
    """Nodes, or least:most."""
    rdzv_endpoint: str | None = None
    """HOST:PORT where several nodes meet."""
    rdzv_id: str = ""
    """Tells apart several lives of a run; what keeps strangers out is the secret in the run folder."""
    listen: str | None = None
    """This node's address, if there are several nodes; else that of the way to the endpoint."""
    resume: bool = False
    grace_s: float = 300.0
    """How long ranks may take to save and leave when asked to."""
    patience: int = 3
    """Cycles without a new checkpoint before giving up."""
    backoff_s: float = 2.0
    backoff_most_s: float = 120.0
    shutdown_s: int = 15
    """How long the other ranks may take to end after one has failed."""

    def nodes(self) -> tuple[int, int]:
        least, _, most = self.nnodes.partition(":")
        try:
            found = int(least), int(most or least)
        except ValueError:
            found = (0, 0)
        if not 1 <= found[0] <= found[1] or self.nproc < 1:
            raise ConfigError(
                f"--nnodes {self.nnodes} --nproc {self.nproc} cannot be launched: write the number of nodes as 4 or "
                f"2:4, and at least one process each."
            )
        if found[1] > 1 and self.rdzv_endpoint is None:
            raise ConfigError(
                f"--nnodes {self.nnodes} needs --rdzv-endpoint HOST:PORT: the nodes must meet somewhere. Give the name "
                f"of one of them, the same on all."
            )
        if found[1] == 1 and self.listen is not None:
            raise ConfigError(
                f"--listen {self.listen} is for several nodes: one node listens on loopback only. Leave it out, or "
                f"give --nnodes."
            )
        return found

    @cached_property
    def address(self) -> str:
        """Where this node listens."""
        if self.nodes()[1] == 1 or self.rdzv_endpoint is None:
            return LOOPBACK
        return own_address(self.rdzv_endpoint, self.listen)


@dataclass(frozen=True)
class RankOutcome:
    code: int
    """0, an exit code, or a negative signal number."""
    why: str
    rank: int | None = None
    """The rank that ended the cycle; None where it was the agent."""

    @property
    def exit_code(self) -> int:
        return self.code if self.code >= 0 else 128 - self.code


def judge(codes: Mapping[int, int], agent_code: int) -> RankOutcome:
    """Why a cycle ended, from the codes of the ranks that failed first, or of the agent if it told none."""
    if not codes:
        if agent_code == 0:
            return RankOutcome(ExitCode.DONE, "done")
        how = _killed_by(agent_code) if agent_code < 0 else f"ended with {agent_code}"
        return RankOutcome(agent_code, f"the agent {how}")
    for known in (_FINAL, _HOPEFUL):
        for code, why in known.items():
            for rank, found in codes.items():
                if found == code:
                    return RankOutcome(code, f"rank {rank} ended with {code}: {why}", rank)
    # The agent ends the others by SIGTERM; and a killed rank makes others crash, rather than the other way round.
    rank, code = min(codes.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[1]))
    return RankOutcome(code, f"rank {rank} {_killed_by(code) if code < 0 else f'crashed with {code}'}", rank)


def can_get_better(outcome: RankOutcome) -> bool:
    return outcome.code != ExitCode.DONE and outcome.code not in _FINAL


def launch(plan: LaunchSettings, say: Callable[[str], None], show: Callable[[str], None] | None = None) -> int:
    """Run until done, final or hopeless; returns the exit code. `say` gets our own words, `show` those of rank 0."""
    address = plan.address
    checkpoints = CheckpointFolder(plan.run_folder / CHECKPOINTS)
    wishes = _StopRequests()
    resume, fruitless, newest = plan.resume, 0, _newest(checkpoints)
    try:
        while True:
            logs = _new_logs(plan)
            say(f"starting {plan.nproc} ranks that listen at {address}, logs in {logs}")
            outcome = _RankCycle(plan, logs, resume, wishes, show).run()
            before, newest = newest, _newest(checkpoints)
            fruitless = 0 if newest > before else fruitless + 1
            if outcome.code == ExitCode.DONE:
                say("done")
                return ExitCode.DONE
            at = f"the newest checkpoint is step {newest}" if newest >= 0 else "there is no checkpoint"
            if wishes.leave and outcome.code != ExitCode.HALTED:
                _record(plan, outcome, newest, logs, LauncherAction.STOPPED)
                say(f"stopped as asked ({outcome.why}); {at}")
                return outcome.code if outcome.code in _FINAL else ExitCode.PREEMPTED
            if not can_get_better(outcome):
                _record(plan, outcome, newest, logs, LauncherAction.NOT_RESTARTED)
                say(f"not restarted, {outcome.why}; {at}. Logs: {logs}")
                return outcome.exit_code
            if fruitless >= plan.patience:
                _record(plan, outcome, newest, logs, LauncherAction.GAVE_UP)
                say(f"given up after {fruitless} cycles without a new checkpoint, {outcome.why}; {at}. Logs: {logs}")
                return outcome.exit_code
            pause_s = min(plan.backoff_s * 2.0 ** max(fruitless - 1, 0), plan.backoff_most_s)
            _record(plan, outcome, newest, logs, LauncherAction.RESTARTED)
            say(f"restarting in {pause_s:.0f} s, {outcome.why}; {at}")
            # Without a checkpoint the run begins as it did the first time, --resume-from included.
            resume = plan.resume or newest >= 0
            if wishes.pause(pause_s):
                say(f"stopped as asked, before the restart; {at}")
                return ExitCode.PREEMPTED
    finally:
        wishes.close()


class _StopRequests:
    """Signals to the launcher, kept until the loop gets to them."""

    def __init__(self) -> None:
        self.leave = 0
        """How often it was asked to leave."""
        self.forward: list[int] = []
        self._before = {number: signal.signal(number, self._note) for number in (*leave_signals(), *_FORWARDED)}

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if number in _FORWARDED:
            self.forward.append(number)
        else:
            self.leave += 1

    def pause(self, seconds: float) -> bool:
        """Wait; True if asked to leave meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.leave:
            time.sleep(min(_POLL_S, seconds))
        return bool(self.leave)

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _RankCycle:
    """One life of the ranks of this node."""

    def __init__(
        self, plan: LaunchSettings, logs: Path, resume: bool, wishes: _StopRequests, show: Callable[[str], None] | None
    ) -> None:
        least, most = plan.nodes()
        self._spec = AgentSpec(
            program=list(plan.program(resume)),
            logs=str(logs.absolute()),
            nproc=plan.nproc,
            min_nodes=least,
            max_nodes=most,
            rdzv_endpoint=plan.rdzv_endpoint or "",
            rdzv_id=plan.rdzv_id or secrets.token_hex(8) if most == 1 else plan.rdzv_id,
            listen=plan.address,
            secret_file=str(make_secret(plan.run_folder).absolute()) if most > 1 else None,
            launcher_pid=os.getpid(),
            shutdown_s=plan.shutdown_s,
        )
        self._plan, self._logs, self._wishes, self._show = plan, logs, wishes, show
        self._shown = 0

    def run(self) -> RankOutcome:
        with (self._logs / "agent.log").open("wb") as log:
            # A session of its own: Ctrl-C in a terminal reaches the launcher alone, which then asks the ranks.
            agent = subprocess.Popen(
                self._spec.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        asked, deadline = 0, float("inf")
        try:
            while agent.poll() is None:
                while self._wishes.forward:
                    _signal_children(agent.pid, self._wishes.forward.pop(0))
                if self._wishes.leave > asked:
                    asked = self._wishes.leave
                    deadline = min(deadline, time.monotonic() + self._plan.grace_s)
                    _signal_children(agent.pid, signal.SIGTERM)
                if time.monotonic() > deadline:
                    agent.kill()
                self._show_more()
                time.sleep(_POLL_S)
        finally:
            agent.kill()  # the ranks die with it
            agent.wait()
        self._show_more()
        try:
            codes = {int(rank): int(code) for rank, code in json.loads(self._spec.outcome.read_text()).items()}
        except FileNotFoundError:
            codes = {}
        return judge(codes, agent.returncode)

    def _show_more(self) -> None:
        """Pass on what rank 0 wrote, if it is on this node."""
        if self._show is None:
            return
        try:
            with rank_log(self._logs, 0).open("rb") as log:
                log.seek(self._shown)
                text = log.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._shown += len(whole)
        if whole:
            self._show(whole.decode("utf-8", "replace"))


def _signal_children(pid: int, number: int) -> None:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in children.read_text().split():
                os.kill(int(child), number)
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue


def _newest(checkpoints: CheckpointFolder) -> int:
    """The newest whole checkpoint, −1 if there is none. The ranks verify its hashes before they read it."""
    return max(checkpoints.committed_steps(), default=-1)


def _new_logs(plan: LaunchSettings) -> Path:
    """A new folder for each cycle; nodes that share the run folder get one each."""
    here = f"-{socket.gethostname()}" if plan.nodes()[1] > 1 else ""
    number = 0
    while True:
        logs = plan.run_folder / LOGS / f"cycle{number}{here}"
        try:
            logs.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return logs


def _record(plan: LaunchSettings, outcome: RankOutcome, newest: int, logs: Path, action: LauncherAction) -> None:
    failed = outcome.code not in (ExitCode.PREEMPTED, ExitCode.HALTED)
    add_event(
        plan.run_folder,
        EventKind.ERROR if failed else EventKind.STOP,
        ts=time.time(),
        step=max(newest, 0),
        launcher=action,
        why=outcome.why,
        code=outcome.code,
        rank=outcome.rank,
        failure_code=code_of_exit_status(outcome.code) if failed else None,
        logs=str(logs),
    )


def _killed_by(code: int) -> str:
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
