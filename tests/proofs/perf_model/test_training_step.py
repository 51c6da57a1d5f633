"""A whole training step: its parts add up, recomputation costs what it repeats, and train_50k reaches its aim."""

from pathlib import Path

import pytest

from nsa_train.config.load import load
from proofs.perf_model.gpus import GPUS
from proofs.perf_model.prediction import KernelPrediction, predict
from proofs.perf_model.report import step_lines
from proofs.perf_model.selection_overlap import SelectionOverlap, measure_overlap
from proofs.perf_model.training_step import MATRIX_SHARE, StepPrediction, for_rows, predict_step, shape_of

CONFIG = load(Path(__file__).parents[3] / "configs/train_50k.yaml")
A100 = GPUS["a100"]


@pytest.fixture(scope="module")
def overlap() -> SelectionOverlap:
    return measure_overlap(shape_of(CONFIG), CONFIG.train.seq_len)


@pytest.fixture(scope="module")
def steps(overlap) -> dict[str, StepPrediction]:
    modes = ("off", "selective", "full")
    return {mode: predict_step(CONFIG, A100, mode, overlap, instructions=lambda *_: None) for mode in modes}


def part(step: StepPrediction, name: str) -> float:
    return next(part.seconds for part in step.parts if part.name == name)


def test_train_50k_makes_sixty_thousand_tokens_a_second(steps):
    for step in steps.values():
        assert step.tokens == 8 * 2048
        assert step.tokens_per_s == step.tokens / sum(part.seconds for part in step.parts)
        assert step.tokens_per_s >= 60_000
    assert steps["off"].tokens_per_s > steps["selective"].tokens_per_s > steps["full"].tokens_per_s


def test_recomputation_repeats_what_it_says(steps, overlap):
    off, selective, full = steps["off"], steps["selective"], steps["full"]
    assert part(selective, "attention kernels") == part(off, "attention kernels")
    forward = predict(A100, shape_of(CONFIG), 2048, overlap=overlap, instructions=lambda *_: None)
    repeated = 12 * sum(for_rows(kernel, 8) for kernel in forward.kernels)
    assert part(full, "attention kernels") - part(off, "attention kernels") == pytest.approx(repeated)
    assert part(selective, "matrix products") == part(full, "matrix products") > part(off, "matrix products")
    assert part(selective, "compiled elementwise") > part(off, "compiled elementwise")
    for name in ("loss", "casts of weights", "optimizer"):
        assert part(off, name) == part(full, name)


def test_products_are_those_of_the_weights(steps):
    """Six FLOPs per token and weight, the embedding apart."""
    dim, layers, ffn = 768, 12, CONFIG.model.ffn_size
    streams = 2 * 64 * 2  # keys and values, of which all branches read
    weights = layers * (dim * (2 * dim + streams + 36) + 3 * dim * ffn) + dim * 32768
    seconds = 6 * weights * 8 * 2048 / (MATRIX_SHARE * 312e12)
    assert part(steps["off"], "matrix products") == pytest.approx(seconds, rel=0.01)


def test_a_batch_shares_its_launches():
    kernel = KernelPrediction("k", False, 5e-6, "launch", 0, 0, 0, 0, 1, {"memory": 2e-6, "launch": 5e-6})
    assert for_rows(kernel, 2) == 5e-6
    assert for_rows(kernel, 8) == 16e-6


def test_the_report_says_that_it_is_modelled(steps):
    first, *rest = step_lines(steps["full"])
    assert "modelled" in first
    assert "gradient_checkpointing=full" in first
    assert len(rest) == len(steps["full"].parts)
