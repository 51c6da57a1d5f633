"""Step times by kernel backend: which backend, and that the figures follow from their sources."""

from dataclasses import replace

import pytest

from nsa.bench.case import SHAPES
from nsa.bench.predictions import predictions
from nsa.core.nsa_attention import NSAAttention
from nsa.kernels.registry import BRANCHES, BackendChoice, PassedOver
from nsa_train.config import load
from nsa_train.planning.estimate import _backend_that_will_run, _portable_bytes_per_token, estimate
from nsa_train.planning.hardware import parse_target

CONFIG = load("configs/train_50k.yaml")
VOCAB = 32_768


def estimate_for(target="a100-80gb", *changes, **more):
    config = load("configs/train_50k.yaml", overrides=changes) if changes else CONFIG
    return estimate(config, parse_target(target), VOCAB, **more)


def test_the_backend_that_will_run():
    assert _backend_that_will_run(CONFIG, is_gpu=True) == "triton"
    assert _backend_that_will_run(CONFIG, is_gpu=False) == "cpu"
    named = load("configs/train_50k.yaml", overrides=["kernels.select=reference", "kernels.selected=portable"])
    assert _backend_that_will_run(named, is_gpu=True) == "reference"
    no_flash = load("configs/train_50k.yaml", overrides=["runtime.use_flash=false"])
    assert _backend_that_will_run(no_flash, is_gpu=True) == "portable"
    decided = [BackendChoice(branch, "portable", (PassedOver("triton", "failed"),)) for branch in BRANCHES]
    assert _backend_that_will_run(CONFIG, is_gpu=True, decided=decided) == "portable"


def test_time_memory_and_price_are_of_the_backend_that_will_run():
    run_estimate = estimate_for("a100-80gb", "kernels.compressed=portable", "kernels.select=portable",
                   "kernels.selected=portable", "kernels.sliding=portable")  # fmt: skip
    (portable,) = [one for one in run_estimate.backends if one.backend == "portable"]
    assert (run_estimate.backend, run_estimate.step_s, run_estimate.memory) == (
        "portable",
        portable.step_s,
        portable.memory,
    )
    assert run_estimate.usd == pytest.approx(run_estimate.price_of(portable.step_s))
    assert estimate_for().backend == "triton"
    assert estimate_for().tokens_per_s > 4 * run_estimate.tokens_per_s


def test_triton_takes_the_modelled_time_of_the_base_shape():
    """The attention of train_50k is the base shape: without the rest, 12 layers of 8 rows take what is predicted."""
    assert CONFIG.train.seq_len == 2048
    shape = SHAPES["base"]
    assert (shape.n_heads, shape.n_kv_groups, shape.d_k) == (12, 2, 64)
    assert shape.geometry == CONFIG.nsa.geometry
    plain = estimate_for("a100-80gb", "runtime.gradient_checkpointing=false")
    flops, peak = plain.flops_per_token, 312e12
    rest = sum(count for part, count in flops.items() if part not in BRANCHES)
    rest_s = plain.tokens_per_step * rest / (0.39 * peak) + 28 * plain.parameters.total / 2039e9
    predicted = predictions()["a100", 2048, "bf16", True]["seconds"]
    assert plain.step_s - rest_s == pytest.approx(8 * 12 * predicted, rel=1e-6)


def test_the_share_counts_the_modules_own_flops():
    module = NSAAttention(768, 12, 2, 64, 64)
    flops = module.flops(2048)
    reads = module.geometry.total_reads(2048)
    assert sum(flops[branch] for branch in ("compressed", "selected", "sliding")) == pytest.approx(
        2 * 12 * 128 * sum(reads.values()) / 2048
    )
    assert flops["select"] == pytest.approx(2 * 12 * 64 * reads["compressed"] / 2048)


def test_the_portable_time_is_bytes_over_bandwidth():
    """Near the 4 to 15 thousand tokens/s that two independent models gave for this model on an A100."""
    (portable,) = [one for one in estimate_for().backends if one.backend == "portable"]
    assert 4000 < estimate_for().tokens_per_step / portable.step_s < 18_000
    assert _portable_bytes_per_token(CONFIG, recomputed=True) > _portable_bytes_per_token(CONFIG, recomputed=False)
    by_hand = 12 * 12 * 4 * (2 * 16 * 128 * 16 + (2 * 16 * 64 + 127 + 2 * 512) * 18)
    assert _portable_bytes_per_token(CONFIG, recomputed=False) == by_hand
    fast = replace(parse_target("a100-80gb"), device=replace(parse_target("a100-80gb").device, bandwidth_gb_s=4078))
    faster = estimate(CONFIG, fast, VOCAB).backends[1]
    assert portable.step_s / 2 < faster.step_s < 0.6 * portable.step_s


def test_a_gpu_without_a_model_is_rated_like_a_modelled_one_and_says_so():
    timing = estimate_for("l40s").timing
    assert "as on a100" in timing
    assert "as on" not in estimate_for("h100-80gb").timing


def test_recomputing_takes_time_and_selective_checkpointing_spares_the_kernels():
    modes = [
        estimate_for("a100-80gb", f"runtime.gradient_checkpointing={mode}") for mode in ("off", "selective", "full")
    ]
    off, selective, full = (run_estimate.step_s for run_estimate in modes)
    assert off < selective < full
    rest = modes[1].recomputed_flops_per_token * modes[1].tokens_per_step / (0.39 * 312e12)
    assert selective - off == pytest.approx(rest, rel=1e-6)
    eager = estimate_for("a100-80gb", "runtime.gradient_checkpointing=off", "runtime.compile=off")
    assert eager.step_s > off
    assert modes[0].backends[1].step_s < modes[1].backends[1].step_s < modes[2].backends[1].step_s


def test_every_figure_says_where_it_is_from():
    for target in ("a100-80gb", "cpu"):
        for one in estimate_for(target).backends:
            assert one.timing.startswith(("modelled", "calculated", "assumed")) or "assumed" in one.timing
    assert estimate_for(measured_step_s=1.0).timing.startswith("measured")
