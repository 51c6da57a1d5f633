"""At the end of every step all ranks agree on what is wished from outside: halt, leave, save now.

One small all-reduce; a file that one rank sees, or a signal that one rank gets, then counts for all at the same step.
"""

from dataclasses import dataclass
from typing import ClassVar

from olmo_core.train.callbacks import Callback

from nsa import names
from nsa.errors import ExitCode
from nsa.observe.events import EventKind
from nsa.observe.run_folder import RunFolder
from nsa.train.callbacks.event_log import EventLogCallback
from nsa.train.callbacks.heartbeat import HeartbeatCallback
from nsa.train.callbacks.signals import SignalHandlers
from nsa.train.distributed import HostCollectives, RankInfo
from nsa.train.resume import CheckpointCallback


@dataclass
class StopRequestCallback(Callback):
    priority: ClassVar[int] = -10

    folder: RunFolder
    ranks: RankInfo
    agreement: HostCollectives
    signals: SignalHandlers
    saver: CheckpointCallback
    heartbeat: HeartbeatCallback
    story: EventLogCallback | None
    exit_code: int = ExitCode.DONE

    def pre_train(self) -> None:
        self.signals.install()

    def post_step(self) -> None:
        reason = self.folder.halt_reason() if self.ranks.first_here else None
        asked = f"{self.signals.leave} received" if self.signals.leave else None
        if self.ranks.agent_gone():
            asked = asked or f"process {self.ranks.agent}, which started this rank, is gone"
        halt, leave, save, failed = self.agreement.any(
            [reason is not None, asked is not None, self.signals.save, self.saver.failed]
        )
        if failed:
            self.saver.settle()
        if save:
            self.signals.save = False
            self.saver.save_now()
        if halt:
            self._end(
                ExitCode.HALTED, names.HALTED, EventKind.HALT, f"{names.HALT}: {reason or 'seen by another rank'}"
            )
        elif leave:
            self._end(ExitCode.PREEMPTED, names.STOPPED, EventKind.STOP, asked or "another rank was asked to leave")

    def _end(self, code: int, msg: str, kind: EventKind, detail: str) -> None:
        self.exit_code = code
        self.heartbeat.beat(msg, detail=detail)
        if self.story is not None:
            self.story.add(kind, reason=detail)
        self.trainer.cancel_run(detail, no_sync=True)
