"""Heartbeats of runs that are well and of runs that are not: one recording for every condition.

Plain beats per rank on a time axis in seconds (`HeartbeatRecord.ts`), with what env.json and events.jsonl would say.
`end` is the moment to evaluate at. Every back-end that evaluates the conditions is tested on these.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nsa_train import names
from nsa_train.record.events import EventKind, RunEvent
from nsa_train.record.failure_codes import FailureCode
from nsa_train.record.heartbeat_record import HeartbeatRecord
from nsa_train.watch.conditions import CONDITIONS
from nsa_train.watch.history import RunFacts, RunHistory
from tests.nsa_train.record.beats import BEGAN, STEP_S, TOKENS_PER_STEP, Change, a_beat, a_run, progress


@dataclass
class Recording:
    beats: dict[int, list[HeartbeatRecord]]
    end: float
    facts: RunFacts = field(
        default_factory=lambda: RunFacts(
            host="here", world=1, local_world=1, steps=50_000, log_every=1, save_every=200, eval_every=100,
            dataset="fineweb_edu",
        )
    )  # fmt: skip
    events: list[RunEvent] = field(default_factory=list)
    gone: frozenset[int] = frozenset()
    """Ranks whose process does not exist at the end."""
    ahead_s: float = 0.0
    """How far the clock of the run is ahead of the reader's."""

    def at(self, moment: float) -> "Recording":
        """Return what was known at an earlier moment."""
        beats = {rank: [beat for beat in log if beat.ts <= moment] for rank, log in self.beats.items()}
        return replace(self, beats=beats, events=[event for event in self.events if event.ts <= moment], end=moment)

    def history(self) -> RunHistory:
        history = RunHistory(facts=self.facts, gone=self.gone)
        for event in self.events:
            history.add_event(event, event.ts)
        for beat in sorted((beat for log in self.beats.values() for beat in log), key=lambda beat: beat.ts):
            history.add(beat, beat.ts, self.ahead_s)
        return history


def record(beats: Iterable[HeartbeatRecord], *, after_s: float = 1.0, **facts: Any) -> Recording:
    """One rank's beats, evaluated a moment after the last, with a save at every due step."""
    log = list(beats)
    recording = Recording({0: log}, log[-1].ts + after_s)
    recording.facts = replace(recording.facts, **facts)
    recording.events = list(_events(log, recording.facts.save_every or 0))
    return recording


def _events(beats: list[HeartbeatRecord], save_every: int) -> Iterator[RunEvent]:
    for beat in beats:
        if beat.msg == names.START:
            yield RunEvent(beat.ts - 1.0, EventKind.RESTART if beat.step else EventKind.START, beat.step, {})
        if beat.msg == names.PROGRESS and save_every and beat.step % save_every == 0:
            yield RunEvent(beat.ts + 3.0, EventKind.SAVE, beat.step, {})


def noisy(seed: int = 0, steps: int = 500) -> Recording:
    """Well, with what every run has: jitter, a slow fetch now and then, one large gradient, evaluations, saves."""
    rng = random.Random(seed)
    large = rng.randrange(60, steps)

    def change(step: int) -> dict[str, Any]:
        step_s = STEP_S * rng.uniform(0.9, 1.1)
        return dict(
            step_s=step_s,
            toks_per_s=TOKENS_PER_STEP / step_s,
            loss=3.0 + 5.0 * (step + 1) ** -0.3 + rng.gauss(0, 0.05),
            grad_norm=0.8 + (5 if step == large else rng.gauss(0, 1)) * 0.08,
            dt_fetch_s=1.5 if rng.random() < 0.03 else 0.01 + rng.random() * 0.1,
            host_mem_rss=4000.0 + rng.uniform(-100, 100),
            gate_entropy_mean=1.05 + rng.gauss(0, 0.01),
            sel_pct_at_max=0.016 * rng.uniform(0.8, 1.2),
            pause_s=40.0 if step % 100 == 1 and step > 1 else 0.0,
        )

    return record(a_run(steps, change))


def sparse() -> Recording:
    """Records 20 steps apart and slow steps: the beats between say only that it is alive."""
    beats, now = [a_beat(names.START, 0, BEGAN)], BEGAN + 100
    for step in range(1, 401):
        now += 20.0
        beats.append(
            progress(step, now, step_s=20.0) if step % 20 == 0 or step == 1 else a_beat(names.ALIVE, step, now)
        )
    return record(beats, after_s=15.0, log_every=20)


def evaluating() -> Recording:
    """A quarter of an hour of evaluation: beats, and no step."""
    beats = a_run(100)
    beats += [a_beat(names.ALIVE, 100, beats[-1].ts + 16.0 * i) for i in range(1, 56)]
    return record(beats)


def saving() -> Recording:
    """Five minutes of silence where a save is due."""
    return record(a_run(200), after_s=290.0)


def late() -> Recording:
    """Record a healthy run at step 32,000, where a thousand steps gain next to nothing."""
    rng = random.Random(0)
    loss = lambda step: {"loss": 3.0 + 5.0 * step**-0.3 + rng.gauss(0, 0.02)}  # noqa: E731
    return record(a_run(12_000, loss, first=20_000, every=20), log_every=20)


def very_noisy() -> Recording:
    """A batch of few tokens: the loss of a record says little, and the run is well."""
    rng = random.Random(3)
    return record(a_run(900, lambda step: {"loss": 3.0 + 5.0 * step**-0.3 + rng.gauss(0, 0.4)}))


def other_data() -> Recording:
    """Started again on other data, on which the loss is higher, and falls."""
    first = a_run(200)
    harder = lambda step: {"loss": 5.0 + 5.0 * (step - 199) ** -0.3}  # noqa: E731
    return record([*first, *a_run(100, harder, first=201, began=first[-1].ts + 90, pid=2000)])


def evaluated_again() -> Recording:
    """An evaluation failed, the next did not."""
    recording = record(a_run(250))
    times = {beat.step: beat.ts for beat in recording.beats[0]}
    recording.events += [
        RunEvent(times[100], EventKind.EVALUATION_FAILED, 100, {"error": "x"}),
        RunEvent(times[200], EventKind.EVALUATION, 200, {"val_loss": 3.0}),
    ]
    recording.events.sort(key=lambda event: event.ts)
    return recording


def compiling() -> Recording:
    return record(a_run(0), after_s=500.0)


def finished() -> Recording:
    beats = a_run(300)
    return record([*beats, a_beat(names.DONE, 300, beats[-1].ts + 30)], after_s=1e6, steps=300)


def restarted() -> Recording:
    """Killed at step 330, begun again from step 200 by another process: losses and times go back."""
    killed = a_run(330, lambda step: {"host_mem_rss": 6000.0})
    return record([*killed, *a_run(100, first=201, began=killed[-1].ts + 90, pid=2000)])


def two_ranks(slow: float = 1.0) -> Recording:
    """`slow` is the forward time of rank 1 against rank 0's."""
    logs = {rank: a_run(60, rank=rank) for rank in (0, 1)}
    logs[1] = [replace(b, forward_s=b.forward_s and b.forward_s * slow) for b in logs[1]]
    recording = record(logs[0], world=2, local_world=2)
    recording.beats = logs
    return recording


HEALTHY: dict[str, Callable[[], Recording]] = {
    **{f"noisy {seed}": (lambda seed=seed: noisy(seed)) for seed in range(5)},  # type: ignore[misc]
    "sparse": sparse,
    "evaluating": evaluating,
    "saving": saving,
    "compiling": compiling,
    "finished": finished,
    "restarted": restarted,
    "two ranks": two_ranks,
    "late": late,
    "very noisy": very_noisy,
    "other data": other_data,
    "copied": lambda: _copies(EventKind.COPIED, EventKind.COPIED),
}


def _hung(after_s: float) -> Recording:
    return record(a_run(150), after_s=after_s)


def _gone() -> Recording:
    return replace(record(a_run(150), after_s=301.0), gone=frozenset({0}))


def _failed(detail: str, code: FailureCode | None = None) -> Recording:
    beats = a_run(50)
    return record([*beats, a_beat(names.FAILED, 51, beats[-1].ts + 1, detail=detail, failure_code=code)], after_s=10.0)


def _still() -> Recording:
    beats = a_run(150)
    return record([*beats, *(a_beat(names.ALIVE, 150, beats[-1].ts + 16.0 * i) for i in range(1, 14))])


def _skipping() -> Recording:
    """A step that was not finite and not taken; the record of that step still shows it."""
    beats = a_run(120, lambda step: {"nonfinite_steps": int(step >= 90), "skipped_steps": int(step >= 90)})
    (at,) = (i for i, beat in enumerate(beats) if beat.step == 90)
    beats[at] = replace(beats[at], loss=math.nan, grad_norm=math.nan)
    skip = a_beat(names.SKIPPED, 90, beats[at].ts - 0.1, loss=math.nan, grad_norm=math.nan, detail="loss is nan")
    return record([*beats[:at], skip, *beats[at:]])


def _skipping_uncounted() -> Recording:
    """`_skipping` from a version that does not count."""
    recording = _skipping()
    recording.beats[0] = [replace(beat, nonfinite_steps=None, skipped_steps=None) for beat in recording.beats[0]]
    return recording


def _skipping_all() -> Recording:
    """Every step skipped: the weights themselves are bad."""
    beats = a_run(60)
    for step in (61, 62, 63):
        ts = beats[-1].ts + STEP_S
        bad: dict[str, Any] = dict(loss=math.nan, nonfinite_steps=step - 60, skipped_steps=step - 60)
        beats += [a_beat(names.SKIPPED, step, ts, detail="loss is nan", **bad), progress(step, ts, **bad)]
    return record(beats)


def _made_up() -> Recording:
    return record(replace(beat, synthetic=True, data="synthetic copy") for beat in a_run(10))


def _after(since: int, **changed: Any) -> Recording:
    return record(a_run(since + 20, lambda step: changed if step > since else {}))


def _at(steps: Iterable[int], **changed: Any) -> Recording:
    return record(a_run(150, lambda step: changed if step in set(steps) else {}))


def _rising(since: int, by: float, noise: float = 0.02) -> Change:
    """The loss falls as usual until `since` and rises by so much per step from there on."""
    rng = random.Random(since)
    return lambda step: {"loss": 3.0 + 5.0 * min(step, since) ** -0.3 + max(0, step - since) * by + rng.gauss(0, noise)}


def _without_saves() -> Recording:
    recording = record(a_run(450))
    recording.events = [event for event in recording.events if event.kind != EventKind.SAVE]
    return recording


def _nodes_missing() -> Recording:
    recording = record(a_run(50))
    recording.events.append(
        RunEvent(recording.end - 1, EventKind.WAITING, 50, {"launcher": "waits for nodes", "why": "waiting for n1"})
    )
    return recording


def _evaluation_failed() -> Recording:
    recording = record(a_run(50))
    recording.events += [
        RunEvent(recording.beats[0][24].ts, EventKind.EVALUATION, 25, {"val_loss": 3.0}),
        RunEvent(recording.end - 1, EventKind.EVALUATION_FAILED, 50, {"error": "DataError: no rows"}),
    ]
    return recording


def _copies(*kinds: EventKind) -> Recording:
    """Copies of the checkpoints of steps 10, 20, …; the newest is that of the last kind."""
    recording = record(a_run(10 * len(kinds)), checkpoint_store="s3://bucket/run")
    times = {beat.step: beat.ts for beat in recording.beats[0]}
    recording.events += [
        RunEvent(times[step], kind, step, {"error": "403"} if kind == EventKind.COPY_FAILED else {})
        for step, kind in zip(range(10, 10 * len(kinds) + 1, 10), kinds, strict=True)
    ]
    return recording


def _slow(since: int, steps: int) -> Recording:
    slow = dict(step_s=5.0, toks_per_s=TOKENS_PER_STEP / 5.0)
    return record(a_run(steps, lambda step: slow if step > since else {}))


UNWELL: dict[str, list[Callable[[], Recording]]] = {
    "heartbeat_stall": [lambda: _hung(181.0)],
    "process_gone": [_gone],
    "run_failed": [
        lambda: _failed("RuntimeError: a kernel went wrong"),
        lambda: _failed("the message mentions out of memory", FailureCode.NONFINITE),
    ],
    "loss_nonfinite": [lambda: _at([150], loss=math.nan), lambda: _at([140], loss=math.inf), _skipping_all],
    "grad_nonfinite": [lambda: _at([150], grad_norm=math.inf)],
    "loss_divergence": [
        lambda: record(a_run(200, _rising(120, 0.02))),
        lambda: record(a_run(400, _rising(200, 0.004, noise=0.1))),
        lambda: record(a_run(3000, _rising(1000, 0.0005))),
    ],
    "throughput_zero": [_still, lambda: _after(50, toks_per_s=0.0)],
    "gate_entropy_critical": [lambda: _after(50, gate_entropy_mean=0.19)],
    "gate_collapse_critical": [lambda: _after(50, gate_collapse_frac=0.25)],
    "loader_timeout": [
        lambda: _failed("_TooLate: a batch from fineweb did not come within 120 s (the process is alive …)"),
        lambda: _failed("DataTimeout: http://host/a.parquet, row group 3 could not be read: … in 90 s (8 attempts)"),
        lambda: _failed("any wording", FailureCode.DATA_TIMEOUT),
    ],
    "out_of_memory": [
        lambda: _failed("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        lambda: _failed("any wording", FailureCode.OUT_OF_MEMORY),
        lambda: _failed("any wording", FailureCode.DATA_PROCESS_KILLED),
    ],
    "steps_skipped": [_skipping, _skipping_uncounted],
    "loss_plateau": [lambda: record(a_run(1100, lambda step: {"loss": 4.0}))],
    "loss_spike": [lambda: _at([100, 120, 140], loss=9.0)],
    "throughput_drop": [lambda: _slow(100, 240), lambda: _slow(100, 2000)],
    "gate_entropy_low": [lambda: _after(50, gate_entropy_mean=0.29)],
    "gate_collapse_high": [lambda: _after(50, gate_collapse_frac=0.15)],
    "gate_max_high": [lambda: _after(50, gate_max_mean=0.9)],
    "reads_differ": [lambda: _at([150], reads_act_total=999_999)],
    "data_slow": [lambda: _after(50, dt_fetch_s=2.1)],
    "memory_creep": [
        lambda: record(a_run(400, lambda step: {"host_mem_rss": 4000.0 + 4.0 * step})),
        lambda: record(a_run(400, lambda step: {"gpu_mem_alloc": 21_000.0 + 20.0 * step})),
        lambda: record(a_run(400, lambda step: {"gpu_mem_reserved": 30_000.0 + 30.0 * step})),
    ],
    "grad_spikes": [lambda: _at([100, 120, 140], grad_norm=8.0)],
    "straggler": [lambda: two_ranks(1.6)],
    "checkpoint_overdue": [_without_saves],
    "copy_failed": [lambda: _copies(EventKind.COPIED, EventKind.COPY_FAILED)],
    "nodes_missing": [_nodes_missing],
    "evaluation_failed": [_evaluation_failed],
    "synthetic_data": [_made_up],
    "clock_skew": [lambda: replace(record(a_run(50)), ahead_s=3600.0)],
}
assert UNWELL.keys() == CONDITIONS.keys()
