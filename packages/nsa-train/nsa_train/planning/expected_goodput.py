"""Goodput of a run under failures: how often to save, and what failures and saving cost (Young and Daly).

With a mean time between failures M, a save that stops training for δ and a restart that takes R, saving every T loses
δ/T + T/(2M) + R/M of the time; T = √(2δM) loses least.
"""

from dataclasses import dataclass
from math import sqrt

LLAMA3_GPU_HOURS = 16_384 * 54 * 24 / 419
"""GPU-hours per interruption in the pretraining of Llama 3: 419 unexpected ones in 54 days on 16,384 GPUs."""
_RESTART_S = 600.0
"""Seconds from a failure to the next step, with detection, rendezvous and loading (assumed)."""
_STORAGE_GB_S = 2.0
"""Speed at which one node writes to storage (assumed)."""
_STAGING_GB_S = 10.0
"""Speed of copies from a GPU to the host, which a save in the background waits for (assumed)."""
_FIXED_SAVE_S = 2.0
"""Seconds for planning a save and for its barriers (assumed)."""


@dataclass(frozen=True)
class FailureModel:
    gpu_hours_per_failure: float = LLAMA3_GPU_HOURS
    restart_s: float = _RESTART_S
    storage_gb_s: float = _STORAGE_GB_S

    def mtbf_s(self, gpus: int) -> float:
        """Mean time between failures of any of so many GPUs."""
        return 3600 * self.gpu_hours_per_failure / gpus

    def save_s(self, checkpoint_bytes: float, gpus: int, writers: int, nodes: int, *, background: bool) -> float:
        """Seconds for which a save stops training. `writers`: ranks that have a share of the checkpoint to write."""
        if background:
            return _FIXED_SAVE_S + checkpoint_bytes / min(writers, gpus) / (1e9 * _STAGING_GB_S)
        return _FIXED_SAVE_S + self.write_s(checkpoint_bytes, nodes)

    def write_s(self, checkpoint_bytes: float, nodes: int) -> float:
        """Seconds until a checkpoint is stored by the nodes that hold a share of it."""
        return checkpoint_bytes / (1e9 * self.storage_gb_s * nodes)


@dataclass(frozen=True)
class RunGoodput:
    mtbf_s: float
    save_s: float
    restart_s: float
    interval_s: float
    """Seconds between two saves."""

    @property
    def best_interval_s(self) -> float:
        return sqrt(2 * self.save_s * self.mtbf_s)

    @property
    def lost(self) -> float:
        """Share of the time: saving, steps done again, restarts; at most 1."""
        return min(1.0, self.lost_at(self.interval_s))

    def lost_at(self, interval_s: float) -> float:
        return self.save_s / interval_s + interval_s / (2 * self.mtbf_s) + self.restart_s / self.mtbf_s
