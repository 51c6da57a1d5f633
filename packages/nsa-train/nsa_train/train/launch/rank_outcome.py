"""Exit codes of ranks: which failures may pass, and which of several codes is the cause."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from nsa.errors import CheckpointError, ConfigError, DataError, ExitCode, NonFiniteError, ReplicaError
from nsa_train.train.launch.agent import NO_RENDEZVOUS

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
class RankOutcome:
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


def classify_exit(codes: Mapping[int, int], agent_code: int) -> RankOutcome:
    """Why a cycle ended, from the codes of the ranks that failed first, or of the agent if it recorded none."""
    if not codes:
        if agent_code == 0:
            return RankOutcome(ExitCode.DONE, "done")
        if agent_code == NO_RENDEZVOUS:
            return RankOutcome(NO_RENDEZVOUS, "the other nodes could not be reached or were too few")
        how = _killed_by(agent_code) if agent_code < 0 else f"exited with {agent_code}"
        return RankOutcome(agent_code, f"the agent {how}")
    for known in (FINAL_EXITS, RETRYABLE_EXITS):
        for code, why in known.items():
            for rank, found in codes.items():
                if found == code:
                    return RankOutcome(code, f"rank {rank} exited with {code}: {why}", rank)
    # The agent ends the other ranks by SIGTERM; and a killed rank makes others crash, rather than the other way round.
    rank, code = min(codes.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[1]))
    return RankOutcome(code, f"rank {rank} {_killed_by(code) if code < 0 else f'crashed with {code}'}", rank)


def _killed_by(code: int) -> str:
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
