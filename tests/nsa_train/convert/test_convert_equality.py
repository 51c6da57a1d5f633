"""A converted model computes what Transformers computes of its source, up to the covered length."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is in the hf extra")
from nsa_train.convert.dense.conversion_plan import ConversionOptions, covered_tokens
from nsa_train.convert.dense.convert_folder import convert_folder
from nsa_train.infer.load_model import load_model
from tests.covering_cases import each_value
from tests.nsa_train.convert.dense_sources import CASES, save_dense, token_ids

OPTIONS = ConversionOptions(l=8, d=4, l_sel=16, n_sel=4, w=24)
MIXES = {
    "merged": OPTIONS,
    "gated": replace(OPTIONS, mix="gated", phi="weighted"),
    "softmax": replace(OPTIONS, phi="softmax"),
}
LONGEST = 88
TOLERANCE = 1e-4


def converted_model(tmp_path, case, options):
    """The dense model, the converted one, and what was converted."""
    dense = save_dense(tmp_path / "dense", case)
    conversion = convert_folder(tmp_path / "dense", tmp_path / "sparse", options)
    return dense, load_model(tmp_path / "sparse", needs_text=False).model, conversion


def off_by(model, dense, ids_BS):
    """Largest difference of the logits at each position."""
    with torch.no_grad():
        return (model(ids_BS).logits - dense(ids_BS).logits).abs().amax((0, 2))


@pytest.mark.parametrize(("case", "mix"), each_value(list(CASES), list(MIXES)))
def test_logits_equal_up_to_the_covered_length(case, mix, tmp_path):
    dense, model, conversion = converted_model(tmp_path, case, MIXES[mix])
    length = covered_tokens(conversion.reads) or LONGEST
    assert length in (LONGEST, 64)
    ids, begin = token_ids(length, batch=2), length - 20
    with torch.no_grad():
        expected = dense(ids).logits
        assert expected.std() > 0.5  # far enough from zero to compare
        assert (model(ids).logits - expected).abs().max() <= TOLERANCE
        step = model(ids[:, :begin])
        for place in range(begin, length):
            step = model(ids[:, place : place + 1], past_key_values=step.past_key_values)
            assert (step.logits[:, 0] - expected[:, place]).abs().max() <= TOLERANCE, place


@pytest.mark.parametrize("mix", MIXES)
def test_beyond_the_covered_length_a_query_reads_less(mix, tmp_path):
    dense, model, conversion = converted_model(tmp_path, "llama", MIXES[mix])
    covered = covered_tokens(conversion.reads)
    assert covered is not None
    off_S = off_by(model, dense, token_ids(covered + 40))
    assert off_S[:covered].max() <= TOLERANCE
    assert off_S[covered + 1 :].max() > 100 * TOLERANCE


def test_far_positions_have_the_angles_of_transformers(tmp_path):
    """Angles in fp64 would change these logits by 3e-4."""
    dense, model, _ = converted_model(tmp_path, "mistral sliding", OPTIONS)
    assert off_by(model, dense, token_ids(3000)).max() <= TOLERANCE


def test_kept_layers_are_as_dense_as_the_source(tmp_path):
    dense, model, conversion = converted_model(tmp_path, "qwen3", replace(OPTIONS, keep_dense=(0, 1, 2, 3)))
    assert covered_tokens(conversion.reads) is None
    assert model.config.attention == "dense"
    assert off_by(model, dense, token_ids(200)).max() <= TOLERANCE


def test_a_window_in_place_of_a_dense_layer_covers_its_tokens(tmp_path):
    dense, model, conversion = converted_model(tmp_path, "llama", replace(OPTIONS, keep_window=(1,), keep_dense=(0,)))
    assert model.config.layer_kinds() == ["dense", "window", "merged", "merged"]
    assert covered_tokens(conversion.reads) == OPTIONS.w
    off_S = off_by(model, dense, token_ids(OPTIONS.w + 30))
    assert off_S[: OPTIONS.w].max() <= TOLERANCE
    assert off_S[OPTIONS.w :].max() > 100 * TOLERANCE
