"""Estimated bytes of collectives, weights and FLOPs of a layout against a simulated step of the engine: equal."""

import pytest

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from nsa.errors import NSAError
from nsa_train.cli.plan import simulate_in_child
from nsa_train.config import load
from nsa_train.planning.collective_bytes import by_group, collectives
from nsa_train.planning.estimate import estimate
from nsa_train.planning.hardware import RANKS_PER_NODE, parse_target
from nsa_train.planning.model_figures import model_figures
from tests.nsa_train.train.runs import write_config

SMALL = [
    "model.dim=64", "model.n_heads=8", "model.n_kv_groups=4", "train.seq_len=256", "model.vocab_size=128",
    "nsa.l=16", "nsa.d=8", "nsa.l_sel=16", "nsa.w=32", "model.n_layers=2", "runtime.precision=bf16",
]  # fmt: skip
FSDP, HSDP = "parallel.data=fsdp", "parallel.data=hsdp"
FULL, SELECTIVE = "runtime.gradient_checkpointing=full", "runtime.gradient_checkpointing=selective"
FAST = {"context_tensor": (16, HSDP, "parallel.shard_ranks=2", FULL, "parallel.tp=2", "parallel.cp=2")}
SLOW = {
    "fsdp": (64, FSDP, FULL, "train.batch_size=64"),
    "accumulation": (8, FSDP, "train.batch_size=8", "train.accumulate_grad_batches=3"),
    "tied": (4, FSDP, "model.tie_embeddings=true"),
    "tensor": (4, FSDP, SELECTIVE, "parallel.tp=4"),
    "context": (4, FSDP, "parallel.cp=4"),
    "contiguous": (4, FSDP, SELECTIVE, "parallel.cp=4", "parallel.cp_split=contiguous"),
    "selector_loss": (4, FSDP, FULL, "parallel.cp=4", "nsa.selector_loss=1.0"),
    "selector_loss_per_branch": (4, FSDP, "parallel.cp=2", "nsa.selector_loss=1.0", "nsa.kv=per_branch"),
    "merged": (4, FSDP, FULL, "parallel.cp=4", "model.attention=merged", "nsa.selector_loss=1.0"),
    "paper": (8, FSDP, FULL, "train.batch_size=8", "nsa.preset=paper", "parallel.cp=2"),
}
_SMALL_CALLS = 1024
"""Bytes below which a sum of norms or counts stays out of the estimate."""


def require_equal(folder, world, *changes):
    config = load(write_config(folder), overrides=[*SMALL, *changes])
    counts = simulate_in_child(config, 128, parse_target(f"h100-80gb:{world}"))
    model = model_figures(config, 128)
    estimated = by_group(collectives(config, model, world, RANKS_PER_NODE, counts.passes))
    for group, total in counts.collectives.items():
        known = estimated[group].n_bytes if group in estimated else 0
        assert abs(known - total.n_bytes) <= _SMALL_CALLS * (group.kind == "all_reduce") + 8 * total.calls, group
    assert estimated.keys() <= counts.collectives.keys()
    run_estimate = estimate(config, parse_target(f"h100-80gb:{world}"), 128, figures=model)
    assert run_estimate.memory.weights + run_estimate.memory.optimizer == counts.held_bytes


@pytest.mark.parametrize("name", FAST)
def test_the_estimate_is_what_a_simulated_step_sends_and_holds(name, tmp_path):
    require_equal(tmp_path, *FAST[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", SLOW)
def test_the_estimate_is_right_for_every_layout(name, tmp_path):
    require_equal(tmp_path, *SLOW[name])


def test_a_simulation_that_takes_too_long_is_an_error_with_a_fix(tmp_path):
    config = load(write_config(tmp_path), overrides=SMALL)
    with pytest.raises(NSAError, match="Simulate fewer layers"):
        simulate_in_child(config, 128, parse_target("h100-80gb:4"), limit_s=0.01)
