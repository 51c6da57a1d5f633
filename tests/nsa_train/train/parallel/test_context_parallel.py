"""A layer whose rows are divided among ranks gives the outputs, gradients and chosen blocks of one rank."""

from itertools import product

import pytest

from tests.attention_options import KV_PROJECTIONS, PHIS, PHIS_WITH_POS_EMB
from tests.nsa_train.train.parallel.context_cases import ContextCase, run_cases

CROSSING = [0, 5, 40, 70, 71, 128]  # documents across every border, one shorter than a block, one of one token
TWO_ROWS = [0, 50, 128, 140, 256]

SELECTOR = dict(selector_loss=0.5, selector_loss_share=0.25)
ALL_BLOCKS = dict(**SELECTOR, selector_blocks="all")
OF_TWO = {
    "softmax, selector loss": ContextCase(documents=CROSSING, layer=dict(phi="softmax", **SELECTOR)),
    "softmax, selector loss, zig-zag": ContextCase(True, 2, layer=dict(phi="softmax", **SELECTOR)),
    "linear, embedded places, own keys": ContextCase(
        True, 2, documents=TWO_ROWS, layer=dict(phi="linear", phi_pos_emb=True, kv="per_branch", **SELECTOR)
    ),
    "mlp, shared keys": ContextCase(documents=CROSSING, layer=dict(phi="mlp", kv="shared_keys")),
    "weighted, QK-norm, biases": ContextCase(True, layer=dict(phi="weighted", qk_norm=True, bias=True, out_bias=True)),
    "pieces that no stride divides": ContextCase(True, length=4 * 33, layer=dict(phi="avg", l=6, d=3, l_sel=6)),
    "short stride": ContextCase(layer=dict(phi="softmax", l=12, d=3, l_sel=6)),
    "dense": ContextCase(True, documents=CROSSING, layer=dict(kind="dense")),
    "window": ContextCase(True, 2, layer=dict(kind="window")),
    "some channels, fp32 angles": ContextCase(True, layer=dict(rotary_dim=4, rope_angles="fp32", phi="mlp")),
    "no RoPE, QK-norm of the layer": ContextCase(
        documents=CROSSING, layer=dict(rope="none", qk_norm=True, qk_norm_per="layer")
    ),
    "global": ContextCase(documents=CROSSING, layer=dict(kind="global")),
    "merged": ContextCase(documents=CROSSING, layer=dict(kind="merged", phi="avg")),
    "merged, zig-zag": ContextCase(True, 2, layer=dict(kind="merged", phi="softmax", **SELECTOR)),
    "merged, all blocks": ContextCase(documents=CROSSING, layer=dict(kind="merged", phi="softmax", **ALL_BLOCKS)),
    "all blocks, zig-zag": ContextCase(True, 2, layer=dict(phi="linear", kv="per_branch", **ALL_BLOCKS)),
    "two levels": ContextCase(documents=CROSSING, layer=dict(coarse_block=2, n_coarse=4)),
    "two levels, zig-zag": ContextCase(True, 2, layer=dict(coarse_block=2, n_coarse=4, phi="softmax", **SELECTOR)),
    "window of one token": ContextCase(layer=dict(w=1)),
    "fp32": ContextCase(dtype="float32", documents=CROSSING),
    "fp32, zig-zag": ContextCase(True, dtype="float32"),
    "checkpointed": ContextCase(True, checkpointed=True, layer=SELECTOR),
    "reference": ContextCase(
        True, documents=CROSSING, layer=dict(kernels=dict(sliding="reference", selected="reference"))
    ),
}
OF_FOUR = {
    "four, contiguous": ContextCase(documents=CROSSING, layer=dict(kv="per_branch", phi="mlp", phi_pos_emb=True)),
    # One query is sampled, so that three ranks have none.
    "four, one query sampled": ContextCase(layer=dict(selector_loss=0.5, selector_loss_share=0.01)),
    "four, zig-zag": ContextCase(True, 2, documents=TWO_ROWS, layer=SELECTOR),
    "four, zig-zag, plain": ContextCase(True, 2, layer=dict(phi="linear")),
}


def every_combination() -> dict[int, dict[str, ContextCase]]:
    """φ × keys × split × rows, with RoPE before compression where φ allows it."""
    cases = {}
    for phi, kv, zigzag, packed in product(PHIS, KV_PROJECTIONS, (False, True), (False, True)):
        mixes = phi in PHIS_WITH_POS_EMB
        layer = dict(phi=phi, kv=kv, phi_pos_emb=mixes)
        if phi != "avg" or kv == "per_branch":
            layer.update(SELECTOR)
        cases[f"{phi}, {kv}, zig-zag {zigzag}, packed {packed}"] = ContextCase(
            zigzag, 2, documents=TWO_ROWS if packed else None, layer=layer
        )
    return {2: cases, 4: {f"four, {name}": case for name, case in cases.items()}}


def require_equal(errors, *, exact: bool) -> None:
    limit = 1e-11 if exact else 1e-5
    assert errors["missing"] == 0
    assert errors["flips"] == 0 if exact else errors["flips"] < 0.01  # near-ties: rounding depends on shapes
    if errors["flips"] == 0:
        assert max(errors["out"], errors["dx"], errors["weights"]) < limit, errors
    assert errors["reads_pred"] == errors["reads_act_total"] == 0


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("context"), {2: OF_TWO, 4: OF_FOUR})


@pytest.mark.parametrize("name", [*OF_TWO, *OF_FOUR])
def test_a_divided_layer_computes_what_one_rank_does(results, name):
    require_equal(results[name], exact=not name.startswith("fp32"))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_every_combination_of_options(tmp_path):
    for name, errors in run_cases(tmp_path, every_combination(), timeout_s=1100).items():
        assert errors["flips"] == 0, name
        require_equal(errors, exact=True)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_divided_layer_is_one_compiled_graph(tmp_path):
    case = ContextCase(True, documents=CROSSING, compiled=True, layer=SELECTOR)
    require_equal(run_cases(tmp_path, {2: {"compiled": case}}, timeout_s=1100)["compiled"], exact=True)
