"""Health checks (stall detection, loss spikes, dead ranks, …): pure functions from a run's history to findings.

The conditions and their limits are in `conditions`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from statistics import median

from nsa_train import names
from nsa_train.record.failure_codes import FailureCode, recorded_code
from nsa_train.record.heartbeat_record import ALIVE_EVERY_S, HeartbeatRecord
from nsa_train.watch.conditions import CONDITIONS, AlertLevel, HealthFinding, HealthLimits
from nsa_train.watch.history import RankLog, RunFacts, RunHistory, is_finite
from nsa_train.watch.trends import creep, gain, lasting_drop, rise, spikes

_CONDITION_OF_FAILURE: Mapping[str, str] = {
    FailureCode.OUT_OF_MEMORY: "out_of_memory",
    FailureCode.DATA_PROCESS_KILLED: "out_of_memory",
    FailureCode.DATA_TIMEOUT: "loader_timeout",
}
"""Every other failure is `run_failed`."""
_APART = 8
"""Records by which ranks may be apart when their forward times are compared."""
_MEMORY_FIELDS = ("host_mem_rss", "gpu_mem_alloc", "gpu_mem_reserved")


def examine(history: RunHistory, *, now: float, limits: HealthLimits) -> list[HealthFinding]:
    """All findings, critical first. `now` is on the same monotonic clock as the history."""
    findings = [
        _finding(name, log, log.last.step, message)
        for log in history.present.values()
        for name, message in _of_rank(log, history, now, limits)
    ]
    findings += _failure(history) or _missing_ranks(history, now, limits)
    findings += _waiting(history)
    if history.first is not None:
        findings += _of_run(history, history.first, limits)
    return sorted(
        findings, key=lambda finding: (finding.level != AlertLevel.CRITICAL, list(CONDITIONS).index(finding.name))
    )


def stall_limit_s(log: RankLog, history: RunHistory, limits: HealthLimits) -> float:
    """The time that this process may go without a heartbeat at its current step."""
    limit = max(limits.stall_s, limits.stall_steps * log.step_s)
    # Whether a process on another host is gone is not known; its launcher has recorded that it starts another one.
    restarting = history.restarted_at is not None and log.last_at <= history.restarted_at
    paused = log.last.msg in (names.SKIPPED, names.ROLLED_BACK) or _pause_ahead(log, history)
    if not log.progress or restarting or paused:
        return max(limit, limits.startup_s)
    return limit


def _finding(name: str, log: RankLog | None, step: int, message: str) -> HealthFinding:
    return HealthFinding(CONDITIONS[name], None if log is None else log.rank, step, message)


def _of_rank(log: RankLog, history: RunHistory, now: float, limits: HealthLimits) -> Iterator[tuple[str, str]]:
    if log.last.msg == names.FAILED:
        code = recorded_code(log.last.failure_code, log.last.detail or "")
        yield _CONDITION_OF_FAILURE.get(code, "run_failed"), log.last.detail or "no detail"
    if log.ahead_s > limits.clock_skew_s:
        ahead = f"the newest heartbeat is {log.ahead_s:,.0f} s ahead of the local clock"
        yield "clock_skew", f"{ahead}, limit {limits.clock_skew_s:g} s"
    if not log.ended:
        yield from _heartbeat_stall(log, history, now, limits)
    if log.progress:
        yield from _memory(log, limits)
        yield from _data(log, limits)


def _heartbeat_stall(log: RankLog, history: RunHistory, now: float, limits: HealthLimits) -> Iterator[tuple[str, str]]:
    age, limit = now - log.last_at, stall_limit_s(log, history, limits)
    if log.rank in history.gone:
        if age > limits.gone_s:
            gone = f"process {log.last.pid} is gone"
            yield "process_gone", f"{gone}, last heartbeat {age:.0f} s ago, limit {limits.gone_s:g} s"
        return  # until then a launcher may be restarting it
    if age > limit:
        yield "heartbeat_stall", f"last heartbeat {age:.0f} s ago at step {log.last.step}, limit {limit:.0f} s"
        return
    still, limit = now - log.step_at, max(limit, limits.evaluation_s if _evaluates(log, history) else 0.0)
    empty = _streak(log.progress, lambda beat: beat.toks_per_s == 0)
    if log.last_at > log.step_at and still > limit:
        yield "throughput_zero", f"heartbeats but no new step for {still:.0f} s, limit {limit:.0f} s"
    elif empty >= limits.gate_records:
        yield "throughput_zero", f"0 tokens/s in each of the last {empty} records"


def _pause_ahead(log: RankLog, history: RunHistory) -> bool:
    """Whether a save, an evaluation or the end of the run may have begun since the last heartbeat: all take long."""
    facts, step = history.facts, log.last.step
    since = math.ceil(ALIVE_EVERY_S / log.step_s) + 1 if log.step_s else 1  # steps that may be done but not recorded
    furthest = step + min(since, facts.log_every or since)
    if facts.steps is not None and furthest >= facts.steps:
        return True
    return any(every and furthest // every * every >= step for every in (facts.save_every, facts.eval_every))


def _evaluates(log: RankLog, history: RunHistory) -> bool:
    facts, step = history.facts, log.last.step
    return bool(facts.eval_every) and (step % (facts.eval_every or 1) == 0 or step == facts.steps)


def _numbers(log: RankLog, limits: HealthLimits) -> Iterator[tuple[str, str]]:
    for field, name, word in (("loss", "loss_nonfinite", "loss"), ("grad_norm", "grad_nonfinite", "gradient norm")):
        bad = [not is_finite(getattr(beat, field)) for beat in log.progress]
        taken = [
            beat for beat, is_bad in zip(log.progress, bad, strict=True) if is_bad and not log.skipped_step_of(beat)
        ]
        lately = bad[-limits.nonfinite_records :]
        if taken:
            yield name, f"{word} {getattr(taken[-1], field)} at step {taken[-1].step}, which was not skipped"
        elif len(lately) == limits.nonfinite_records and all(lately):
            yield name, f"{word} not finite in {len(lately)} records in a row, up to step {log.last.step}"


def _memory(log: RankLog, limits: HealthLimits) -> Iterator[tuple[str, str]]:
    for field in _MEMORY_FIELDS:
        values = [getattr(span, field) for span in log.spans]
        grown = creep(values, limits.creep_mib)
        if grown is not None and grown > limits.creep:
            minutes = sum(span.seconds for span in log.spans) / 60
            growth = f"{field} grew by {grown:.0%} to {values[-1]:,.0f} MiB in {minutes:.0f} min"
            yield "memory_creep", f"{growth}, limit {limits.creep:.0%}"
            return


def _data(log: RankLog, limits: HealthLimits) -> Iterator[tuple[str, str]]:
    slow = _streak(log.progress, lambda beat: (beat.dt_fetch_s or 0.0) > limits.fetch_s)
    if slow >= limits.fetch_records:
        wait = f"waited {log.progress[-1].dt_fetch_s:.1f} s for a batch"
        yield "data_slow", f"{wait}; more than {limits.fetch_s:g} s in each of the last {slow} records"
    last = log.progress[-1]
    if last.reads_pred is not None and last.reads_act_total is not None and last.reads_pred != last.reads_act_total:
        yield "reads_differ", f"{last.reads_act_total} keys read, {last.reads_pred} predicted, at step {last.step}"


def _gates(log: RankLog, limits: HealthLimits) -> Iterator[tuple[str, str]]:
    def lately(field: str) -> list[float]:
        values = [getattr(beat, field) for beat in log.progress][-limits.gate_records :]
        return values if len(values) == limits.gate_records and None not in values else []

    if (entropy := lately("gate_entropy_mean")) and max(entropy) < limits.entropy_warning:
        name, limit = "gate_entropy_low", limits.entropy_warning
        if max(entropy) < limits.entropy_critical:
            name, limit = "gate_entropy_critical", limits.entropy_critical
        yield name, f"gate entropy {entropy[-1]:.3f} nats, limit {limit:g}, over {len(entropy)} records"
    if (collapsed := lately("gate_collapse_frac")) and min(collapsed) > limits.collapse_warning:
        name, limit = "gate_collapse_high", limits.collapse_warning
        if min(collapsed) > limits.collapse_critical:
            name, limit = "gate_collapse_critical", limits.collapse_critical
        share = f"{collapsed[-1]:.1%} of the gates collapsed"
        yield name, f"{share}, limit {limit:.0%}, over {len(collapsed)} records"
    if (largest := lately("gate_max_mean")) and min(largest) >= limits.gate_max:
        yield "gate_max_high", f"largest gate {largest[-1]:.3f} on average, limit {limits.gate_max:g}"


def _failure(history: RunHistory) -> list[HealthFinding]:
    """A failure that only an event records: before the first heartbeat, or of all ranks at once."""
    failure = history.failure
    if failure is None or any(log.last.msg == names.FAILED for log in history.present.values()):
        return []
    condition = _CONDITION_OF_FAILURE.get(failure.details.get("failure_code", ""), "run_failed")
    message = failure.details.get("error") or failure.details.get("why") or "no reason given"
    return [_finding(condition, None, failure.step, str(message))]


def _waiting(history: RunHistory) -> list[HealthFinding]:
    """A launcher that waits for other nodes; not one that waits to join ranks which run without it."""
    waiting = history.waiting
    if waiting is None or any(log.last.ts > waiting.ts for log in history.present.values()):
        return []
    return [_finding("nodes_missing", None, waiting.step, str(waiting.details.get("why") or "no reason given"))]


def _missing_ranks(history: RunHistory, now: float, limits: HealthLimits) -> list[HealthFinding]:
    """Ranks without a heartbeat since the run was started."""
    began = history.started_at
    if began is None or now - began <= limits.startup_s or history.failure is not None:
        return []
    message = f"no heartbeat since the run was started {now - began:.0f} s ago, limit {limits.startup_s:g} s"
    missing = (rank for rank in range(history.facts.world or 1) if rank not in history.present)
    return [HealthFinding(CONDITIONS["heartbeat_stall"], rank, history.step, message) for rank in missing]


def _of_run(history: RunHistory, log: RankLog, limits: HealthLimits) -> Iterator[HealthFinding]:
    """Conditions of the whole run, and comparisons between ranks."""
    messages = [*_skips(log, limits), *_saves(history, log, limits)]
    if log.progress:
        messages += [*_numbers(log, limits), *_losses(log, history.facts, limits), *_pace(log, limits)]
        messages += _gates(log, limits)
        if history.facts.is_substituted(log.progress[-1]):
            what = f"training on {log.progress[-1].data}, configured is {history.facts.dataset}"
            messages.append(("synthetic_data", what))
    copy_failure = history.copy_failure if history.facts.checkpoint_store is not None else None
    for name, failed in (("evaluation_failed", history.evaluation_failure), ("copy_failed", copy_failure)):
        if failed is not None:
            messages.append((name, f"at step {failed.step}: {failed.details.get('error') or 'no reason given'}"))
    for name, message in messages:
        yield _finding(name, None, log.last.step, message)
    yield from _stragglers(history, limits)


def _skips(log: RankLog, limits: HealthLimits) -> Iterator[tuple[str, str]]:
    since = log.progress[-limits.window].step if len(log.progress) >= limits.window else -1
    recent = [beat for beat in log.skipped if beat.step >= since]
    if recent:
        last = f"the last at step {recent[-1].step}: {recent[-1].detail or 'no reason given'}"
        yield "steps_skipped", f"{len(recent)} step{'s' * (len(recent) > 1)} skipped, {last}"


def _losses(log: RankLog, facts: RunFacts, limits: HealthLimits) -> Iterator[tuple[str, str]]:
    # The loss need not fall where some parameters are frozen: the selector loss alone may train the others.
    frozen = facts.trainable is not None and "*" not in facts.trainable
    # Later in a run a thousand steps improve less; a fixed share of the steps so far improves about the same.
    steps = max(limits.plateau_steps, int(limits.plateau_share * log.last.step))
    gained, risen = gain(log.losses, steps), _risen(log, limits)
    if risen:
        yield "loss_divergence", risen
    elif not frozen and gained is not None and gained < limits.plateau_gain:
        yield "loss_plateau", f"loss changed by {-gained:+.2%} over {steps} steps, less than −{limits.plateau_gain:.2%}"
    for field, name, word in (("loss", "loss_spike", "loss"), ("grad_norm", "grad_spikes", "gradient norm")):
        recent = list(log.progress)[-limits.window :]
        values = [math.nan if value is None else value for value in (getattr(beat, field) for beat in recent)]
        places = spikes(values, limits.spike_sigma)
        if name == "loss_spike" and risen:
            continue  # reported as divergence already
        if len(places) >= limits.spike_records:
            worst = max(values[i] for i in places)
            yield name, f"{word} spiked {len(places)} times in {len(recent)} records, up to {worst:.4g}"


def _risen(log: RankLog, limits: HealthLimits) -> str | None:
    """Compare losses of this process only: with other data or settings, a resumed run has another loss and is well."""
    increase = rise([loss for step, loss in log.losses if step > log.began_step], limits.divergence_records)
    if increase is None or increase.sigma < limits.divergence_sigma:
        return None
    if increase.share < limits.divergence or increase.now - increase.lowest < limits.divergence_nats:
        return None
    return (
        f"loss rose by {increase.share:.0%} from {increase.lowest:.4g} to {increase.now:.4g} (means of "
        f"{limits.divergence_records} records), {min(increase.sigma, 999):.0f} times the noise"
    )


def _pace(log: RankLog, limits: HealthLimits) -> Iterator[tuple[str, str]]:
    pairs = [(span.seconds, span.toks_per_s) for span in log.spans]
    slow_s, usual = lasting_drop(pairs, [span.toks_per_s for span in log.first_spans], limits.throughput_drop)
    if slow_s > limits.throughput_drop_s:
        now = log.spans[-1].toks_per_s
        yield "throughput_drop", f"{now:,.0f} tokens/s instead of {usual:,.0f}, for {slow_s / 60:.0f} min"


def _saves(history: RunHistory, log: RankLog, limits: HealthLimits) -> Iterator[tuple[str, str]]:
    every, behind = history.facts.save_every or 0, log.last.step - history.saved_step
    if every > 0 and not log.ended and behind > limits.checkpoint_overdue * every:
        yield "checkpoint_overdue", f"{behind} steps since the last checkpoint, train.save_every is {every}"


def _stragglers(history: RunHistory, limits: HealthLimits) -> Iterator[HealthFinding]:
    """Compares forward times of ranks at the same steps: no rank waits for others in it, so the slow rank shows."""
    logs, records = history.present, limits.straggler_records
    if len(logs) < 2:
        return
    # Some ranks are a few records ahead of others: look that much further back for steps they have in common.
    steps = [{beat.step for beat in list(log.progress)[-records - _APART :]} for log in logs.values()]
    shared = sorted(set.intersection(*steps))[-records:]
    if len(shared) < records:
        return
    own: dict[int, list[float]] = {}
    for rank, log in logs.items():
        by_step = {beat.step: beat.forward_s or 0.0 for beat in log.progress}
        own[rank] = [by_step[step] for step in shared]
    for rank, times in own.items():
        log = logs[rank]
        others = [median(values) for values in zip(*(t for other, t in own.items() if other != rank), strict=True)]
        # And the delay must matter: at least a tenth of the step.
        behind = [
            mine > limits.straggler * other and mine - other > 0.1 * log.step_s
            for mine, other in zip(times, others, strict=True)
        ]
        if all(behind):
            message = f"forward takes {times[-1]:.3f} s, {times[-1] / max(others[-1], 1e-9):.1f} times the other ranks'"
            yield _finding("straggler", log, log.last.step, message)


def _streak(beats: Sequence[HeartbeatRecord], holds: Callable[[HeartbeatRecord], bool]) -> int:
    """Number of the most recent consecutive records for which `holds` is true."""
    return sum(1 for _ in takewhile(holds, reversed(beats)))
