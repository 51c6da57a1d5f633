"""Heartbeats of a run that is well: one beat, one progress record, a run with changes at some steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nsa_train import names
from nsa_train.record.heartbeat_record import HeartbeatRecord

BEGAN = 1_700_000_000.0
STEP_S = 2.0
TOKENS_PER_STEP = 16_384


def a_beat(msg: str, step: int, ts: float, *, rank: int = 0, pid: int = 1000, **more: Any) -> HeartbeatRecord:
    return replace(
        HeartbeatRecord.now(ts=ts, rank=rank, step=step, msg=msg, data="fineweb", synthetic=False, **more),
        pid=pid + rank,
    )


def progress(step: int, ts: float, *, step_s: float = STEP_S, **changed: Any) -> HeartbeatRecord:
    """A record in which nothing is unusual."""
    usual: dict[str, Any] = dict(
        loss=3.0 + 5.0 * (step + 1) ** -0.3, toks_per_s=TOKENS_PER_STEP / step_s, step_s=step_s, forward_s=0.3 * step_s,
        dt_fetch_s=0.01, grad_norm=0.8, lr=3e-4, tokens_seen=step * TOKENS_PER_STEP, skipped_steps=0, nonfinite_steps=0,
        host_mem_rss=4000.0, gpu_mem_alloc=21_000.0, gpu_mem_reserved=30_000.0, gate_entropy_mean=1.05,
        gate_max_mean=0.4, gate_collapse_frac=0.0, gate_branch_shares=(0.3, 0.3, 0.4),
        gate_shares_by_layer=((0.3, 0.3, 0.4),) * 2,
        sel_k_mean=200.0, sel_k_max=256, sel_pct_at_max=0.015, reads_pred=1_000_000, reads_act_total=1_000_000,
    )  # fmt: skip
    return a_beat(names.PROGRESS, step, ts, **(usual | changed))


Change = Callable[[int], dict[str, Any]]


def a_run(
    steps: int,
    change: Change = lambda step: {},
    *,
    first: int = 1,
    began: float = BEGAN,
    every: int = 1,
    pid: int = 1000,
    rank: int = 0,
) -> list[HeartbeatRecord]:
    """Start, then progress; `change` gives what is unusual at a step, `pause_s` among it."""
    beats, now = [a_beat(names.START, first - 1, began, rank=rank, pid=pid)], began + 20.0
    for step in range(first, first + steps):
        what = dict(change(step))
        now += what.get("step_s", STEP_S) + what.pop("pause_s", 0.0)
        if step % every == 0 or step == first:
            beats.append(replace(progress(step, now, **what), rank=rank, pid=pid + rank))
    return beats
