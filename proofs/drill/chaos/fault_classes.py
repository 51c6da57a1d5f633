"""Table of the faults of the chaos drill: what each is, how it must be reported and by when, and what it explains.

Pure data: `schedule` draws from it, `faults` injects, `verdict` evaluates by it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

SLACK_S = 45.0
"""Added to every time limit: a loaded machine starts and stops processes slowly."""
STALL_S, GONE_S, STARTUP_S = 20.0, 8.0, 150.0
"""Limits of the watchdog of a chaos run."""
TIMEOUT_S = 60.0
"""parallel.timeout_s of a chaos run: how long a rank that starts may wait for one that is gone."""
LOADER_TIMEOUT_S = 12.0
"""data.loader_timeout_s of a chaos run."""


class ChaosFault(StrEnum):
    RANK_KILLED = "rank_killed"
    TRAINER_KILLED = "trainer_killed"
    LAUNCHER_KILLED = "launcher_killed"
    PREFETCH_KILLED = "prefetch_killed"
    RANK_PAUSED = "rank_paused"
    RANK_HUNG = "rank_hung"
    DISK_FULL = "disk_full"
    CHECKPOINT_CORRUPTED = "checkpoint_corrupted"
    DATA_ERRORS = "data_errors"
    DATA_SILENT = "data_silent"
    NAN_GRADIENT = "nan_gradient"
    CLOCK_AHEAD = "clock_ahead"
    CLOCK_BEHIND = "clock_behind"
    HALT_REQUESTED = "halt_requested"
    STORE_ERRORS = "store_errors"
    NODE_LOST = "node_lost"


@dataclass(frozen=True)
class EventPattern:
    """Matches observations by their kind and text; both are regular expressions, the kind must match whole."""

    kind: str
    text: str = ""

    def matches(self, kind: str, text: str) -> bool:
        return re.fullmatch(self.kind, kind) is not None and re.search(self.text, text) is not None


@dataclass(frozen=True, kw_only=True)
class FaultProfile:
    title: str
    cost_s: float
    """Expected time without productive steps, for the number of steps of a run of a given duration."""
    named_by: tuple[EventPattern, ...] = ()
    """Any of these reports the fault. Empty for a fault that the run must absorb: nothing may be reported or
    restarted."""
    named_within_s: float = SLACK_S
    explains: tuple[EventPattern, ...] = ()
    """Observations that may occur from the fault until the run has continued."""
    variants: tuple[str, ...] = ("",)
    lowest_victim: int = 0
    """Lowest rank that it may befall."""
    may_be_followed: bool = False
    """Another fault may be played while the run recovers from this one."""
    may_follow: bool = False

    @property
    def absorbed(self) -> bool:
        return not self.named_by


_RESTARTED = EventPattern("launcher:restarted")
_KILLED = EventPattern("launcher:.*", "SIGKILL")
_GONE = EventPattern("finding:process_gone")
_WAITING = EventPattern("launcher:waits for nodes|finding:nodes_missing")
# The first failure of a rank makes the others fail too, and the launchers start them again from a checkpoint.
_RESTARTS = (
    EventPattern("launcher:(restarted|given up)"),
    EventPattern("error|restart|lost_steps|finding:run_failed|log|exit"),
    _GONE,
    _WAITING,
    EventPattern("finding:data_slow"),
)
_NOT_COPIED = (EventPattern("log", "not copied to"), EventPattern("copy_failed|finding:copy_failed"))
_HALTS = (
    EventPattern("launcher:not restarted", "HALT|halted"),
    EventPattern("halt|halt_asked|halt_cleared|stop"),
)

PROFILES: Mapping[ChaosFault, FaultProfile] = {
    ChaosFault.RANK_KILLED: FaultProfile(
        title="SIGKILL of a rank", cost_s=30, named_by=(_KILLED,), explains=_RESTARTS,
        may_be_followed=True, may_follow=True,
    ),
    ChaosFault.TRAINER_KILLED: FaultProfile(
        title="SIGKILL of both ranks", cost_s=30, named_by=(_KILLED,), explains=_RESTARTS,
        may_be_followed=True, may_follow=True,
    ),
    ChaosFault.LAUNCHER_KILLED: FaultProfile(
        title="SIGKILL of a launcher", cost_s=40, named_by=(_RESTARTED, _GONE, _WAITING),
        named_within_s=TIMEOUT_S + SLACK_S, explains=_RESTARTS, may_be_followed=True, may_follow=True,
    ),
    ChaosFault.PREFETCH_KILLED: FaultProfile(
        title="SIGKILL of a prefetch process", cost_s=32, named_by=(EventPattern("launcher:.*", "exited with 21"),),
        explains=(*_RESTARTS, EventPattern("finding:out_of_memory")), may_be_followed=True,
    ),
    ChaosFault.RANK_PAUSED: FaultProfile(title="SIGSTOP of a rank for 6 s", cost_s=7),
    ChaosFault.RANK_HUNG: FaultProfile(
        title="SIGSTOP of a rank, for good", cost_s=75,
        named_by=(EventPattern("finding:heartbeat_stall"),), named_within_s=STALL_S + SLACK_S,
        explains=(*_RESTARTS, *_HALTS, EventPattern("finding:(heartbeat_stall|throughput_zero)")),
    ),
    ChaosFault.DISK_FULL: FaultProfile(
        title="full disk, freed", cost_s=50,
        named_by=(EventPattern("log|error|launcher:.*", "No space left|disk_full|exited with 22"),),
        explains=(
            *_RESTARTS, EventPattern("launcher:not restarted"),
            EventPattern("finding:(checkpoint_overdue|heartbeat_stall)"), EventPattern("unreadable"),
        ),
    ),
    ChaosFault.CHECKPOINT_CORRUPTED: FaultProfile(
        title="newest checkpoint corrupted, then SIGKILL of both ranks", cost_s=45,
        named_by=(EventPattern("checkpoint_rejected"),), named_within_s=60 + SLACK_S,
        # The step of the corrupted checkpoint is saved again, and the store keeps its first copy.
        explains=(
            *_RESTARTS, EventPattern("checkpoint_rejected"),
            EventPattern("copy_failed|finding:copy_failed", "already holds"),
        ),
        may_be_followed=True,
    ),
    ChaosFault.DATA_ERRORS: FaultProfile(
        title="errors of the data server for 4 s", cost_s=5, variants=("500", "429", "reset", "truncated"),
    ),
    ChaosFault.DATA_SILENT: FaultProfile(
        title="silent data server", cost_s=50,
        named_by=(EventPattern("error", "data_timeout"), EventPattern("launcher:.*", "exited with 21")),
        named_within_s=LOADER_TIMEOUT_S + SLACK_S,
        explains=(*_RESTARTS, EventPattern("finding:loader_timeout")),
    ),
    ChaosFault.NAN_GRADIENT: FaultProfile(
        title="NaN gradients until the run stops", cost_s=45,
        named_by=(EventPattern("skipped_step", "nan"),),
        explains=(
            *_RESTARTS, EventPattern("skipped_step|rollback|finding:(steps_skipped|grad_nonfinite)"),
            EventPattern("launcher:not restarted", "non-finite"),
        ),
    ),
    ChaosFault.CLOCK_AHEAD: FaultProfile(
        title="clock of a rank 1 h ahead for 10 s", cost_s=0, named_by=(EventPattern("finding:clock_skew"),),
        explains=(EventPattern("finding:clock_skew"),),
        lowest_victim=1,  # goodput, which is required, is by the clock of rank 0
    ),
    ChaosFault.CLOCK_BEHIND: FaultProfile(
        title="clock of a rank 1 h behind for 10 s", cost_s=0, lowest_victim=1,
    ),
    ChaosFault.HALT_REQUESTED: FaultProfile(
        title="halt by an operator, cleared", cost_s=35, named_by=(EventPattern("halt"),),
        explains=(*_RESTARTS, *_HALTS),
    ),
    ChaosFault.STORE_ERRORS: FaultProfile(
        title="errors of the object store", cost_s=3, named_by=_NOT_COPIED, named_within_s=60 + SLACK_S,
        explains=_NOT_COPIED,
    ),
    ChaosFault.NODE_LOST: FaultProfile(
        title="all processes of a node killed, node back", cost_s=45, named_by=(_RESTARTED,),
        explains=_RESTARTS, may_be_followed=True,
    ),
}  # fmt: skip
