"""Exact figures of the estimate, against the model and the optimizer that a run builds."""

import pytest
import torch

from nsa.core.compression import store_as_rows
from nsa.errors import ConfigError
from nsa_train.config.schema import RunConfig
from nsa_train.planning.estimate import RunEstimate, estimate
from nsa_train.planning.hardware import CPU, DEVICES, GIB, HardwareTarget, parse_target
from nsa_train.run_model import build_model
from tests.attention_options import FAMILIES, KV_PROJECTIONS, OPTIONS

VOCAB = 257
SMALL = {
    "model": dict(dim=32, n_layers=3, n_heads=4, n_kv_groups=2, d_k=8, d_v=4),
    "nsa": dict(l=8, d=4, l_sel=8, n_sel=4, w=16),
    "runtime": dict(device="cpu", precision="fp32"),
    "train": dict(steps=10, seq_len=64, batch_size=4),
    "data": dict(dataset="synthetic"),
}


def changed(**sections) -> RunConfig:
    return RunConfig.model_validate({**SMALL, **{name: SMALL.get(name, {}) | more for name, more in sections.items()}})


def estimate_for(config: RunConfig, target: str = CPU, **more) -> RunEstimate:
    return estimate(config, parse_target(target), VOCAB, **more)


VARIANTS = {
    "plain": {},
    "tied": dict(model=dict(tie_embeddings=True)),
    "mlp": dict(nsa=dict(phi="mlp", gate_per="group")),
    "linear": dict(nsa=dict(phi="linear", phi_pos_emb=True)),
    "weighted": dict(nsa=dict(phi="weighted")),
    "softmax": dict(nsa=dict(phi="softmax")),
    "vocabulary": dict(model=dict(vocab_size=300, ffn_dim=48)),
    "dense": dict(model=dict(attention="dense")),
    "merged": dict(model=dict(attention="merged"), nsa=dict(phi="avg")),
    "mixed": dict(model=dict(attention=["window", "global", "dense"]), nsa=dict(phi="mlp")),
    **{name: sections for name, sections in OPTIONS.items() if name != "plain"},
    **FAMILIES,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_and_optimizer_bytes_are_those_of_the_run(variant):
    pytest.importorskip("olmo_core", reason="the engine is in the train extra")
    from nsa_train.train.distributed import RankInfo
    from nsa_train.train.engine.build import build_train_module

    config = changed(**VARIANTS[variant])
    run_estimate = estimate_for(config)
    module = build_train_module(config, VOCAB, RankInfo(), torch.device("cpu"))
    weights = list(module.model.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    module.optim.step()
    states = [value for state in module.optim.state.values() for value in state.values()]
    assert run_estimate.parameters.total == sum(weight.numel() for weight in weights)
    assert run_estimate.memory.weights == run_estimate.memory.gradients == sum(weight.nbytes for weight in weights)
    assert run_estimate.memory.optimizer == sum(value.nbytes for value in states)
    assert run_estimate.parameters.tensors == len(weights)
    by_name = {name: weight.numel() for name, weight in module.model.named_parameters()}
    assert run_estimate.parameters.attention == sum(size for name, size in by_name.items() if ".attention." in name)
    assert run_estimate.parameters.norms == sum(size for name, size in by_name.items() if ".attention." not in name
                                         and name.endswith("norm.weight"))  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_are_the_models_own(variant):
    config = changed(**VARIANTS[variant])
    with torch.device("meta"):
        model = build_model(config, VOCAB)
    run_estimate = estimate_for(config)
    assert sum(run_estimate.flops_per_token.values()) == pytest.approx(model.flops_per_token(config.train.seq_len))
    assert {
        "select",
        "compressed",
        "selected",
        "sliding",
        "feed_forward",
        "head",
    } <= run_estimate.flops_per_token.keys()


def test_recomputing_costs_one_more_forward_pass_of_the_blocks_up_to_their_last_product():
    plain, again = estimate_for(changed()), estimate_for(changed(runtime=dict(gradient_checkpointing=True)))
    assert plain.recomputed_flops_per_token == 0
    blocks = {part: count for part, count in again.flops_per_token.items() if part != "head"}
    forward = sum(count / (1 if part == "select" else 3) for part, count in blocks.items())
    last = blocks["feed_forward"] / 3 / 3  # nothing in the backward pass needs the result of the third product
    assert again.recomputed_flops_per_token == pytest.approx(forward - last)


def test_step_times_differ_by_the_flops_that_are_recomputed():
    """Recomputed FLOPs are counted by torch in a step of the engine's model; the efficiency applies to them too."""
    pytest.importorskip("olmo_core", reason="the engine is in the train extra")
    from torch.utils.flop_counter import FlopCounterMode

    from nsa_train.train.distributed import RankInfo
    from nsa_train.train.engine.build import build_train_module
    from nsa_train.train.engine.simulated_rank import _OWN_FLOPS

    def own(count):
        def formula(*args, out_val=None, **kwargs):
            return count(SMALL["train"]["seq_len"], *args)

        formula._get_raw = True  # of tensors, not of their shapes
        return formula

    operators = {getattr(torch.ops.nsa, name.removeprefix("nsa::")): own(count) for name, count in _OWN_FLOPS.items()}
    counted, seconds = {}, {}
    for mode in ("off", "selective", "full"):
        config = changed(nsa=dict(phi="linear"), runtime=dict(gradient_checkpointing=mode))
        module = build_train_module(config, VOCAB, RankInfo(), torch.device("cpu"))
        rows = torch.zeros(4, 64, dtype=torch.long)
        with FlopCounterMode(display=False, custom_mapping=operators) as counter:
            module.step_without_trainer([{"input_ids": rows, "labels": rows}], 1.0)
        run_estimate = estimate_for(config, "a100-80gb", efficiency=0.5)
        counted[mode], seconds[mode] = counter.get_total_flops(), run_estimate.step_s
        executed = sum(run_estimate.flops_per_token.values()) + run_estimate.recomputed_flops_per_token
        assert run_estimate.tokens_per_step * executed == pytest.approx(counted[mode], rel=0.01)
    for mode in ("selective", "full"):
        repeated_s = (counted[mode] - counted["off"]) / (0.5 * 19.5e12)
        assert repeated_s > 0
        assert seconds[mode] - seconds["off"] == pytest.approx(repeated_s, rel=0.02)
    assert seconds["selective"] < seconds["full"]


@pytest.mark.parametrize("kv", KV_PROJECTIONS)
def test_the_cache_is_as_large_as_the_one_that_is_made(kv):
    config = changed(nsa=dict(kv=kv))
    cache = build_model(config, VOCAB).new_cache(1, config.train.seq_len)
    assert estimate_for(config).cache_bytes == cache.n_bytes()
    assert estimate_for(changed(nsa=dict(kv=kv), runtime=dict(precision="bf16"))).cache_bytes == cache.n_bytes() // 2


def test_what_is_sharded_is_divided_and_nothing_else_is():
    whole = estimate_for(changed(), "a100-80gb:4")
    fsdp = estimate_for(changed(parallel=dict(data="fsdp")), "a100-80gb:4")
    hsdp = estimate_for(changed(parallel=dict(data="hsdp", shard_ranks=2)), "a100-80gb:4")
    alone = estimate_for(changed(parallel=dict(data="fsdp")), "a100-80gb")
    model = build_model(changed(), VOCAB)
    store_as_rows(model)
    parameters = list(model.parameters())
    for sharded, shards in ((fsdp, 4), (hsdp, 2)):
        # Each tensor is cut by rows, as `torch.chunk` does it; rank 0 has the largest part.
        numbers = sum(parameter.chunk(shards)[0].numel() for parameter in parameters)
        assert sharded.memory.weights == sharded.memory.gradients == 4 * numbers
        assert sharded.memory.optimizer == 4 * (2 * numbers + len(parameters))  # and a count of steps per tensor
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(alone.memory, part) == getattr(whole.memory, part)
    assert whole.memory.communication == whole.memory.gradients  # ddp keeps a second copy in its buckets
    assert alone.memory.communication == 0


def test_ranks_share_the_rows_of_a_pass():
    one, four = estimate_for(changed(), "a100-80gb"), estimate_for(changed(), "a100-80gb:4")
    assert four.memory.activations.kept < one.memory.activations.kept / 2
    assert four.tokens_per_step == one.tokens_per_step == 4 * 64


def test_time_and_price_follow_from_what_was_stated():
    config = changed()
    run_estimate = estimate_for(config, "a100-80gb:2", efficiency=0.5, price=2.0)
    flops = sum(run_estimate.flops_per_token.values())
    arithmetic_s = run_estimate.tokens_per_step * flops / (2 * 19.5e12 * 0.5)
    assert run_estimate.step_s == pytest.approx(arithmetic_s + 28 * run_estimate.parameters.total / 2039e9)
    assert run_estimate.wall_s == pytest.approx(10 * run_estimate.step_s)
    assert run_estimate.usd == pytest.approx(run_estimate.wall_s / 3600 * 4.0)
    assert "50%" in run_estimate.timing
    assert "given" in run_estimate.timing


def test_assumed_and_measured_figures_are_labelled():
    assert "assumed" in estimate_for(changed()).timing
    assert estimate_for(changed(), "a100-80gb").timing.startswith("modelled")
    measured = estimate_for(changed(), measured_step_s=2.0)
    assert (measured.step_s, measured.timing.split(":")[0]) == (2.0, "measured")


def test_a_checkpoint_holds_weights_and_optimizer():
    run_estimate = estimate_for(changed())
    tensors = run_estimate.memory.weights + run_estimate.memory.optimizer
    assert tensors < run_estimate.checkpoint_bytes < tensors + run_estimate.parameters.tensors * 2**16
    assert run_estimate.export_bytes == 2 * run_estimate.memory.weights


def test_memory_fits_if_the_sum_of_its_parts_does():
    config = changed(train=dict(batch_size=4096))
    tiny = HardwareTarget(DEVICES[CPU], 1)
    roomy = estimate(config, tiny, VOCAB).memory
    assert roomy.available == 16 * GIB
    parts = roomy.weights + roomy.gradients + roomy.optimizer + roomy.reserve + roomy.activations.kept
    assert roomy.total == parts
    assert roomy.fits == (parts <= 16 * GIB)


@pytest.mark.parametrize(
    "sizes",
    [dict(model=dict(dim=10**12)), dict(model=dict(vocab_size=10**21)), dict(model=dict(d_v=10**17)),
     dict(train=dict(seq_len=10**20))],
)  # fmt: skip
def test_a_size_that_no_tensor_can_have_is_a_wrong_config(sizes):
    (section,) = sizes
    with pytest.raises(ConfigError, match=f"{section}.{next(iter(sizes[section]))} is "):
        estimate_for(changed(**sizes))
    assert not estimate_for(changed(model=dict(n_layers=10**21), train=dict(batch_size=10**21))).memory.fits
