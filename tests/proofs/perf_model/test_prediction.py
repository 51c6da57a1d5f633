"""Predicted times from counts: bounds, scaling, dense attention, the group-centric kernel, measurements, labels."""

import json
import os
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nsa.bench.case import SHAPES
from nsa.errors import ConfigError
from nsa.gpus import GPUS as SPECS
from proofs.perf_model import SelectionOverlap, measure_overlap, predict, selected_kernels, selection_overlap, torch_ops
from proofs.perf_model.dense import dense_s, stretch
from proofs.perf_model.gpus import GPUS, SCHEDULERS, gpu_named
from proofs.perf_model.group_centric import group_centric_forward
from proofs.perf_model.instruction_counts import HMMA_FLOPS, count, count_instructions, parse
from proofs.perf_model.prediction import tail_of, time_of
from proofs.perf_model.work import KernelWork, LaunchSizes
from tests import fork_server

ROOT = Path(__file__).parents[3]
BASE, TINY = SHAPES["base"], SHAPES["tiny"]
A100 = GPUS["a100"]


@pytest.fixture(scope="module")
def base_overlap() -> dict[int, SelectionOverlap]:
    return {length: measure_overlap(BASE, length, "smooth") for length in (2048, 4096)}


def predicted(gpu, overlap: SelectionOverlap, **how):
    return predict(gpu, overlap.shape, overlap.length, overlap=overlap, instructions=lambda *_: None, **how)


def test_a_kernel_takes_its_slowest_bound():
    work = KernelWork("w", False, 1, flops=1e12, exponentials=1e9, l2_bytes=1e9, hbm_bytes=1e9)
    kernel = time_of(A100, "bf16", work, None)
    assert kernel.bound == "tensor cores"
    assert kernel.seconds == max(kernel.bounds_s.values()) == pytest.approx(stretch(A100, False) * (
        1e12 / 312e12 + 1e9 / (16 * 108 * 1.41e9)))  # fmt: skip
    assert time_of(A100, "bf16", replace(work, flops=1e9), None).bound == "memory"
    assert time_of(A100, "bf16", replace(work, flops=1e9, exponentials=1e12), None).bound == "exponentials"
    assert time_of(A100, "bf16", replace(work, flops=1e9, l2_bytes=1e11), None).bound == "L2"
    assert time_of(A100, "bf16", replace(work, flops=1e9, launches=10_000), None).bound == "launch"
    assert time_of(A100, "bf16", replace(work, flops=1e9, scanned=1e7), None).bound == "scan"
    assert time_of(A100, "bf16", replace(work, flops=1e9, sorted_keys=1e9), None).bound == "sort"


def test_a_grid_takes_as_long_as_its_last_program():
    """Programs start in order where a unit is free: long ones at the end leave the others waiting."""
    assert tail_of([3, 2, 1], 3) == 3 / 2
    assert tail_of([1, 1, 2, 2], 2) == 1
    assert tail_of([2, 1, 1, 4], 2) == 6 / 4 > tail_of([4, 2, 1, 1], 2) == 1
    assert tail_of([], 2) == tail_of([0, 0], 2) == 1
    work = KernelWork("w", False, 1, flops=1e12, exponentials=1e9, hbm_bytes=1e9)
    alike, one = (time_of(A100, "bf16", replace(work, programs=p), None) for p in (torch.ones(2 * 108), torch.ones(1)))
    assert alike.seconds == time_of(A100, "bf16", work, None).seconds
    assert one.seconds == pytest.approx(108 * alike.seconds)
    assert one.bounds_s["memory"] == alike.bounds_s["memory"]


def test_a_cache_too_small_for_what_is_shared_costs_memory():
    work = KernelWork("w", False, 1, l2_bytes=10e9, hbm_bytes=1e9, shared_bytes=A100.clock.l2_bytes)
    assert time_of(A100, "bf16", work, None).hbm_bytes == 1e9
    half_missed = time_of(A100, "bf16", replace(work, shared_bytes=2 * A100.clock.l2_bytes), None)
    assert half_missed.hbm_bytes == pytest.approx(1e9 + 0.5 * 9e9)


def test_twice_the_bandwidth_halves_what_memory_bounds(base_overlap):
    fast = replace(A100, device=replace(A100.device, bandwidth_gb_s=2 * A100.device.bandwidth_gb_s))
    slow = {k.name: k for k in predicted(A100, base_overlap[4096], launch_s=0.0).kernels}
    for kernel in predicted(fast, base_overlap[4096], launch_s=0.0).kernels:
        before = slow[kernel.name]
        assert kernel.bounds_s["memory"] == pytest.approx(before.bounds_s["memory"] / 2)
        assert kernel.seconds <= before.seconds
    assert slow["bounds"].bound == "memory"


def test_work_grows_with_length(base_overlap):
    short, long = (
        {(k.name, k.backward): k for k in predicted("a100", overlap, backward=True).kernels}
        for overlap in base_overlap.values()
    )
    assert short.keys() == long.keys()
    for name, kernel in long.items():
        for what in ("hbm_bytes", "l2_bytes", "flops", "exponentials"):
            assert getattr(kernel, what) >= getattr(short[name], what), (name, what)
        assert kernel.l2_bytes > short[name].l2_bytes


def test_a_prediction_adds_up(base_overlap):
    forward, both = (predicted("h100", base_overlap[2048], backward=b) for b in (False, True))
    assert forward.seconds == sum(k.seconds for k in forward.kernels) == sum(
        k.seconds for k in both.kernels if not k.backward)  # fmt: skip
    assert both.ratio == both.dense_seconds / both.seconds
    assert both.dense_seconds > forward.dense_seconds
    assert both.ratio_with_host(both.seconds / 2) == both.ratio == 2 * both.ratio_with_host(2 * both.seconds)
    plain, slower = (
        predicted("h100", base_overlap[4096], as_triton=t, backward=True, launch_s=0.0) for t in (False, True)
    )
    assert plain.seconds < slower.seconds < GPUS["h100"].published.triton_slowdown * plain.seconds


def test_dense_follows_what_was_published():
    """Calibrated at rows of 128; A100's time at rows of 64 and FlashAttention-3's backward there are predictions."""
    n = 16384
    wide, narrow = (replace(BASE, n_heads=8, n_kv_groups=8, d_k=d, d_v=d) for d in (128, 64))
    for gpu in GPUS.values():
        for backward, share in ((False, gpu.published.forward), (True, gpu.published.backward)):
            flops = (5 if backward else 2) * 2 * 128 * 8 * n * (n + 1) / 2
            reached = flops / dense_s(gpu, LaunchSizes(wide, n, "bf16"), backward) / gpu.flops_per_s("bf16")
            assert reached == pytest.approx(share)
    flops = 5 * 2 * 64 * 8 * n * (n + 1) / 2
    assert flops / dense_s(GPUS["h100"], LaunchSizes(narrow, n, "bf16"), True) / 1e12 == pytest.approx(474, rel=0.05)
    assert dense_s(A100, LaunchSizes(BASE, 65536, "bf16"), False) == pytest.approx(35e-3, rel=0.03)


def test_clocks_and_units_give_the_table_s_peak():
    """A tensor core's width is a power of two: what the device table says must be units × clock × that."""
    per_clock = {"a100": 2048, "h100": 4096, "b200": 8192, "mi300x": 2048}
    for name, gpu in GPUS.items():
        assert gpu.device is SPECS[gpu.device.name]
        assert gpu.unit_clocks_per_s * per_clock[name] == pytest.approx(gpu.flops_per_s("bf16"), rel=0.01)


@pytest.mark.parametrize("data", ["random", "smooth"])
@pytest.mark.parametrize("length", [90, 777])
def test_the_group_centric_kernel_reads_every_chosen_block(data, length):
    overlap, sizes = measure_overlap(TINY, length, data), LaunchSizes(TINY, length, "bf16")
    reads = group_centric_forward(sizes).trips
    chosen = int((overlap.idx_LSN >= 0).sum()) * TINY.n_kv_groups
    assert reads == chosen
    per_query = [overlap.blocks(queries) * TINY.n_kv_groups for queries in (1, 2, 5, 10, 32)]
    assert per_query[0] == reads
    assert per_query == sorted(per_query, reverse=True)
    assert group_centric_forward(sizes).l2_bytes >= selected_kernels.selected_forward(sizes, overlap).l2_bytes


def test_sampled_spans_estimate_the_whole_row(monkeypatch):
    whole = measure_overlap(TINY, 4000, "smooth")
    monkeypatch.setattr(selection_overlap, "MOST_SPANS", 8)
    sampled = measure_overlap(TINY, 4000, "smooth")
    assert whole.whole
    assert (sampled.whole, sampled.n_measured) == (False, 8 * selection_overlap.SPAN)
    for queries in (1, 10, 32):
        assert sampled.blocks(queries) == pytest.approx(whole.blocks(queries), rel=0.1)
    assert sampled.trips(1024, 64)[0] == pytest.approx(whole.trips(1024, 64)[0], rel=0.1)


@pytest.mark.parametrize("queries", [1, 3, 10, 32])
def test_a_union_is_a_set(queries):
    overlap = measure_overlap(TINY, 90)
    rows = overlap.idx_LSN[0].tolist()
    tiles = [{block for row in rows[i : i + queries] for block in row} - {-1} for i in range(0, 90, queries)]
    assert overlap.blocks(queries) == sum(map(len, tiles))
    assert overlap.entries() == sum(block >= 0 for row in rows for block in row)


def test_smooth_neighbours_share_more_blocks():
    assert measure_overlap(TINY, 2000, "smooth").mean(10) < 0.8 * measure_overlap(TINY, 2000, "random").mean(10)


def test_torch_operations_are_counted_once_each():
    x = torch.empty(1000, 4, device="meta")
    row = torch.empty(1, 4, device="meta").expand(1000, 4)
    assert torch_ops.traced("add", False, lambda: x + row).l2_bytes == 2 * 16_000 + 16
    assert torch_ops.traced("views", False, lambda: x.T.flatten().view(2, -1)[:, :7]).launches == 1  # flatten copies
    short = torch_ops.traced("sort", False, lambda: x.sort(-1))
    assert (short.sorted_keys, short.l2_bytes) == (4000, 4000 * 3 * 12)
    long = torch_ops.traced("sort", False, lambda: torch.empty(5000, dtype=torch.int64, device="meta").sort())
    assert (long.sorted_keys, long.l2_bytes) == (0, 5000 * (8 * 2 * 16 + 8))
    assert torch_ops.traced("scan", False, lambda: torch.empty(1, 5000, device="meta").cummax(1)).scanned == 5000


def test_machine_code_says_what_a_turn_issues():
    text = "\n".join(
        [".L_x_1:", *["        /*0010*/    @P0 FADD R1, R2 ;"] * 5, ".L_x_2:",
         *["        /*0020*/  HMMA.16816 R1 ;"] * 3,
         *["        /*0030*/   MUFU.EX2 R1 ;"] * 3, "        /*0040*/   @P1 BRA `(.L_x_2) ;",
         "        /*0050*/   IADD3 R1 ;", "        /*0060*/   BRA `(.L_x_1) ;"]
    )  # fmt: skip
    assert parse(text)[1] == [(5, 11), (0, 13)]
    assert count(text) == (7, 7, 3)
    assert count(text, heads=6) == (14 + 5 * 7, 14 + 5 * 7, 3 + 5 * 3)
    without_masks = [".L_x_3:", *["        /*0070*/   MUFU.EX2 R1 ;"] * 4, "        /*0080*/   @P1 BRA `(.L_x_3) ;"]
    waiting = [
        "        /*0090*/   EXIT ;",
        ".L_x_4:",
        "        /*00a0*/   SYNCS R1 ;",
        "        /*00b0*/   BRA `(.L_x_3) ;",
    ]
    assert count("\n".join([text, *without_masks, *waiting])) == (7, 5, 3)
    straight = "\n".join(f"        /*00{i}0*/  {name} ;" for i, name in enumerate(("IADD3 R1", "NOP", "EXIT")))
    assert count(straight) == (2, 2, 0)


def test_tensor_instructions_of_a_turn_are_the_modelled_ones():
    counts = count_instructions("selected_forward", BASE, "sm_80")
    sizes = LaunchSizes(BASE, 640, "bf16")
    work = selected_kernels.selected_forward(sizes, measure_overlap(BASE, 640))
    assert counts is not None
    assert counts.hmma_flops == work.flops / work.trips == 2 * 64 * 64 * 128
    assert counts.instructions > counts.hmma_flops // HMMA_FLOPS
    timed = time_of(A100, "bf16", work, counts)
    assert timed.bounds_s["instructions"] == pytest.approx(
        (counts.instructions * (work.trips - work.inner_trips) + counts.inner_instructions * work.inner_trips)
        * timed.tail / (SCHEDULERS * 108 * 1.41e9)
    )  # fmt: skip
    assert timed.tail > 1  # few pieces for so many units
    assert 0 < work.inner_trips < work.trips
    assert counts.inner_instructions < 0.9 * counts.instructions
    assert count_instructions("selected_forward", BASE, "gfx942") is None


def test_an_unknown_value_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="--gpu"):
        gpu_named("a1000")
    with pytest.raises(ConfigError):
        predict("a100", TINY, 200, overlap=measure_overlap(TINY, 100))
    with pytest.raises(ConfigError, match="--shape"):
        predict("a100", replace(TINY, d_k=512), 200)


def test_every_output_says_that_it_is_modelled(tmp_path):
    words = ["--gpu", "mi300x", "--lengths", "200,400", "--shape", "tiny", "--json", "m.json",
             "--plot", "m.svg", "--markdown", "m.md"]  # fmt: skip
    done = fork_server.run(["-m", "proofs.perf_model", *words], cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    body = json.loads((tmp_path / "m.json").read_text())
    assert [p["length"] for p in body["predictions"]] == [200, 200, 400, 400]
    assert {p["label"] for p in body["predictions"]} == {body["label"]} == {"modelled"}
    drawn = (tmp_path / "m.svg").read_text()
    ElementTree.fromstring(drawn)
    tables = (tmp_path / "m.md").read_text()
    for text in (done.stdout, drawn, tables):
        assert "modelled" in text.lower()
    for table in (done.stdout, tables):
        assert table.count("modelled kernel") == 1
        assert "with host" in table
    assert "selected_forward" in done.stdout
