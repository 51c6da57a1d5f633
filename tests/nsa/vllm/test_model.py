"""Weights of a rank, refusals, and registration with vLLM."""

import json
import logging
import sys

import pytest
import torch
from torch import nn
from vllm import ModelRegistry

import nsa.vllm
from nsa.core.layer_kinds import ThreeBranches
from nsa.errors import CheckpointError, KernelUnavailable
from nsa.geometry import Geometry
from nsa.vllm.model import load_share, split_axis
from tests.nsa.vllm.engines import (
    GEOMETRY,
    MAX_LEN,
    SIZES,
    engine,
    export_small_model,
    random_prompts,
    vllm_tokens,
)


def test_every_parameter_is_divided_along_its_groups_or_copied(tmp_path):
    """Shares of two ranks, put together again, are the whole model: same shapes, each element once."""
    options = dict(phi="mlp", phi_pos_emb=True, bias=True, out_bias=True, qk_norm=True)
    whole = export_small_model(tmp_path / "whole", **options).model.layers.state_dict()
    halves = dict(num_attention_heads=2, num_key_value_heads=1, intermediate_size=96, **options)
    whole_ffn = export_small_model(tmp_path / "whole", intermediate_size=192, **options).model.layers.state_dict()
    share = export_small_model(tmp_path / "share", **halves).model.layers.state_dict()
    assert whole.keys() == share.keys()
    for name, full in whole_ffn.items():
        axis = split_axis(name)
        want = list(share[name].shape)
        if axis is not None:
            want[axis] *= 2
        assert list(full.shape) == want, name


def test_a_rank_loads_its_own_share():
    loaded = torch.arange(12.0).view(4, 3)
    parameter = nn.Parameter(torch.zeros(2, 3))
    load_share(parameter, loaded, name="w", axis=0, rank=1, n_ranks=2)
    assert parameter.data.equal(loaded[2:])


def test_weights_of_another_shape_are_refused():
    """A copy would repeat a single row over the whole parameter."""
    parameter = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(CheckpointError, match=r"\[1, 3\].*needs \[2, 3\]"):
        load_share(parameter, torch.ones(1, 3), name="w", axis=None, rank=0, n_ranks=1)


def test_damaged_weights_are_refused_by_the_engine(tmp_path):
    export_small_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"feed_forward\.w1\.weight has shape"), engine(tmp_path):
        pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(block_size=24), "multiple of the selection block"),
        (dict(kv_cache_dtype="fp8"), "--kv-cache-dtype"),
        (dict(quantization="fp8", dtype="bfloat16"), "--quantization"),
        (dict(quantization="fp8_per_tensor", dtype="bfloat16"), "--quantization"),
    ],
)
def test_settings_that_would_be_wrong_are_refused(tmp_path, options, said):
    export_small_model(tmp_path)
    with pytest.raises(Exception, match=said), engine(tmp_path, **options):
        pass


def test_kernels_are_chosen_when_the_model_is_built(tmp_path, monkeypatch):
    export_small_model(tmp_path)
    monkeypatch.setenv("NSA_KERNEL", "triton")
    with pytest.raises(KernelUnavailable, match="it runs on a GPU, not on cpu"), engine(tmp_path):
        pytest.fail("the first request would find out")


def test_memory_is_measured_with_the_longest_request(tmp_path, monkeypatch):
    """A CPU's engine measures nothing: its dummy run is repeated as on a GPU, before there are pages."""
    export_small_model(tmp_path)
    attended = []

    def recorded(self, run, q, gates, keys, **options):
        attended.append((q.shape[1], *(one.k.shape[1] for one in keys), int(keys[1].pos_BS[0, -1])))
        return attend(self, run, q, gates, keys, **options)

    def measure(worker):
        runner = worker.model_runner
        streams = [module for module in runner.model.modules() if hasattr(module, "kv_cache")]
        pages = [stream.kv_cache for stream in streams]
        for stream in streams:
            stream.kv_cache = torch.empty(0)
        runner._dummy_run(512)
        assert not any(stream.kv_cache.numel() for stream in streams)
        assert len(attended) == SIZES["num_hidden_layers"]
        for stream, bound in zip(streams, pages, strict=True):
            stream.kv_cache = bound
        runner._dummy_run(512)
        assert len(attended) == SIZES["num_hidden_layers"], "with pages nothing is measured any more"

    with engine(tmp_path, max_num_batched_tokens=512) as llm:
        attend = ThreeBranches.attend
        monkeypatch.setattr(ThreeBranches, "attend", recorded)
        llm.collective_rpc(measure)
        monkeypatch.undo()
        assert len(vllm_tokens(llm, random_prompts([700]), 3)[0][0]) == 3
    g = Geometry(**GEOMETRY)
    window = MAX_LEN - (MAX_LEN - 512 - g.w + 1)
    assert set(attended) == {(512, g.n_compressed(MAX_LEN), MAX_LEN, window, MAX_LEN - 1)}


def test_a_folder_of_quantised_weights_is_refused(tmp_path):
    export_small_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    with pytest.raises(Exception, match="quantization_config"), engine(tmp_path, dtype="bfloat16"):
        pass


def test_layers_of_other_attention_are_refused(tmp_path):
    export_small_model(tmp_path, attention=["dense", "nsa"])
    with pytest.raises(Exception, match="nsa serve"), engine(tmp_path):
        pass


def test_a_plugin_that_cannot_load_says_so_and_does_not_raise(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "nsa.hf", None)
    with caplog.at_level(logging.ERROR):
        nsa.vllm.register()
    assert "the plugin did not load" in caplog.text


def test_registering_twice_is_harmless():
    nsa.vllm.register()
    nsa.vllm.register()
    assert nsa.vllm.ARCHITECTURE in ModelRegistry.get_supported_archs()
