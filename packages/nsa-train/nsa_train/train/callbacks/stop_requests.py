"""Stop and save requests: a callback that all-reduces them at the end of every step, so that all ranks act at once.

A request is a `.HALT` file, a signal to stop, save or regroup (`signal_handlers`), or a failed background save. All
ranks synchronize what any of them has seen with one small all-reduce.
"""

from dataclasses import dataclass
from typing import ClassVar

from nsa.errors import ExitCode
from nsa_train import names
from nsa_train.record.events import EventKind
from nsa_train.record.run_folder import RunFolder
from nsa_train.train.callbacks.heartbeat_callback import HeartbeatCallback
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine import Callback
from nsa_train.train.engine.checkpoint_callback import CheckpointCallback
from nsa_train.train.host_collectives import HostCollectives
from nsa_train.train.run_outputs import EventLogCallback
from nsa_train.train.signal_handlers import SignalHandlers


@dataclass
class StopRequestCallback(Callback):
    """Synchronizes stop and save requests across ranks at step boundaries, and ends the run with an exit code."""

    priority: ClassVar[int] = -10

    folder: RunFolder
    ranks: RankInfo
    collectives: HostCollectives
    signals: SignalHandlers
    checkpoints: CheckpointCallback
    heartbeat: HeartbeatCallback
    event_log: EventLogCallback | None
    exit_code: int = ExitCode.DONE

    def pre_train(self) -> None:
        self.signals.install()

    def post_step(self) -> None:
        reason = self.folder.halt_reason() if self.ranks.first_here else None
        stop = f"{self.signals.stop_signal} received" if self.signals.stop_signal else None
        if self.ranks.agent_gone():
            stop = stop or f"process {self.ranks.agent}, which started this rank, is gone"
        any_halt, any_stop, any_save, any_failed, any_regroup = self.collectives.any(
            [reason is not None, stop is not None, self.signals.save, self.checkpoints.failed, self.signals.regroup]
        )
        if any_failed:
            self.checkpoints.wait_for_save()
        if any_save:
            self.signals.save = False
            self.checkpoints.save_now()
        if any_halt:
            self._end(
                ExitCode.HALTED, names.HALTED, EventKind.HALT, f"{names.HALT}: {reason or 'seen by another rank'}"
            )
        elif any_stop:
            self._end(ExitCode.PREEMPTED, names.STOPPED, EventKind.STOP, stop or "another rank received a stop signal")
        elif any_regroup:
            self._end(ExitCode.REGROUP, names.STOPPED, EventKind.STOP, "another node waits to join the run")

    def _end(self, code: int, msg: str, kind: EventKind, detail: str) -> None:
        if self.checkpoints.check_unread_step is not None:
            self.checkpoints.check_unread_step()  # here, where a rollback is still possible
        self.exit_code = code
        self.heartbeat.beat(msg, detail=detail)
        if self.event_log is not None:
            self.event_log.add(kind, reason=detail)
        self.trainer.cancel_run(detail, no_sync=True)
