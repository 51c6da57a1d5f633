"""Performance model report: predictions as tables, JSON, Markdown and SVG, each labelled as modelled."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nsa.bench.case import DTYPES, shape_named
from nsa.bench.report import Line, draw_lines, seconds, to_markdown_table
from nsa.errors import ConfigError
from nsa.token_counts import parse_lengths, spell
from proofs.perf_model.gpus import HOST_US, L2_SHARE, MEMORY_SHARE, GpuModel, MeasuredTerms, gpu_named
from proofs.perf_model.prediction import HOST_TIME, MODELLED, KernelPrediction, LayerPrediction, predict
from proofs.perf_model.selection_overlap import measure_overlap
from proofs.perf_model.training_step import StepPrediction

SCHEMA = 1
TOTAL_COLUMNS = (
    "modelled", "forward", "dense", "ratio", "with host", "fwd+bwd", "dense both", "ratio both", "both with host",
    "selected", "paper's loop", "ratio loop",
)  # fmt: skip
KERNEL_COLUMNS = (
    "modelled kernel", "pass", "time", "share", "bound", "next bound", "tail", "TFLOP", "HBM GB", "L2 GB", "launches"
)  # fmt: skip
NARROW: dict[tuple[str, ...], int] = {TOTAL_COLUMNS: 9, KERNEL_COLUMNS: 6}
"""Columns that a terminal of 80 has room for."""


@dataclass(frozen=True)
class PredictionPair:
    """One length: forward alone, and forward with backward."""

    forward: LayerPrediction
    both: LayerPrediction
    host_s: tuple[float, float] = (0.0, 0.0)
    """Host time of each."""


@dataclass
class ModelReport:
    command: str
    machine: dict[str, Any]
    gpu: GpuModel
    host_time: str = HOST_TIME
    pairs: list[PredictionPair] = field(default_factory=list)

    def to_json(self) -> str:
        predictions = [p.to_json() for pair in self.pairs for p in (pair.forward, pair.both)]
        body = {"schema": SCHEMA, "label": MODELLED, "command": self.command, "assumptions": assumptions(self.gpu),
                "commit": self.machine["commit"], "predictions": predictions}  # fmt: skip
        return json.dumps(body, indent=1, ensure_ascii=False)

    def to_markdown(self) -> str:
        lines = [f"`{self.command}`, commit {(self.machine['commit'] or 'unknown')[:10]}", "", headline(self), ""]
        lines += to_markdown_table(TOTAL_COLUMNS, [total_row(pair) for pair in self.pairs])
        for pair in self.pairs[-1:]:
            lines += ["", f"Kernels at {spell(pair.both.length)}, {pair.both.dtype}, {MODELLED}:", ""]
            lines += to_markdown_table(KERNEL_COLUMNS, kernel_rows(pair.both))
        lines += ["", *(f"- {line}" for line in assumptions(self.gpu))]
        return "\n".join(lines) + "\n"

    def to_svg(self) -> str:
        drawn: dict[str, Line] = {}
        even: dict[str, dict[int, float]] = {}
        for pair in self.pairs:
            for name, p in (("forward", pair.forward), ("fwd+bwd", pair.both)):
                drawn.setdefault(f"{name}, {p.dtype}, {p.data}", {})[p.length] = (p.ratio, p.ratio, p.ratio)
            even.setdefault("as fast as dense", {})[pair.both.length] = 1.0
        name = self.gpu.published.name
        caption = f"{MODELLED}, {self.host_time}, not measured: times faster than {name} on {self.gpu.name}"
        return draw_lines(drawn, even, caption)


def model(
    gpu: str,
    lengths: str,
    dtypes: str,
    shape: str,
    data: str,
    as_triton: bool,
    launch_us: float,
    log: Callable[[str], None],
    measured: MeasuredTerms | None = None,
    host_us: tuple[float, float] = HOST_US,
) -> Iterator[PredictionPair]:
    """A pair of predictions per dtype and length, from an overlap measured once per length."""
    gpu_named(gpu)
    requested = [word.strip() for word in dtypes.split(",")]
    for dtype in requested:
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype has {dtype!r}: there is no such dtype. Use one of: {', '.join(DTYPES)}.")
    sizes, parsed = shape_named(shape), parse_lengths(lengths)
    overlap = {}
    for length in parsed:
        log(f"measuring which blocks neighbouring queries select at {spell(length)}")
        overlap[length] = measure_overlap(sizes, length, data)
    for dtype in requested:
        for length in parsed:
            log(f"modelling {dtype}, {spell(length)}")
            forward, both = (
                predict(
                    gpu,
                    sizes,
                    length,
                    dtype,
                    backward,
                    overlap[length],
                    as_triton=as_triton,
                    launch_s=launch_us * 1e-6,
                    measured=measured,
                )
                for backward in (False, True)
            )
            host_s = (0.0, 0.0) if measured is not None else (host_us[0] * 1e-6, host_us[1] * 1e-6)
            yield PredictionPair(forward, both, host_s)


def total_row(pair: PredictionPair) -> tuple[str, ...]:
    f, b = pair.forward, pair.both
    return (
        f"{spell(f.length)} {f.dtype}",
        seconds(f.seconds), seconds(f.dense_seconds), f"{f.ratio:.2f}", f"{f.ratio_with_host(pair.host_s[0]):.2f}",
        seconds(b.seconds), seconds(b.dense_seconds), f"{b.ratio:.2f}", f"{b.ratio_with_host(pair.host_s[1]):.2f}",
        seconds(f.selected_seconds), seconds(f.group_centric.seconds), f"{f.selected_ratio:.2f}",
    )  # fmt: skip


def step_lines(step: StepPrediction) -> list[str]:
    """A training step by part."""
    head = f"a training step with gradient_checkpointing={step.checkpointing}, {MODELLED}: "
    head += f"{seconds(step.seconds)} for {step.tokens:,} tokens, {step.tokens_per_s:,.0f} tokens/s"
    return [head, *(f"  {part.name}: {seconds(part.seconds)} ({part.assumption})" for part in step.parts)]


def kernel_rows(prediction: LayerPrediction) -> list[tuple[str, ...]]:
    """One row per kernel, slowest first."""
    ordered = sorted(prediction.kernels, key=lambda kernel: -kernel.seconds)
    return [_kernel_row(kernel, prediction.seconds) for kernel in ordered]


def _kernel_row(kernel: KernelPrediction, total: float) -> tuple[str, ...]:
    rest = sorted(((s, name) for name, s in kernel.bounds_s.items() if name != kernel.bound), reverse=True)
    return (
        kernel.name, "bwd" if kernel.backward else "fwd", seconds(kernel.seconds),
        f"{100 * kernel.seconds / total:.1f} %", kernel.bound, f"{rest[0][1]} {seconds(rest[0][0])}",
        f"{kernel.tail:.2f}",
        f"{kernel.flops / 1e12:.2f}" if kernel.flops else "", f"{kernel.hbm_bytes / 1e9:.2f}",
        f"{kernel.l2_bytes / 1e9:.2f}", str(kernel.launches),
    )  # fmt: skip


def headline(report: ModelReport) -> str:
    gpu = report.gpu
    return (
        f"{MODELLED.capitalize()}, {report.host_time}, not measured: {gpu.name}, {gpu.device.bf16_tflops:g} TFLOP/s "
        f"bf16, {gpu.device.bandwidth_gb_s:g} GB/s, {gpu.clock.units} units at {gpu.clock.clock_hz / 1e9:.2f} GHz"
    )


def assumptions(gpu: GpuModel) -> list[str]:
    p = gpu.published
    return [
        f"dense is {p.name}: {100 * p.forward:.0f} % of peak forward, {100 * p.backward:.0f} % backward, taken to be "
        f"at rows of 128 ({p.source}); other widths and our kernels follow the same rule",
        f"L2: {gpu.l2_bytes_per_s / 1e12:.1f} TB/s ({gpu.l2_source}) times {L2_SHARE}; memory times {MEMORY_SHARE}",
        f"--as-triton makes our arithmetic {p.triton_slowdown:.2f} times slower ({p.triton_source})",
        "a kernel takes its slowest bound; its programs start in order, one at a time on each unit, and 'tail' is what "
        "arithmetic and instructions take longer than if units shared them evenly; stalls are not modelled",
        "with host: a layer takes at least the time of Python between its launches (--host-us), one row",
    ]
