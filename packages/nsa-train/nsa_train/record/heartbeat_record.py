"""Heartbeat record: the table of everything that a rank reports, one field each, with meaning, unit and names.

Each rank appends records to a file of its own. These files, training.csv, metrics.json, TensorBoard, W&B, MLflow,
Prometheus, Grafana, monitor, report and docs/reference/HEARTBEAT.md are derived from it. A new metric is one field
here, and the code that computes it.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from nsa_train import names
from nsa_train.record import value_checks
from nsa_train.record.record_files import RecordTail, parse_record, to_line

ALIVE_EVERY_S = 15.0
"""A run that makes progress writes a record at least this often, plus one step."""
GATE_BRANCHES = ("compressed", "selected", "sliding")
"""Order of the gate shares."""
_MIB = 2.0**20


class MetricFormat(StrEnum):
    """Format in which monitor and report print a value."""

    NUMBER = "number"
    SHARE = "share"
    COUNT = "count"
    DURATION = "duration"
    MEMORY = "memory"


class PrometheusGauge(NamedTuple):
    name: str
    labels: Mapping[str, str] = {}
    scale: float = 1.0
    """Factor from the unit of the record to that of the gauge."""
    help: str = ""
    """In place of the field's own description, where several fields share a gauge."""


@dataclass(frozen=True, kw_only=True)
class _RecordField:
    """One field of a heartbeat record, as `_field` described it, with its name and type."""

    about: str
    unit: str = ""
    gauge: PrometheusGauge | None = None
    no_gauge: str = ""
    """Where Prometheus has the value otherwise, or why it does not; for fields without a gauge."""
    title: str = ""
    """Heading of its chart and label of its value in monitor and report; a metric without one is not drawn."""
    format: MetricFormat = MetricFormat.NUMBER
    every_rank: bool = False
    """Reports keep the values of every rank, not of the lowest one alone."""
    over_layers: Literal["mean", "max", "sum"] = "mean"
    """What becomes of the values of several layers, for figures of `nsa.core.probe`."""
    columns: tuple[str, ...] = ()
    """Names of the items of a list where only numbers are recorded (CSV, TensorBoard, W&B, MLflow)."""
    name: str = ""
    type: Any = None

    @property
    def is_metric(self) -> bool:
        """Whether it is a number that is measured, not one that says which record it is."""
        return self.type in (float | None, int | None)


def _field(about: str, *, gauge: str | PrometheusGauge | None = None, required: bool = False, **definition: Any) -> Any:
    """Define a field; `definition` are fields of `_RecordField`."""
    described = _RecordField(
        about=about, gauge=PrometheusGauge(gauge) if isinstance(gauge, str) else gauge, **definition
    )
    assert (gauge is None) == bool(described.no_gauge), "a field has a Prometheus gauge or the reason why it has none"
    return field(default=MISSING if required else None, metadata={"definition": described})


def _memory(kind: str) -> PrometheusGauge:
    return PrometheusGauge("nsa_memory_bytes", {"kind": kind}, _MIB, "Memory of a rank, by kind.")


@dataclass(frozen=True, kw_only=True)
class HeartbeatRecord:
    """One record of a rank: `ts` to `msg` are in every record, the others in progress records."""

    # fmt: off
    ts: float = _field(
        "Time of the record.", unit="seconds since 1970", no_gauge="nsa_heartbeat_timestamp_seconds", required=True,
    )
    iso: str = _field("`ts` as text, UTC.", no_gauge="ts is exported", required=True)
    pid: int = _field("Process id of the rank on its host.", no_gauge="nsa_process_up", required=True)
    rank: int = _field("Rank that wrote the record.", no_gauge="a label of every metric of a rank", required=True)
    step: int = _field("Optimizer steps done.", no_gauge="nsa_step", required=True)
    msg: str = _field(
        "Kind of the record: start, progress, alive, skipped_step, rollback, halt, stop, done or error.",
        no_gauge="nsa_run_state", required=True,
    )
    loss: float | None = _field(
        "Training loss of the last step, mean over ranks.", unit="nats per token", title="loss",
        gauge=PrometheusGauge("nsa_loss_nats", help="Training loss per token of the last step that was not skipped."),
    )
    toks_per_s: float | None = _field(
        "Speed since the last progress record.", unit="tokens per second, all ranks together", title="throughput",
        format=MetricFormat.COUNT, gauge="nsa_tokens_per_second",
    )
    mfu: float | None = _field(
        "Model FLOPs utilization since the last progress record: FLOPs of the model, without recomputation, over the "
        "peak of all devices; only for known GPUs or with runtime.peak_tflops.", unit="share", title="MFU",
        format=MetricFormat.SHARE, gauge="nsa_mfu_ratio",
    )
    tokens_per_usd: float | None = _field(
        "Tokens that a dollar buys at the speed since the last progress record; only with runtime.usd_per_hour.",
        unit="tokens per USD", title="tokens per dollar", format=MetricFormat.COUNT, gauge="nsa_tokens_per_usd",
    )
    step_s: float | None = _field(
        "Duration of an optimizer step, mean since the last progress record.", unit="seconds",
        format=MetricFormat.DURATION, gauge="nsa_step_seconds",
    )
    forward_s: float | None = _field(
        "Duration of this rank's own forward passes of the last step, without waiting for other ranks (ddp).",
        unit="seconds", title="forward pass", format=MetricFormat.DURATION, every_rank=True,
        gauge="nsa_forward_seconds",
    )
    dt_fetch_s: float | None = _field(
        "Wait for the batch of the last step.", unit="seconds", title="wait for data", format=MetricFormat.DURATION,
        every_rank=True, gauge="nsa_data_wait_seconds",
    )
    grad_norm: float | None = _field(
        "Gradient norm of the last step, before clipping.", title="gradient norm",
        gauge=PrometheusGauge("nsa_grad_norm", help="Gradient norm of the last step that was not skipped."),
    )
    lr: float | None = _field("Learning rate of the last step.", title="learning rate", gauge="nsa_learning_rate")
    tokens_seen: int | None = _field(
        "Training tokens since step 0.", unit="tokens, all ranks together", format=MetricFormat.COUNT,
        gauge="nsa_tokens_seen",
    )
    skipped_steps: int | None = _field(
        "Steps since step 0 whose optimizer did not run, because of a non-finite or spiking loss or gradient.",
        unit="steps", format=MetricFormat.COUNT,
        no_gauge="nsa_skipped_steps_total counts skip records: a resumed run restores this count from its checkpoint",
    )
    nonfinite_steps: int | None = _field(
        "Skipped steps since step 0 with a loss or gradient norm that is not finite.", unit="steps",
        format=MetricFormat.COUNT, no_gauge="nsa_nonfinite_steps_total counts skip records",
    )
    host_mem_rss: float | None = _field(
        "Resident memory of the process.", unit="MiB", title="host memory", format=MetricFormat.MEMORY, every_rank=True,
        gauge=_memory("host_rss"),
    )
    gpu_mem_alloc: float | None = _field(
        "GPU memory in tensors.", unit="MiB", title="GPU memory in tensors", format=MetricFormat.MEMORY,
        gauge=_memory("gpu_allocated"),
    )
    gpu_mem_reserved: float | None = _field(
        "GPU memory held by PyTorch's allocator.", unit="MiB", title="GPU memory reserved", format=MetricFormat.MEMORY,
        every_rank=True, gauge=_memory("gpu_reserved"),
    )
    gate_entropy_mean: float | None = _field(
        "Entropy of the gates, mean over layers, tokens and heads.", unit="nats; ln 3 = 1.0986 is uniform",
        title="gate entropy", gauge="nsa_gate_entropy_nats",
    )
    gate_max_mean: float | None = _field(
        "Largest gate of a token and head, mean.", unit="share", title="largest gate", format=MetricFormat.SHARE,
        gauge="nsa_gate_max_ratio",
    )
    gate_collapse_frac: float | None = _field(
        "Gates (one per layer and head or group) whose mean entropy is below 0.2 nats.", unit="share of the gates",
        title="collapsed gates", format=MetricFormat.SHARE, gauge="nsa_gate_collapse_ratio",
    )
    gate_branch_shares: tuple[float, ...] | None = _field(
        "Mean weight of each branch.", unit=f"shares, in the order {', '.join(GATE_BRANCHES)}",
        columns=tuple(f"gate_share_{place}" for place in range(len(GATE_BRANCHES))),
        no_gauge="nsa_gate_share_mean_ratio",
    )
    gate_shares_by_layer: tuple[tuple[float, ...], ...] | None = _field(
        "Mean weight of each branch in each layer.",
        unit=f"shares, in the order {', '.join(GATE_BRANCHES)}, one triple per layer", no_gauge="nsa_gate_share_ratio",
    )
    sel_k_mean: float | None = _field(
        "Keys that a query reads in the selected branch, mean.", unit="tokens per query", title="selected keys, mean",
        gauge="nsa_selection_keys_mean",
    )
    sel_k_max: int | None = _field(
        "Keys that a query reads in the selected branch, largest.", unit="tokens per query",
        title="selected keys, largest", over_layers="max", gauge="nsa_selection_keys_max",
    )
    sel_pct_at_max: float | None = _field(
        "Queries that read the largest possible number of selected keys. Depends on positions only (the last of a "
        "block), not on health.",
        unit="share of the queries", title="queries at maximum keys", format=MetricFormat.SHARE,
        gauge="nsa_selection_at_max_ratio",
    )
    selector_loss: float | None = _field(
        "Auxiliary loss of the block selection, mean over layers, before its weight; only if nsa.selector_loss is set.",
        unit="nats per sampled query", title="selector loss", gauge="nsa_selector_loss_nats",
    )
    reads_pred: int | None = _field(
        "Key reads that the block sizes predict, in the last forward pass of this rank.", unit="keys, all layers",
        format=MetricFormat.COUNT, over_layers="sum", gauge="nsa_reads_predicted",
    )
    reads_act_total: int | None = _field(
        "Key reads that were counted in the last forward pass of this rank; they equal reads_pred.",
        unit="keys, all layers", format=MetricFormat.COUNT, over_layers="sum", gauge="nsa_reads_counted",
    )
    kernel_compressed: str | None = _field("Backend of the compressed branch.", no_gauge="nsa_kernel_info")
    kernel_select: str | None = _field("Backend of the block selection.", no_gauge="nsa_kernel_info")
    kernel_selected: str | None = _field("Backend of the selected branch.", no_gauge="nsa_kernel_info")
    kernel_sliding: str | None = _field("Backend of the sliding branch.", no_gauge="nsa_kernel_info")
    kernels_reason: str | None = _field(
        'Why these backends: "first choice", "requested by name", "verified on this GPU", or why others were not '
        "taken.",
        no_gauge="text; in env.json",
    )
    data: str | None = _field("Where the data comes from.", no_gauge="may be a URL with a password")
    synthetic: bool | None = _field("Whether the run trains on synthetic data.", no_gauge="nsa_data_substituted")
    allowed: tuple[str, ...] | None = _field(
        "Preflight rules that were overridden with --allow.", no_gauge="names, not a number; in env.json",
    )
    detail: str | None = _field(
        "Text of an error, a stop or a skipped step.", no_gauge="text, which may hold a secret; see nsa_findings",
    )
    failure_code: str | None = _field(
        "In the record of a failure, one of `failure_codes.FailureCode`; runs of older versions have none.",
        no_gauge="see nsa_findings",
    )
    # fmt: on

    @classmethod
    def now(cls, *, ts: float, rank: int, step: int, msg: str, **more: Any) -> Self:
        iso = datetime.fromtimestamp(ts, UTC).isoformat(timespec="milliseconds")
        return cls(ts=ts, iso=iso, pid=os.getpid(), rank=rank, step=step, msg=msg, **more)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that are not None."""
        values = {name: getattr(self, name) for name in RECORD_FIELDS}
        return {name: value for name, value in values.items() if value is not None}

    def to_line(self) -> str:
        return to_line(self.as_dict())

    def metrics(self) -> dict[str, float]:
        """Return the numbers of the record by column name."""
        numbers: dict[str, float] = {}
        for name, value in self.as_dict().items():
            definition = RECORD_FIELDS[name]
            if definition.is_metric:
                numbers[name] = value
            elif definition.columns:
                numbers |= zip(definition.columns, value, strict=False)
        return numbers


RECORD_FIELDS: Mapping[str, _RecordField] = {
    each.name: replace(each.metadata["definition"], name=each.name, type=each.type) for each in fields(HeartbeatRecord)
}
METRICS: Mapping[str, _RecordField] = {name: each for name, each in RECORD_FIELDS.items() if each.is_metric}
METRIC_COLUMNS = (*METRICS, *(column for each in RECORD_FIELDS.values() for column in each.columns))
REQUIRED_FIELDS = tuple(each.name for each in fields(HeartbeatRecord) if each.default is MISSING and each.name != "iso")
"""Readers need them; `iso` is for people."""


_CHECK_OF_TYPE: Mapping[Any, value_checks.Check] = {
    float: value_checks.number,
    int: value_checks.whole,
    str: value_checks.text,
    bool: value_checks.flag,
    tuple[str, ...]: value_checks.texts,
    tuple[float, ...]: value_checks.numbers,
    tuple[tuple[float, ...], ...]: value_checks.rows_of_numbers,
}
_AMOUNTS = (MetricFormat.COUNT, MetricFormat.DURATION, MetricFormat.MEMORY)


def _check(field: _RecordField) -> value_checks.Check:
    if field.type == float | None and field.format in _AMOUNTS:
        return value_checks.amount
    return next(check for kind, check in _CHECK_OF_TYPE.items() if field.type in (kind, kind | None))


CHECKS: Mapping[str, value_checks.Check] = {
    **{name: _check(field) for name, field in RECORD_FIELDS.items()},
    "ts": value_checks.time_stamp,
    "pid": value_checks.process_id,
    "rank": value_checks.rank_number,
}


def beat_fields(rank: int | None = None) -> Callable[[str], value_checks.Parsed[dict[str, Any]]]:
    """Return a parser of lines into fields; with `rank`, lines of other ranks are unreadable."""

    def parse(line: str) -> value_checks.Parsed[dict[str, Any]]:
        record, torn = parse_record(line)
        if record is None:
            return None, torn
        values, damaged = value_checks.fields(record, CHECKS, REQUIRED_FIELDS)
        if values is None or (rank is not None and values["rank"] != rank):
            return None, True
        return values, damaged

    return parse


def beat_of_fields(values: Mapping[str, Any]) -> HeartbeatRecord:
    """Build a record from the fields that were read; older versions wrote no `iso`."""
    return HeartbeatRecord(**{"iso": "", **values})


def read_beats(path: Path) -> Iterator[HeartbeatRecord]:
    """Every readable record of a heartbeat file, oldest first."""
    return map(beat_of_fields, RecordTail(path, beat_fields()).whole_file())


def last_beat(path: Path, msg: str | None = None) -> HeartbeatRecord | None:
    """The newest record, or the newest with this `msg`."""
    newest = None
    for beat in read_beats(path):
        if msg in (None, beat.msg):
            newest = beat
    return newest


def heartbeat_files(folder: Path) -> list[tuple[int, Path]]:
    """Heartbeat files as (rank, path), lowest rank first."""
    ranked = ((names.rank_of_heartbeat(path.name), path) for path in folder.glob(names.HEARTBEATS))
    return sorted((rank, path) for rank, path in ranked if rank is not None)
