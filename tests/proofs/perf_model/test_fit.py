"""Terms of the model from an archive: those that made it are found again; what is no measurement is refused."""

import json
from dataclasses import asdict, replace
from functools import partial

import pytest
from typer.testing import CliRunner

from nsa.bench.case import SHAPES, BenchTask
from nsa.bench.implementations import DENSE
from nsa.check.gpu_check_report import GpuCheckReport, MeasuredTable
from nsa.errors import ConfigError
from proofs.perf_model import fit as fitting
from proofs.perf_model import measure_overlap, predict
from proofs.perf_model.__main__ import app
from proofs.perf_model.fit import dense_seconds, fit, measured_gpu
from proofs.perf_model.gpus import MeasuredTerms
from proofs.perf_model.prediction import HOST_TIME, by_launch_name

BASE = SHAPES["base"]
GPU, NAME, LENGTHS = "mi300x", "AMD Instinct MI300X", (512, 1024, 2048)
TERMS = MeasuredTerms(
    launch_s=7e-6,
    gap_s=1.25e-6,
    triton_share=1.7,
    dense_share={False: 1.1, True: 1.2},
    host_s={("base", False): 3e-4, ("base", True): 9e-4},
    tails_s={
        ("base", "range_forward"): (2e-6, 3e-9),
        ("base", "select"): (0.0, 8e-9),
        ("base", "merge_slots"): (1e-6, 0.0),
    },
)


@pytest.fixture(scope="module")
def overlaps():
    return {length: measure_overlap(BASE, length) for length in LENGTHS}


def predicted(overlaps, layer, length, share):
    terms = MeasuredTerms(0.0, 0.0, share, {}, {}, {})
    return predict(GPU, SHAPES[layer], length, "bf16", True, overlaps[length], instructions=nothing, measured=terms)


def nothing(*_):
    return None


def archive(overlaps) -> GpuCheckReport:
    """What a GPU would leave on which the model with TERMS is right."""
    report = GpuCheckReport(
        "nsa gpu-check --full", dict(cpu="", cores=1, isa=[], memory_gib=1, torch="", commit=None,
                                     uncommitted_changes=None, load_average=[0.0], time=""), full=True, complete=True,
    )  # fmt: skip
    report.add(MeasuredTable(dict(name=NAME, capability="gfx942", units=304, memory_gib=192, driver="", runtime="",
                                  triton="3.7.1"), kind="gpu"))  # fmt: skip
    launches = {}
    for length in LENGTHS:
        layer = predict(GPU, BASE, length, "bf16", True, overlaps[length], instructions=nothing,
                        measured=replace(TERMS, gap_s=0.0))  # fmt: skip
        kernels = {name: {"launches": 1, "seconds": took} for name, took in by_launch_name(layer).items()}
        launches[length] = sum(kernel.launches for kernel in layer.kernels), sum(k["seconds"] for k in kernels.values())
        report.add(MeasuredTable({"shape": "base", "length": length, "dtype": "bf16", "backward": True,
                                  "modelled": {}, "kernels": kernels}, kind="kernels"))  # fmt: skip
        for backward in (False, True):
            task = BenchTask("attention", BASE, length, "bf16", backward, device="cuda")
            times = {DENSE: TERMS.dense_share[backward] * dense_seconds(GPU, length, backward), "triton": 1e-3}
            entries = [{"name": name, "time_s": {"median": took}} for name, took in times.items()]
            report.add(MeasuredTable({"task": asdict(task), "entries": entries}))
    report.add(MeasuredTable({"call": "trivial launch", "tokens": 64, "launches": 1, "host_s": TERMS.launch_s,
                              "eager_s": 1e-5}, kind="host"))  # fmt: skip
    for call, backward in (("forward", False), ("forward + backward", True)):
        call = f"{call}, layer base"
        for tokens, slower in ((128, 1.0), (1024, 1.5)):
            host = {"call": call, "tokens": tokens, "host_s": slower * TERMS.host_s["base", backward], "eager_s": 1.0}
            report.add(MeasuredTable(host | {"launches": launches[1024][0]}, kind="host"))
        count, alone = launches[1024]
        report.add(
            MeasuredTable({"call": call, "tokens": 1024, "captured_s": alone + count * TERMS.gap_s}, kind="host")
        )
    return report


def test_the_terms_that_made_an_archive_are_found_again(overlaps, tmp_path):
    archive(overlaps).write(tmp_path / "out.zip")
    gpu, body = measured_gpu(tmp_path / "out.zip")
    assert gpu == GPU
    solved = fit(body, gpu, partial(predicted, overlaps))
    assert solved.launch_s == pytest.approx(TERMS.launch_s)
    assert solved.gap_s == pytest.approx(TERMS.gap_s, rel=1e-3)
    assert solved.triton_share == pytest.approx(TERMS.triton_share, rel=1e-3)
    assert solved.dense_share == pytest.approx(TERMS.dense_share)
    assert solved.host_s == pytest.approx(TERMS.host_s)
    for length in LENGTHS:
        for name in ("range_forward", "select", "merge_slots", "selected_forward"):
            want = TERMS.tail_s("base", name, length)
            assert solved.tail_s("base", name, length) == pytest.approx(want, rel=0.02, abs=2e-8), name


def test_host_time_bounds_a_layer_and_tails_and_gaps_add_up(overlaps):
    model = partial(predict, GPU, BASE, 2048, "bf16", True, overlaps[2048], instructions=nothing)
    plain, with_terms = model(measured=MeasuredTerms(0, 0, 1.7, {}, {}, {})), model(measured=TERMS)
    kernels = sum(kernel.seconds for kernel in with_terms.kernels)
    launches = sum(kernel.launches for kernel in with_terms.kernels)
    tails = sum(TERMS.tail_s("base", name, 2048) for _, name in TERMS.tails_s)
    assert kernels == pytest.approx(sum(k.seconds for k in plain.kernels) + tails + launches * TERMS.gap_s)
    assert with_terms.seconds == max(kernels, 9e-4)
    assert with_terms.dense_seconds == pytest.approx(1.2 * plain.dense_seconds)
    slow_host = replace(TERMS, host_s={("base", True): 1.0})
    assert model(measured=slow_host).seconds == 1.0


@pytest.mark.parametrize(
    ("change", "said"),
    [(dict(rehearsal=True), "rehearsal"), (dict(gpu={"name": "NVIDIA T4"}), "T4"), (dict(measured="none"), "--full")],
    ids=str,
)
def test_what_is_no_measurement_of_a_modelled_gpu_is_refused(overlaps, tmp_path, change, said):
    report = archive(overlaps)
    for name, value in change.items():
        setattr(report, name, {kind: [] for kind in report.measured} if value == "none" else value)
    if "gpu" in change:
        report.gpu = archive(overlaps).gpu | change["gpu"]
    report.write(tmp_path / "out.zip")
    with pytest.raises(ConfigError, match=said):
        measured_gpu(tmp_path / "out.zip")


def test_the_command_prints_both_models_beside_what_was_measured(overlaps, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(fitting, "overlap_of", lambda layer, length: overlaps[length])
    archive(overlaps).write(tmp_path / "out.zip")
    printed = CliRunner().invoke(app, ["fit", "out.zip"])
    assert printed.exit_code == 0, printed.output
    for text in ("from Python: 7 µs (assumed 5 µs)", "1.70 ×", "host time of layer base", HOST_TIME, "range_dkv"):
        assert text in printed.output, text
    words = ["--gpu", GPU, "--lengths", "512", "--bundle", "out.zip", "--json", "m.json"]
    printed = CliRunner().invoke(app, words)
    assert printed.exit_code == 0, printed.output
    assert "with measured host time" in printed.output
    assert HOST_TIME not in printed.output
    both = json.loads((tmp_path / "m.json").read_text())["predictions"][1]
    assert both["host_seconds"] == pytest.approx(9e-4)
    words[1] = "a100"
    assert isinstance(CliRunner().invoke(app, words).exception, ConfigError)
