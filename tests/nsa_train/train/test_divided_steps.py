"""A step's gradients and loss do not depend on how its rows are divided among passes and ranks, with any packing."""

import json
from pathlib import Path

import pytest

from tests.covering_cases import each_value
from tests.nsa_train.train.divided_steps import DividedStep, divided_results

LAYERS = ("model.attention=[nsa, merged]", "nsa.kv=per_branch", "nsa.phi=softmax")
SELECTOR = ("nsa.selector_loss=1.0", "nsa.selector_loss_share=0.3")  # of 128 tokens: no whole number of them
ALL_BLOCKS = (*SELECTOR, "nsa.selector_blocks=all")
WAYS = {
    "two passes": (2, 1), "four passes": (4, 1), "ddp": (1, 2, "ddp"), "fsdp": (1, 2, "fsdp"),
    "ddp, two passes": (2, 2, "ddp"), "ddp, four passes": (4, 2, "ddp"),
    "fsdp, two passes": (2, 2, "fsdp"), "fsdp, four passes": (4, 2, "fsdp"),
}  # fmt: skip
PACKINGS = ("plain", "packed", "best_fit")
LIMIT = 1e-5


def all_cases(folder: Path) -> dict[str, DividedStep]:
    corpus = folder / "documents.jsonl"
    texts = [" ".join(f"{w * i % 97}" for w in range(3 + i * 7 % 40)) for i in range(200)]
    corpus.write_text("".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(texts)))
    local = ("data.dataset=local", f"data.path={corpus}")
    data = {"plain": (), "packed": local, "best_fit": (*local, "data.packing=best_fit")}
    cases = {}
    for way, (passes, world, *parallel) in WAYS.items():
        more = [f"parallel.data={kind}" for kind in parallel]
        for packing in PACKINGS:
            cases[f"{packing}, {way}"] = DividedStep(passes, world, [*LAYERS, *SELECTOR, *data[packing], *more])
        cases[f"all blocks, {way}"] = DividedStep(passes, world, [*LAYERS, *ALL_BLOCKS, *data["best_fit"], *more])
        changes = [*LAYERS, *SELECTOR, *data["best_fit"], *more, "runtime.precision=bf16"]
        cases[f"bf16, {way}"] = DividedStep(passes, world, changes)
    return cases


@pytest.fixture(scope="module")
def measured(request, tmp_path_factory):
    """The cases of the tests that were selected."""
    items = [item for item in request.session.items if item.path == request.path]
    selected = {f"{item.callspec.params['rows']}, {item.callspec.params['way']}" for item in items}
    cases = all_cases(tmp_path_factory.mktemp("divided"))
    return divided_results({name: case for name, case in cases.items() if name in selected})


@pytest.mark.parametrize(("rows", "way"), each_value([*PACKINGS, "all blocks"], list(WAYS)))
def test_gradients_are_those_of_one_pass_on_one_rank(measured, rows, way):
    by_parameter = measured[f"{rows}, {way}"].differences
    assert any("phi_k" in name for name in by_parameter)
    assert max(by_parameter.values()) <= LIMIT, {name: value for name, value in by_parameter.items() if value > LIMIT}


@pytest.mark.parametrize(
    ("rows", "way"), [("plain", "ddp"), ("plain", "ddp, two passes"), ("plain", "ddp, four passes")]
)
def test_ddp_sums_gradients_once_per_step(measured, rows, way):
    result = measured[f"{rows}, {way}"]
    assert result.summed_by_ddp == result.parameters
    assert max(result.differences.values()) <= LIMIT


@pytest.mark.parametrize(("rows", "way"), [("bf16", "fsdp"), ("bf16", "fsdp, two passes")])
def test_fsdp_in_bf16_rounds_neither_the_labels_nor_the_positions(measured, rows, way):
    """Arguments of a model and of its blocks and head, which fsdp would cast."""
    result = measured[f"{rows}, {way}"]
    assert result.loss == result.exact_loss
    assert result.tables == ["torch.float32"]
