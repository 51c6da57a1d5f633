"""The benchmark of a converted model runs and gives its figures; what they are is for a quiet machine."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="in the hf extra")

from nsa.errors import ConfigError
from nsa_train.convert.dense.conversion_plan import ConversionOptions
from nsa_train.convert.dense.convert_folder import CONVERSION, convert_folder
from nsa_train.infer.evaluation.layer_harm import with_layer_kinds
from nsa_train.infer.load_model import load_model
from tests.nsa_train.convert.dense_sources import save_dense, token_ids
from tools import bench_converted

SMALL = ["--lengths", "40,100", "--tokens", "2", "--rounds", "2", "--threads", "1", "--chunk", "64"]


@pytest.fixture
def sparse(tmp_path):
    save_dense(tmp_path / "dense", "qwen2 sliding")
    convert_folder(
        tmp_path / "dense",
        tmp_path / "sparse",
        ConversionOptions(l=8, d=4, l_sel=16, n_sel=4, w=24, keep_window=(1,)),
    )
    return tmp_path / "sparse"


@pytest.mark.parametrize("words", [[], ["--random", "--layers", "3", "--dtype", "bf16"]])
def test_every_length_gets_its_figures(words, sparse, tmp_path, capsys):
    file = tmp_path / "found.json"
    measured_cells = bench_converted.main([str(sparse), *SMALL, *words, "--json", str(file)])
    assert [cell["length"] for cell in measured_cells] == [40, 100]
    for cell in measured_cells:
        for kind, unit in (("prefill", "s"), ("decode", "ms")):
            assert cell[f"{kind}_ratio"] > 0
            assert cell[f"sparse_{kind}_{unit}"] > 0
    record = json.loads(file.read_text())
    assert record["cells"] == measured_cells
    # Layers 2 and 3 slide in the source; layer 1 became a window and is dense there.
    assert record["kinds"]["sparse"] == ["merged", "window", "window", "window"][: 3 if words else 4]
    assert record["kinds"]["dense"] == ["dense", "dense", "window", "window"][: 3 if words else 4]
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_dense_model_is_the_source_and_shares_its_weights(sparse):
    model = load_model(sparse, device="cpu", needs_text=False).model
    dense = with_layer_kinds(model.config, bench_converted.dense_kinds(sparse, model), model.state_dict())
    ids = token_ids(120)
    with torch.no_grad():
        wanted = save_dense(sparse.parent / "again", "qwen2 sliding")(ids).logits
        torch.testing.assert_close(dense(ids).logits, wanted, atol=1e-4, rtol=1e-4)
    assert dense.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    (sparse / CONVERSION).unlink()
    assert bench_converted.dense_kinds(sparse, model) == ["dense", "window", "window", "window"]


def test_decoding_continues_the_prompt(sparse):
    model = load_model(sparse, device="cpu", needs_text=False).model
    prompt = token_ids(50)
    run = bench_converted.PromptRun(model, prompt, chunk=16, tokens=3, room=8)
    for _ in range(2):
        run.prefill()
        assert run.cache.get_seq_length() == 50
    with torch.no_grad():
        assert run._next.item() == model(prompt).logits[0, -1].argmax().item()
    run.decode()
    assert run.cache.get_seq_length() == 53


def test_loaded_weights_keep_their_layers(sparse):
    with pytest.raises(ConfigError, match="--random"):
        bench_converted.main([str(sparse), *SMALL, "--layers", "2"])
