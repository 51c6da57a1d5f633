"""Run folders with any number of heartbeat records, as a healthy run writes them, for load tests."""

import json
import math
import time
from pathlib import Path
from typing import Any

from nsa_train import names
from nsa_train.record.events import EventKind, add_event
from nsa_train.record.heartbeat_record import HeartbeatRecord

_TOKENS = 16_384
_STEP_S = 2.0
_LAYERS = 12
_CONFIG: dict[str, Any] = {
    "train": {"steps": 1_000_000, "log_every": 1, "save_every": 1000},
    "data": {"dataset": "local"},
}


def write_run_folder(folder: Path, steps: int, *, saves: int = 100) -> Path:
    """A run of one rank that is at its last step now, with `saves` checkpoints in its events."""
    folder.mkdir(parents=True)
    began = time.time() - steps * _STEP_S
    with (folder / names.heartbeat(0)).open("w", encoding="utf-8") as file:
        for step in range(steps + 1):
            file.write(_record(step, began + step * _STEP_S).to_line() + "\n")
    add_event(folder, EventKind.START, ts=began, step=0)
    for step in range(steps // saves, steps + 1, max(1, steps // saves)):
        add_event(folder, EventKind.SAVE, ts=began + step * _STEP_S, step=step, seconds=1.0)
    env = {"nsa": "0", "host": "elsewhere", "config": _CONFIG, "world_size": 1, "local_world_size": 1}
    (folder / names.ENV).write_text(json.dumps(env), encoding="utf-8")
    return folder


def append_steps(folder: Path, first: int, count: int) -> None:
    with (folder / names.heartbeat(0)).open("a", encoding="utf-8") as file:
        for step in range(first, first + count):
            file.write(_record(step, time.time()).to_line() + "\n")


def _record(step: int, ts: float) -> HeartbeatRecord:
    if step == 0:
        return HeartbeatRecord.now(ts=ts, rank=0, step=0, msg=names.START)
    wave = math.sin(step / 50)
    return HeartbeatRecord.now(
        ts=ts,
        rank=0,
        step=step,
        msg=names.PROGRESS,
        loss=2.5 + 5.0 * step**-0.3 + 0.02 * wave,
        toks_per_s=_TOKENS / _STEP_S,
        step_s=_STEP_S,
        forward_s=0.6,
        dt_fetch_s=0.01,
        grad_norm=0.8 + 0.1 * wave,
        lr=3e-4,
        tokens_seen=step * _TOKENS,
        skipped_steps=0,
        nonfinite_steps=0,
        host_mem_rss=4000.0,
        gate_entropy_mean=1.05,
        gate_max_mean=0.4,
        gate_collapse_frac=0.0,
        gate_branch_shares=(0.3, 0.3, 0.4),
        gate_shares_by_layer=((0.3, 0.3, 0.4),) * _LAYERS,
    )
