"""A dense model of Transformers is loaded as it is: the logits of Transformers, for every kind of layer it has."""

import pytest
import torch

pytest.importorskip("transformers", reason="in the hf extra")

from nsa.errors import CheckpointError
from nsa_train.convert.dense.conversion_plan import ConversionOptions
from nsa_train.convert.dense.convert_folder import convert_folder
from nsa_train.infer.load_reference import _is_source, load_reference
from tests.nsa_train.convert.dense_sources import save_dense, token_ids

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", ["llama tied", "qwen2 sliding", "olmo3", "phi3 partial"])
def test_a_dense_folder_gives_the_logits_of_transformers(case, tmp_path):
    model, ids = save_dense(tmp_path / "dense", case), token_ids(60)
    loaded = load_reference(tmp_path / "dense", device=CPU, dtype=torch.float32)
    assert loaded.source.step is None
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_folder_of_ours_is_loaded_as_by_load_model(tmp_path):
    save_dense(tmp_path / "dense")
    convert_folder(tmp_path / "dense", tmp_path / "sparse", ConversionOptions(l=8, d=4, l_sel=16, n_sel=4, w=24))
    assert (_is_source(tmp_path / "dense"), _is_source(tmp_path / "sparse"), _is_source(tmp_path)) == (
        True,
        False,
        False,
    )
    loaded = load_reference(tmp_path / "sparse", device=CPU, dtype=torch.bfloat16)
    assert loaded.model.config.layer_kinds() == ["merged"] * 4
    assert loaded.model.dtype == torch.bfloat16


def test_what_cannot_be_converted_cannot_be_compared_with(tmp_path):
    save_dense(tmp_path / "dense")
    (tmp_path / "dense" / "config.json").write_text('{"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}')
    with pytest.raises(CheckpointError):
        load_reference(tmp_path / "dense", device=CPU, dtype=torch.float32)
