"""Terms of the model measured on a GPU, from an archive of the GPU check: `python -m proofs.perf_model fit BUNDLE`.

Time of a kernel = share × its arithmetic, or its other bound, + a tail of its own: a part for every call and a part for
every token, because the longest program of a grid grows with the row. The share is one for all kernels. It and the
tails solve the measured times of all kernels, layers and lengths by least squares, relative to each time; a tail is
never negative. The bound of a kernel may change with the share, so that this is done again until none does.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nsa.bench.case import SHAPES
from nsa.bench.implementations import DENSE
from nsa.bench.predictions import gpu_of_model
from nsa.bench.report import seconds
from nsa.check.cases import BACKEND
from nsa.check.gpu_check_report import read_report
from nsa.errors import ConfigError
from nsa.token_counts import spell
from proofs.perf_model.dense import dense_s
from proofs.perf_model.gpus import LAUNCH_S, MeasuredTerms, gpu_named
from proofs.perf_model.prediction import LayerPrediction, launch_name, predict
from proofs.perf_model.selection_overlap import SelectionOverlap, measure_overlap
from proofs.perf_model.work import LaunchSizes

ARITHMETIC = ("tensor cores", "exponentials")
_MOST_ROUNDS = 10
CALLS = {False: "forward", True: "forward + backward"}

Predict = Callable[[str, int, float], LayerPrediction]
"""Layer, length and share → both passes in bf16, without launches."""


class _KernelTime(NamedTuple):
    layer: str
    kernel: str
    length: int
    measured_s: float


def measured_gpu(archive: Path) -> tuple[str, dict[str, Any]]:
    """Name in the model, and the report; refused without timings of a GPU that is modelled."""
    body = read_report(archive)
    if body["rehearsal"] or not body["gpu"]:
        raise ConfigError(f"{archive} holds no timings of a GPU: it is a rehearsal, or the GPU was not described.")
    gpu = gpu_of_model(body["gpu"]["name"])
    if not gpu:
        raise ConfigError(f"{archive} is of {body['gpu']['name']}, of which there is no model: add it to gpus.py.")
    if not body["kernels"] or not body["host"]:
        raise ConfigError(
            f"{archive} has no times of kernels or of the host: the check ended before them, or ran without --full."
        )
    return gpu, body


@cache
def overlap_of(layer: str, length: int) -> SelectionOverlap:
    return measure_overlap(SHAPES[layer], length)


def predictor(gpu: str) -> Predict:
    def predicted(layer: str, length: int, share: float) -> LayerPrediction:
        terms = MeasuredTerms(0.0, 0.0, share, {}, {}, {})
        return predict(gpu, SHAPES[layer], length, "bf16", True, overlap_of(layer, length), measured=terms)

    return predicted


def fit(body: dict[str, Any], gpu: str, predicted: Predict) -> MeasuredTerms:
    times = [
        _KernelTime(entry["shape"], kernel, entry["length"], figure["seconds"])
        for entry in body["kernels"]
        for kernel, figure in entry["kernels"].items()
    ]
    share, tails = _share_and_tails(times, predicted)
    calls = {(entry["call"], entry["tokens"], kind): entry[kind]
             for entry in body["host"] for kind in ("host_s", "captured_s", "launches") if kind in entry}  # fmt: skip
    shortest = min(tokens for call, tokens, _ in calls if "layer" in call)
    layers = {entry["shape"] for entry in body["kernels"]}
    host_s = {
        (layer, backward): calls[f"{call}, layer {layer}", shortest, "host_s"]
        for layer in layers
        for backward, call in CALLS.items()
    }
    launch_s = next(took for (call, _, kind), took in calls.items() if (call, kind) == ("trivial launch", "host_s"))
    return MeasuredTerms(launch_s, _gap_s(times, calls), share, _dense_share(body, gpu), host_s, tails)


def _share_and_tails(
    times: list[_KernelTime], predicted: Predict
) -> tuple[float, dict[tuple[str, str], tuple[float, float]]]:
    names = list(dict.fromkeys((time.layer, time.kernel) for time in times))
    share, before = 1.0, None
    for _ in range(_MOST_ROUNDS):
        bounds = {(t.layer, t.length): _bounds(predicted(t.layer, t.length, share), share) for t in times}
        parts = [bounds[t.layer, t.length].get(t.kernel, (0.0, 0.0)) for t in times]
        columns = np.zeros((len(times), 1 + 2 * len(names)))
        for row, (t, (arithmetic, _)) in enumerate(zip(times, parts, strict=True)):
            at = 1 + 2 * names.index((t.layer, t.kernel))
            columns[row, 0], columns[row, at], columns[row, at + 1] = arithmetic, 1e-6, 1e-9 * t.length
        rest = np.array([t.measured_s - other for t, (_, other) in zip(times, parts, strict=True)])
        weights = 1 / np.array([t.measured_s for t in times])
        solved = _solve(columns * weights[:, None], rest * weights)
        share = float(solved[0]) or 1.0  # no kernel is bound by arithmetic
        if before is not None and abs(share - before) < 1e-6 * share:
            break
        before = share
    tails = {name: (1e-6 * float(solved[1 + 2 * i]), 1e-9 * float(solved[2 + 2 * i])) for i, name in enumerate(names)}
    return share, tails


def _solve(columns: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Least squares without negative values: the most negative one becomes 0 until there is none."""
    used, solution = np.flatnonzero(columns.any(0)), np.zeros(columns.shape[1])
    while used.size:
        values = np.linalg.lstsq(columns[:, used], right, rcond=None)[0]
        if values.min() >= 0:
            solution[used] = values
            break
        used = np.delete(used, values.argmin())
    return solution


def _bounds(prediction: LayerPrediction, share: float) -> dict[str, tuple[float, float]]:
    """By launch name: time of kernels bound by arithmetic at a share of 1, and of all others."""
    bounds: dict[str, tuple[float, float]] = {}
    for kernel in prediction.kernels:
        arithmetic, other = bounds.get(name := launch_name(kernel.name), (0.0, 0.0))
        if kernel.bound in ARITHMETIC:
            bounds[name] = arithmetic + kernel.bounds_s[kernel.bound] / share, other
        else:
            bounds[name] = arithmetic, other + kernel.bounds_s[kernel.bound]
    return bounds


def _gap_s(times: list[_KernelTime], calls: dict[tuple[str, int, str], float]) -> float:
    """What a captured layer takes beyond its kernels, for each of its launches; 0 without a captured one."""
    gaps = []
    for layer, length in dict.fromkeys((time.layer, time.length) for time in times):
        call = f"{CALLS[True]}, layer {layer}", length
        if (*call, "captured_s") in calls:
            alone = sum(t.measured_s for t in times if (t.layer, t.length) == (layer, length))
            gaps.append((calls[*call, "captured_s"] - alone) / calls[*call, "launches"])
    return max(0.0, min(gaps, default=0.0))


def _dense_share(body: dict[str, Any], gpu: str) -> dict[bool, float]:
    """At the longest length: the model's dense attention is published, and best, there."""
    shares: dict[bool, tuple[int, float]] = {}
    for length, backward, entries in _figures(body):
        if DENSE in entries and length >= shares.get(backward, (0, 0.0))[0]:
            shares[backward] = length, entries[DENSE] / dense_seconds(gpu, length, backward)
    return {backward: share for backward, (_, share) in shares.items()}


def dense_seconds(gpu: str, length: int, backward: bool) -> float:
    sizes = LaunchSizes(SHAPES["base"], length, "bf16")
    return sum(dense_s(gpu_named(gpu), sizes, part) for part in (False, True)[: 1 + backward])


def _figures(body: dict[str, Any]) -> Iterator[tuple[int, bool, dict[str, float]]]:
    """Length, whether backward is in it, and the median of each implementation: whole layers of the base shape."""
    base = SHAPES["base"]
    for figure in body["figures"]:
        task = figure["task"]
        heads = task["shape"]["n_heads"], task["shape"]["d_k"]
        if (task["op"], task["part"], task["dtype"], heads) == ("attention", "all", "bf16", (base.n_heads, base.d_k)):
            timed = {entry["name"]: entry["time_s"]["median"] for entry in figure["entries"] if entry["time_s"]}
            yield task["length"], task["backward"], timed


def summary(terms: MeasuredTerms, gpu: str) -> list[str]:
    machine = gpu_named(gpu)
    lines = [
        f"launch from Python: {seconds(terms.launch_s)} (assumed {seconds(LAUNCH_S)})",
        f"between two kernels of a graph: {seconds(terms.gap_s)}",
        f"Triton's share: {terms.triton_share:.2f} × the bound of arithmetic (elsewhere "
        f"{machine.published.triton_slowdown:.2f})",
    ]
    for backward, share in sorted(terms.dense_share.items()):
        lines.append(f"dense, {CALLS[backward]}: {share:.2f} × modelled")
    for (layer, backward), took in sorted(terms.host_s.items()):
        lines.append(f"host time of layer {layer}, {CALLS[backward]}: {seconds(took)}")
    return lines


KERNEL_COLUMNS = ("layer", "kernel", "length", "measured", "modelled", "with measured terms")
LENGTH_COLUMNS = ("length", "pass", "× dense measured", "modelled, host time not included", "with measured terms")


def kernel_rows(body: dict[str, Any], gpu: str, terms: MeasuredTerms) -> Iterator[tuple[str, ...]]:
    plain = predictor(gpu)
    for entry in body["kernels"]:
        layer, length = entry["shape"], entry["length"]
        sums: list[dict[str, float]] = []
        fitted = predict(
            gpu, SHAPES[layer], length, "bf16", True, overlap_of(layer, length), measured=replace(terms, gap_s=0.0)
        )
        for prediction in (plain(layer, length, 1.0), fitted):
            sums.append({})
            for kernel in prediction.kernels:
                name = launch_name(kernel.name)
                sums[-1][name] = sums[-1].get(name, 0.0) + kernel.seconds
        for kernel, figure in entry["kernels"].items():
            yield (
                layer,
                kernel,
                spell(length),
                seconds(figure["seconds"]),
                *(seconds(each[kernel]) if kernel in each else "–" for each in sums),
            )


def length_rows(body: dict[str, Any], gpu: str, terms: MeasuredTerms) -> Iterator[tuple[str, ...]]:
    for length, backward, timed in _figures(body):
        measured = f"{timed[DENSE] / timed[BACKEND]:.2f}" if {DENSE, BACKEND} <= timed.keys() else "–"
        ratios = [
            predict(gpu, SHAPES["base"], length, "bf16", backward, overlap_of("base", length), measured=each).ratio
            for each in (None, terms)
        ]
        yield spell(length), CALLS[backward], measured, *(f"{ratio:.2f}" for ratio in ratios)
