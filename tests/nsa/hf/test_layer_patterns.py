"""Transformers models of several kinds of layers: the logits of `nsa.model`, generation, saving, refusals."""

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is in the hf extra")

from nsa.errors import ConfigError
from nsa.hf.configuration import NSAConfig
from nsa.hf.modeling import NSAForCausalLM
from nsa.hf.remote_code import remote_code_files
from nsa.hf.weight_names import to_transformers
from nsa.options import ATTENTION_KINDS
from nsa_train.config.schema import RunConfig
from nsa_train.convert.export_folder import exported_config
from nsa_train.run_model import build_model

PATTERN = list(ATTENTION_KINDS)


@pytest.fixture(params=[{}, dict(coarse_block=4, n_coarse=4)], ids=["one_level", "two_levels"])
def run_config(request):
    model = dict(dim=32, n_layers=len(PATTERN) + 1, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, attention=PATTERN)
    blocks = dict(l=8, d=4, l_sel=16, n_sel=4, w=24, selector_loss=1.0)
    return RunConfig.model_validate({"model": model, "nsa": {**blocks, **request.param}})


@pytest.fixture
def models(run_config):
    torch.manual_seed(0)
    ours = build_model(run_config, 64).eval()
    theirs = NSAForCausalLM(exported_config(run_config, 64, None)).eval()
    theirs.load_state_dict(to_transformers(ours.state_dict()))
    return ours, theirs


def test_logits_are_those_of_the_trained_model(models, tmp_path):
    ours, theirs = models
    ids = torch.randint(64, (2, 90))
    want = ours(ids)
    torch.testing.assert_close(theirs(ids).logits, want)
    theirs.save_pretrained(tmp_path)
    again = NSAForCausalLM.from_pretrained(tmp_path)
    assert again.config.layer_kinds() == [*PATTERN, PATTERN[0]]
    torch.testing.assert_close(again(ids).logits, want)


@pytest.mark.parametrize("beams", [1, 3])
def test_generated_tokens_are_those_without_a_cache(models, beams):
    _, theirs = models
    ids = torch.randint(64, (2, 40))
    options = dict(max_new_tokens=12, do_sample=False, num_beams=beams, pad_token_id=0)
    with_cache = theirs.generate(ids, **options)
    assert torch.equal(with_cache, theirs.generate(ids, use_cache=False, **options))


def test_one_kind_is_written_as_its_name_and_a_missing_field_is_nsa():
    config = exported_config(RunConfig(), 64, None)
    assert config.attention == "nsa"
    assert NSAConfig(num_hidden_layers=3, attention="dense").layer_kinds() == ["dense"] * 3


@pytest.mark.parametrize("attention", [["nsa", "dense"], []])
def test_invalid_patterns_are_refused(attention):
    with pytest.raises(ConfigError, match="attention"):
        NSAConfig(num_hidden_layers=1, attention=attention)


def test_remote_code_holds_the_layers():
    assert {"nsa_core_layer_kinds.py", "nsa_core_kv_cache.py"} <= remote_code_files().keys()
