"""Smoke test of a finished run: checks steps, loss trend, checkpoints and metrics files."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from nsa_train import names
from nsa_train.record import record_files
from nsa_train.record.heartbeat_record import HeartbeatRecord, beat_fields, beat_of_fields
from nsa_train.record.record_files import RecordTail
from nsa_train.watch.trends import spread

_LEAST_BEATS = 4
"""Fewest progress records that have a first and a last quarter."""
_LEAST_SIGMA = 3.0
"""Standard errors by which the loss must fall: half of all runs that learn nothing end lower by chance."""
_FOLDER = (names.ENV, names.EVENTS, names.METRICS)
_FINISHED = (names.MODEL, names.MODEL_SAFETENSORS)


@dataclass(frozen=True)
class _SmokeCheck:
    name: str
    passed: bool
    text: str


def smoke(*, training_csv: Path, heartbeat: Path, min_steps: int, folder: Path | None = None) -> Iterator[_SmokeCheck]:
    """Checks the two files, and the whole run folder if one is given."""
    tail = RecordTail(heartbeat, beat_fields())
    beats = [beat_of_fields(values) for values in tail.whole_file()]
    progress = [beat for beat in beats if beat.msg == names.PROGRESS]
    rows, bad_rows = record_files.read_rows(training_csv)
    yield _SmokeCheck("progress_records", bool(progress), f"{heartbeat.name} has {len(progress)} progress records")
    yield _SmokeCheck("csv_rows", bool(rows), f"{training_csv.name} has {len(rows)} rows")
    starts = sum(beat.msg == names.START for beat in beats)
    damaged = {heartbeat.name: tail.unreadable, training_csv.name: bad_rows}
    # A process that is killed leaves at most one torn line in a file.
    yield _SmokeCheck(
        "readable_records",
        max(damaged.values()) <= max(1, starts),
        record_files.describe_unreadable(damaged) or "all records can be read",
    )
    if not progress or not rows:
        return
    last = max(beat.step for beat in progress)
    yield _SmokeCheck("steps", last >= min_steps, f"{last} steps done, at least {min_steps} required")
    yield _losses(progress)
    yield _falling(progress)
    yield _rows_agree(rows, progress)
    wrong = [beat for beat in progress if beat.reads_pred != beat.reads_act_total]
    yield _SmokeCheck(
        "key_reads", not wrong, f"keys read differ from those predicted in {len(wrong)} of {len(progress)} records"
    )
    still = [beat for beat in progress if beat.toks_per_s is not None and not beat.toks_per_s > 0]
    yield _SmokeCheck("throughput", not still, f"{len(still)} records with 0 tokens per second")
    ended, detail = beats[-1].msg, f": {beats[-1].detail}" if beats[-1].detail else ""
    yield _SmokeCheck("final_record", ended != names.FAILED, f"the last record is {ended!r}{detail}")
    if folder is not None:
        yield from _files(folder, finished=ended == names.DONE)


def _losses(progress: list[HeartbeatRecord]) -> _SmokeCheck:
    bad = [beat.step for beat in progress if beat.loss is None or not math.isfinite(beat.loss)]
    skipped = progress[-1].skipped_steps or 0
    return _SmokeCheck(
        "loss_finite", not bad, f"loss not finite in {len(bad)} of {len(progress)} records, {skipped} steps skipped"
    )


def _falling(progress: list[HeartbeatRecord]) -> _SmokeCheck:
    losses = [beat.loss for beat in progress if beat.loss is not None and math.isfinite(beat.loss)]
    if len(losses) < _LEAST_BEATS:
        return _SmokeCheck(
            "loss_falling", False, f"{len(losses)} losses are too few for a trend, at least {_LEAST_BEATS} required"
        )
    size = len(losses) // 4
    first, last = fmean(losses[:size]), fmean(losses[-size:])
    error = spread(losses) * math.sqrt(2 / size)
    return _SmokeCheck(
        "loss_falling",
        first - last > _LEAST_SIGMA * error,
        f"mean loss of the first quarter {first:.4f}, of the last {last:.4f}: fell by {first - last:.4f}, required "
        f"more than {_LEAST_SIGMA:g} times the standard error {error:.4f}",
    )


def _rows_agree(rows: list[dict[str, str]], progress: list[HeartbeatRecord]) -> _SmokeCheck:
    """Compare the losses of CSV and heartbeat. A resumed run has a step twice, a rotated heartbeat begins later."""
    recorded: dict[int, list[float]] = {}
    for beat in progress:
        recorded.setdefault(beat.step, []).append(math.nan if beat.loss is None else beat.loss)
    try:
        pairs = [(int(row["step"]), float(row["loss"])) for row in rows]
    except (KeyError, ValueError, TypeError) as problem:
        return _SmokeCheck("csv_agrees", False, f"a row of the CSV cannot be read: {problem!r}")
    first = min(recorded)
    other = [
        step for step, loss in pairs if step >= first and not any(_same(loss, by) for by in recorded.get(step, ()))
    ]
    return _SmokeCheck(
        "csv_agrees", not other, f"{len(other)} of {len(rows)} rows differ from the loss in the heartbeat"
    )


def _files(folder: Path, *, finished: bool) -> Iterator[_SmokeCheck]:
    required = [*_FOLDER, *(_FINISHED if finished else ())]
    absent = [name for name in required if not _holds_something(folder / name)]
    yield _SmokeCheck("files", not absent, f"files missing or empty: {', '.join(absent) or 'none'}")
    halted = (folder / names.HALT).exists()
    yield _SmokeCheck("halt_file", not halted, f"{names.HALT} {'exists' if halted else 'does not exist'}")


def _holds_something(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size > 0
    except OSError:  # a loop of links
        return False


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
