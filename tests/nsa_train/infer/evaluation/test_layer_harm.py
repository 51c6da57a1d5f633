"""Harm and gain of single layers: equal to those of other conversions of the same model; the rule of the advice."""

import pytest
import torch

pytest.importorskip("transformers", reason="in the hf extra")

from nsa.core.attention_config import OPTIONS
from nsa.errors import ConfigError
from nsa_train.config.load import load as config_of
from nsa_train.config.model_sections import SparseAttentionConfig
from nsa_train.convert.export_folder import exported_config
from nsa_train.convert.import_folder import import_folder
from nsa_train.infer.evaluation.held_out import agreement_with
from nsa_train.infer.evaluation.layer_harm import (
    _advised_layers,
    _require_same_but_kinds,
    harmful_layers,
    layers_record,
    passes_over_rows,
    with_layer_kinds,
)
from nsa_train.infer.load_model import load_model
from tests.nsa_train.convert.dense_sources import token_ids
from tests.nsa_train.infer.evaluation.compared_models import COVERED, converted_pair, token_rows

LENGTH = 240


def divergence(model, reference, rows):
    return agreement_with(model, reference, rows).divergence.loss


@pytest.mark.parametrize("options", [dict(mix="merged"), dict(mix="gated"), dict(keep_dense=(0,), keep_window=(2,))])
def test_harm_and_gain_are_those_of_conversions_that_keep_other_layers(options, tmp_path):
    sparse, dense, _ = converted_pair(tmp_path, **options)
    rows, calls = token_rows(2, LENGTH), []
    result = harmful_layers(sparse, dense, rows, lambda: calls.append(1))
    dense_layers, windows = options.get("keep_dense", ()), options.get("keep_window", ())
    layers = [layer for layer in range(4) if layer not in dense_layers]
    assert [each.layer for each in result.layers] == layers
    assert len(calls) == passes_over_rows(sparse, dense) == 2 + 2 * len(layers)
    whole = divergence(sparse, dense, rows)
    assert result.divergence == pytest.approx(whole, rel=1e-4)
    for each in result.layers:
        others = tuple(layer for layer in range(4) if layer != each.layer)
        of_layer = tuple(layer for layer in windows if layer == each.layer)
        alone, _, _ = converted_pair(
            tmp_path / f"alone{each.layer}", **{**options, "keep_dense": others, "keep_window": of_layer}
        )
        without, _, _ = converted_pair(
            tmp_path / f"without{each.layer}",
            **{**options, "keep_dense": (*dense_layers, each.layer), "keep_window": tuple(set(windows) - {each.layer})},
        )
        assert each.harm == pytest.approx(divergence(alone, dense, rows), rel=1e-3)
        assert each.harm > 1e-4
        assert each.gain == pytest.approx(whole - divergence(without, dense, rows), rel=1e-3)
        assert (each.counts is None) == (each.layer in windows)


def test_the_advice_is_measured_and_names_layers_that_are_dense_already(tmp_path):
    sparse, dense, _ = converted_pair(tmp_path, keep_dense=(1,))
    rows = token_rows(2, LENGTH)
    result = harmful_layers(sparse, dense, rows)
    worst = max(result.layers, key=lambda each: each.harm)
    assert result.advised == [worst.layer]
    record = layers_record(result, "rows", LENGTH, 2, "dense")
    assert record["keep_dense"] == sorted([1, worst.layer])
    again, _, _ = converted_pair(tmp_path / "again", keep_dense=tuple(record["keep_dense"]))
    assert result.removed == pytest.approx(1 - divergence(again, dense, rows) / result.divergence, rel=1e-3)
    assert 0 < result.removed < 1
    assert 0 < record["layers"][0]["window_mass"] < 1


def test_weights_that_were_trained_since_stay_with_their_model(tmp_path):
    """Harm is of the dense model's weights with φ of the sparse one, gain of the sparse model's weights."""
    sparse, dense, _ = converted_pair(tmp_path, phi="weighted")
    with torch.no_grad():
        for name, parameter in sparse.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (1.0 if "phi" in name else 0.02))
    rows, trained = token_rows(1, LENGTH), sparse.state_dict()
    before = {name: value.clone() for name, value in trained.items()}
    result = harmful_layers(sparse, dense, rows)
    assert all(torch.equal(before[name], value) for name, value in trained.items())
    alone, _, _ = converted_pair(tmp_path / "alone", phi="weighted", keep_dense=(0, 1, 3))
    phi = {name: value for name, value in trained.items() if "layers.2.attention.phi" in name}
    assert phi
    alone.load_state_dict({**alone.state_dict(), **phi})
    assert result.layers[2].harm == pytest.approx(divergence(alone, dense, rows), rel=1e-3)
    without, _, _ = converted_pair(tmp_path / "without", phi="weighted", keep_dense=(2,))
    without.load_state_dict({name: trained[name] for name in without.state_dict()})
    gain = divergence(sparse, dense, rows) - divergence(without, dense, rows)
    assert result.layers[2].gain == pytest.approx(gain, rel=1e-3)


@pytest.mark.parametrize("case", ["llama yarn", "qwen3", "olmo3", "smollm3", "phi3 partial"])
def test_a_run_of_the_converted_model_has_exchangeable_layers(case, tmp_path):
    """The settings of a run say less than config.json does, and lead to the same layers."""
    sparse, dense, _ = converted_pair(tmp_path, case)
    import_folder(tmp_path / "sparse", tmp_path / "run")
    run = load_model(tmp_path / "run", device="cpu", needs_text=False).model
    _require_same_but_kinds(run, dense)
    kinds = dense.config.layer_kinds()
    exchanged = with_layer_kinds(run.config, kinds, run.state_dict())
    ids = token_ids(150)
    with torch.no_grad():
        torch.testing.assert_close(exchanged(ids).logits, dense(ids).logits, atol=1e-4, rtol=1e-4)
    assert run.config.layer_kinds() == sparse.config.layer_kinds() != kinds


def test_a_model_that_was_warmed_up_by_the_recipe_has_exchangeable_layers(tmp_path):
    sparse, dense, _ = converted_pair(tmp_path, phi="softmax")
    recipe = config_of(tmp_path / "sparse" / "warmup.yaml", overrides=["data.dataset=synthetic"])
    sparse.config = exported_config(recipe, sparse.config.vocab_size, sparse.config.eos_token_id)
    assert sparse.config.selector_blocks == "all" != dense.config.selector_blocks
    _require_same_but_kinds(sparse, dense)


def test_every_option_of_a_layer_is_compared_or_belongs_to_sparse_layers(tmp_path):
    """A new option is one or the other by where it is defined; this list names those that matter to no layer."""
    sparse, dense, _ = converted_pair(tmp_path, "qwen3")  # with QK-norm, whose options count then
    of_sparse_layers = set(SparseAttentionConfig.model_fields) - {"preset"}
    for option, name in ((each.name, each.exported) for each in OPTIONS):
        before = getattr(dense.config, name)
        object.__setattr__(dense.config, name, ("another", before))
        if option in of_sparse_layers | {"init_std"}:
            _require_same_but_kinds(sparse, dense)
        else:
            with pytest.raises(ConfigError, match=name):
                _require_same_but_kinds(sparse, dense)
        object.__setattr__(dense.config, name, before)


def test_rows_within_the_covered_length_lead_to_no_advice(tmp_path):
    sparse, dense, _ = converted_pair(tmp_path)
    result = harmful_layers(sparse, dense, token_rows(1, COVERED))
    assert (result.advised, result.removed) == ([], None)
    record = layers_record(result, "rows", COVERED, 1, "dense")
    assert record["keep_dense"] == []
    assert "window_mass" not in record["layers"][0]


@pytest.mark.parametrize(
    ("harm", "advised"),
    [
        ([1.0, 1.0, 1.0, 1.0], [0]),  # at most a quarter of the layers
        ([0.1, 5.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], [1]),  # half of the harm is reached by one of two
        ([1.0, 3.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0], [1, 3]),
        ([2.0, 1.0], [0]),
    ],
)
def test_layers_are_advised_until_half_of_the_harm_or_a_quarter_of_the_layers(harm, advised):
    assert _advised_layers([(10 + layer, value) for layer, value in enumerate(harm)]) == [10 + each for each in advised]


def test_models_whose_layers_cannot_be_exchanged_are_refused(tmp_path):
    sparse, dense, _ = converted_pair(tmp_path)
    with pytest.raises(ConfigError, match="same kind"):
        harmful_layers(dense, dense, token_rows(1, 40))
    dense.config.rope_theta = 77.0
    with pytest.raises(ConfigError, match="rope_theta"):
        harmful_layers(sparse, dense, token_rows(1, 40))
