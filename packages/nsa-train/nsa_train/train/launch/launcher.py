"""Launcher: starts ranks, restarts from the last checkpoint or gives up.

It restarts after failures that may pass: a rank that was killed, crashed, hung, or hit a disk or data server error. A
wrong config or a loss that does not stay finite would end the same way again. Each restart waits longer (exponential
back-off), and after three cycles without a new checkpoint the launcher gives up. Exit codes of ranks say which failures
may pass, and which of several codes is the cause.
"""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from nsa.errors import CheckpointError, ConfigError, DataError, ExitCode, NonFiniteError, ReplicaError
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.names import CHECKPOINTS
from nsa_train.record import halt_file
from nsa_train.record.events import EventKind, LauncherAction, add_event
from nsa_train.record.failure_codes import code_of_exit_status
from nsa_train.train.launch.agent import NO_RENDEZVOUS, AgentSpec, rank_log, signal_children, started_ranks
from nsa_train.train.launch.node_address import LOOPBACK, make_secret, own_address
from nsa_train.train.signal_handlers import stop_signals
from nsa_train.train.start_options import StartOptions

# In this order: if ranks exit with several codes, the first of these is the cause and the others are its consequence.
FINAL_EXITS: dict[int, str] = {
    ConfigError.exit_code: "config error",
    ExitCode.REFUSED: "refused command line or preflight",
    ExitCode.HALTED: "halted by a .HALT file",
    NonFiniteError.exit_code: "too many non-finite steps",
    ReplicaError.exit_code: "suspect hardware, start on another node",
    ExitCode.PREEMPTED: "stopped by a signal, can be resumed",
}
RETRYABLE_EXITS: dict[int, str] = {
    DataError.exit_code: "data could not be read",
    CheckpointError.exit_code: "a checkpoint could not be written or read",
    ExitCode.HUNG: "killed because it hung",
    ExitCode.REGROUP: "saved to continue on more nodes",
}
"""Codes that stand for a failure that may pass. So does any code not listed here: a crash or a kill."""


@dataclass(frozen=True)
class _RankOutcome:
    code: int
    """0, an exit code, or a negative signal number."""
    why: str
    rank: int | None = None
    """The rank that ended the cycle; None if it was the agent."""

    @property
    def exit_code(self) -> int:
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def restartable(self) -> bool:
        return self.code != ExitCode.DONE and self.code not in FINAL_EXITS


def _classify_exit(codes: Mapping[int, int], agent_code: int) -> _RankOutcome:
    """Why a cycle ended, from the codes of the ranks that failed first, or of the agent if it recorded none."""
    if not codes:
        if agent_code == 0:
            return _RankOutcome(ExitCode.DONE, "done")
        if agent_code == NO_RENDEZVOUS:
            return _RankOutcome(NO_RENDEZVOUS, "the other nodes could not be reached or were too few")
        how = _killed_by(agent_code) if agent_code < 0 else f"exited with {agent_code}"
        return _RankOutcome(agent_code, f"the agent {how}")
    for known in (FINAL_EXITS, RETRYABLE_EXITS):
        for code, why in known.items():
            for rank, exit_code in codes.items():
                if exit_code == code:
                    return _RankOutcome(code, f"rank {rank} exited with {code}: {why}", rank)
    # The agent ends the other ranks by SIGTERM; and a killed rank makes others crash, rather than the other way round.
    rank, code = min(codes.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[1]))
    return _RankOutcome(code, f"rank {rank} {_killed_by(code) if code < 0 else f'crashed with {code}'}", rank)


def _killed_by(code: int) -> str:
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


LOGS = "logs"

_POLL_S = 0.1
_REMIND_S = 15.0
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class LaunchSettings:
    command: Sequence[str]
    """The command of every rank, to which the launcher adds the start options."""
    run_folder: Path
    nproc: int
    nnodes: str = "1"
    """Number of nodes, or min:max."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of the rendezvous of several nodes."""
    rdzv_id: str = ""
    """Id of this start of the run, the same on all nodes; not a secret: that is in the run folder."""
    listen: str | None = None
    """This node's address, if there are several nodes; default: that of its route to the endpoint."""
    start: StartOptions = field(default_factory=StartOptions)
    grace_s: float = 300.0
    """How long ranks may take to save and exit after a stop signal."""
    max_fruitless_cycles: int = 3
    """Cycles in a row without a new checkpoint before giving up."""
    backoff_s: float = 2.0
    backoff_max_s: float = 120.0
    shutdown_s: int = 15
    """How long the other ranks may take to exit after one has failed."""
    meet_s: float = 1800.0
    """How long a node waits for the others before it gives up."""

    def nodes(self) -> tuple[int, int]:
        least, _, most = self.nnodes.partition(":")
        try:
            bounds = int(least), int(most or least)
        except ValueError:
            bounds = (0, 0)
        if not 1 <= bounds[0] <= bounds[1] or self.nproc < 1:
            raise ConfigError(
                f"--nnodes {self.nnodes} --nproc {self.nproc} cannot be launched: write the number of nodes as 4 or "
                f"2:4, and at least one process each."
            )
        if bounds[1] > 1 and self.rdzv_endpoint is None:
            raise ConfigError(
                f"--nnodes {self.nnodes} needs --rdzv-endpoint HOST:PORT for the rendezvous. Give the name of one node "
                f"and a free port, the same on all nodes."
            )
        if bounds[1] == 1 and self.listen is not None:
            raise ConfigError(
                f"--listen {self.listen} is for several nodes: a single node listens on loopback only. Omit it, or set "
                f"--nnodes."
            )
        return bounds

    @cached_property
    def address(self) -> str:
        """The address at which this node listens."""
        if self.nodes()[1] == 1 or self.rdzv_endpoint is None:
            return LOOPBACK
        return own_address(self.rdzv_endpoint, self.listen)


def launch(settings: LaunchSettings, log: Callable[[str], None], show: Callable[[str], None] | None = None) -> int:
    """Run until done, a final failure or too many failures; returns the exit code.

    Messages of the launcher go to `log`, the output of rank 0 to `show`.
    """
    address = settings.address
    checkpoints = CheckpointFolder(settings.run_folder / CHECKPOINTS)
    requests = _StopRequests()
    show = _without_repeated_errors(show) if show is not None else None
    options, fruitless, newest, met_at = settings.start, 0, _newest(checkpoints), time.monotonic()
    try:
        while True:
            logs = _new_logs(settings)
            log(f"starting {settings.nproc} ranks that listen at {address}, logs in {logs}")
            outcome = _RankCycle(settings, logs, options, requests, log, show).run()
            before, newest = newest, _newest(checkpoints)
            if outcome.code != NO_RENDEZVOUS:
                fruitless, met_at = 0 if newest > before else fruitless + 1, time.monotonic()
            if outcome.code == ExitCode.DONE:
                log("done")
                return ExitCode.DONE
            at = f"the newest checkpoint is step {newest}" if newest >= 0 else "there is no checkpoint"
            if requests.stop and outcome.code != ExitCode.HALTED:
                _record(settings, outcome, newest, logs, LauncherAction.STOPPED)
                log(f"stopped on request ({outcome.why}); {at}")
                return outcome.code if outcome.code in FINAL_EXITS else ExitCode.PREEMPTED
            if not outcome.restartable:
                _record(settings, outcome, newest, logs, LauncherAction.NOT_RESTARTED)
                log(f"not restarted: {outcome.why}; {at}. Logs: {logs}")
                return outcome.exit_code
            if fruitless >= settings.max_fruitless_cycles:
                _record(settings, outcome, newest, logs, LauncherAction.GAVE_UP)
                log(f"gave up after {fruitless} cycles without a new checkpoint: {outcome.why}; {at}. Logs: {logs}")
                return outcome.exit_code
            if (alone_s := time.monotonic() - met_at) > settings.meet_s:
                _record(settings, outcome, newest, logs, LauncherAction.GAVE_UP)
                log(f"gave up after {alone_s:.0f} s: {outcome.why}; {at}. Logs: {logs}")
                return ExitCode.FAILED
            pause_s = min(settings.backoff_s * 2.0 ** max(fruitless - 1, 0), settings.backoff_max_s)
            _record(settings, outcome, newest, logs, LauncherAction.RESTARTED)
            log(f"restarting in {pause_s:.0f} s: {outcome.why}; {at}")
            # Without a checkpoint the run starts as it did the first time, --resume-from included.
            options = settings.start.for_restart() if newest >= 0 else settings.start
            if requests.pause(pause_s):
                log(f"stopped on request, before the restart; {at}")
                return ExitCode.PREEMPTED
            if (halt := halt_file.read(settings.run_folder)) is not None:  # ranks would start only to find it
                outcome = _RankOutcome(ExitCode.HALTED, f"{FINAL_EXITS[ExitCode.HALTED]} ({halt.reason})")
                _record(settings, outcome, newest, logs, LauncherAction.NOT_RESTARTED)
                log(f"not restarted: {outcome.why}; {at}. Logs: {logs}")
                return ExitCode.HALTED
    finally:
        requests.close()


class _StopRequests:
    """Signals to the launcher, recorded until its loop handles them."""

    def __init__(self) -> None:
        self.stop = 0
        """Number of stop signals so far."""
        self.forward: list[int] = []
        self._before = {number: signal.signal(number, self._record) for number in (*stop_signals(), *_FORWARDED)}

    def _record(self, number: int, frame: types.FrameType | None) -> None:
        if number in _FORWARDED:
            self.forward.append(number)
        else:
            self.stop += 1

    def pause(self, seconds: float) -> bool:
        """Sleep; True if a stop signal came meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop:
            time.sleep(min(_POLL_S, seconds))
        return bool(self.stop)

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _RankCycle:
    """One start of the ranks of this node, until they exit."""

    def __init__(
        self,
        settings: LaunchSettings,
        logs: Path,
        options: StartOptions,
        requests: _StopRequests,
        log: Callable[[str], None],
        show: Callable[[str], None] | None,
    ) -> None:
        least, most = settings.nodes()
        self._spec = AgentSpec(
            program=[*settings.command, *options.to_args()],
            logs=str(logs.absolute()),
            nproc=settings.nproc,
            min_nodes=least,
            max_nodes=most,
            rdzv_endpoint=settings.rdzv_endpoint or "",
            rdzv_id=settings.rdzv_id or secrets.token_hex(8) if most == 1 else settings.rdzv_id,
            listen=settings.address,
            secret_file=str(make_secret(settings.run_folder).absolute()) if most > 1 else None,
            launcher_pid=os.getpid(),
            shutdown_s=settings.shutdown_s,
        )
        self._settings, self._logs, self._requests, self._log, self._show = settings, logs, requests, log, show
        self._shown = 0
        self._began, self._reminders = time.monotonic(), 0

    def run(self) -> _RankOutcome:
        with (self._logs / "agent.log").open("wb") as log:
            # A session of its own: Ctrl-C in a terminal reaches only the launcher, which then signals the ranks.
            agent = subprocess.Popen(
                self._spec.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        handled, deadline = 0, float("inf")
        try:
            while agent.poll() is None:
                while self._requests.forward:
                    signal_children(agent.pid, self._requests.forward.pop(0))
                if self._requests.stop > handled:
                    handled = self._requests.stop
                    deadline = min(deadline, time.monotonic() + self._settings.grace_s)
                    signal_children(agent.pid, signal.SIGTERM)
                if time.monotonic() > deadline or (self._requests.stop and not started_ranks(self._logs)):
                    agent.kill()  # without ranks there is nothing to wait for: it may be waiting for other nodes
                self._show_more()
                self._remind_of_other_nodes()
                time.sleep(_POLL_S)
        finally:
            agent.kill()  # the ranks die with it
            agent.wait()
        self._show_more()
        try:
            codes = {int(rank): int(code) for rank, code in json.loads(self._spec.outcome.read_text()).items()}
        except FileNotFoundError:
            codes = {}
        outcome = _classify_exit(codes, agent.returncode)
        if outcome.code == NO_RENDEZVOUS:
            outcome = replace(outcome, why=f"{outcome.why} ({self._spec.no_rendezvous.read_text()})")
        elif outcome.rank is not None and self._spec.ended_ranks.exists():
            outcome = replace(outcome, why=f"rank {outcome.rank} was ended: {self._spec.ended_ranks.read_text()}")
        return outcome

    def _remind_of_other_nodes(self) -> None:
        """Log that this node still waits for others, every `_REMIND_S`; the first time also as an event."""
        waited_s = time.monotonic() - self._began
        if self._spec.max_nodes == 1 or waited_s < (self._reminders + 1) * _REMIND_S:
            return
        self._reminders += 1
        if started_ranks(self._logs):
            return
        why = (
            f"waiting for other nodes at {self._spec.rdzv_endpoint} for {waited_s:.0f} s "
            f"(--nnodes {self._settings.nnodes}, this one is {self._spec.listen})"
        )
        self._log(why)
        if self._reminders == 1:
            add_event(
                self._settings.run_folder,
                EventKind.WAITING,
                ts=time.time(),
                step=max(_newest(CheckpointFolder(self._settings.run_folder / CHECKPOINTS)), 0),
                launcher=LauncherAction.WAITING,
                why=why,
                logs=str(self._logs),
            )

    def _show_more(self) -> None:
        """Show new output of rank 0, if it is on this node."""
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


def _newest(checkpoints: CheckpointFolder) -> int:
    """Step of the newest committed checkpoint, −1 if there is none. The ranks verify its hashes before they load it."""
    return max(checkpoints.committed_steps(), default=-1)


def _new_logs(settings: LaunchSettings) -> Path:
    """A new log folder for each cycle, and for each node of several."""
    here = f"-{socket.gethostname()}" if settings.nodes()[1] > 1 else ""
    number = 0
    while True:
        logs = settings.run_folder / LOGS / f"cycle{number}{here}"
        try:
            logs.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return logs


def _record(settings: LaunchSettings, outcome: _RankOutcome, newest: int, logs: Path, action: LauncherAction) -> None:
    failed = outcome.code not in (ExitCode.PREEMPTED, ExitCode.HALTED, ExitCode.REGROUP)
    add_event(
        settings.run_folder,
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


_ERROR = re.compile(r"(\w+(?:Error|Timeout|Killed)): ")


def _without_repeated_errors(show: Callable[[str], None]) -> Callable[[str], None]:
    """Wrap `show`, which gets whole lines: an error line that it got before is shortened. Log files keep all of it."""
    seen: set[str] = set()

    def line_once(line: str) -> str:
        if (error := _ERROR.match(line)) is None:
            return line
        if line in seen:
            return f"{error[1]}: the same as before\n"
        seen.add(line)
        return line

    return lambda text: show("".join(map(line_once, text.splitlines(keepends=True))))
