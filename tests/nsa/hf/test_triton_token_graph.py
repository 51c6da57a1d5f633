"""Tokens decoded from a captured graph are those decoded one by one. A stand-in for graphs, kernels interpreted."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import StaticCache

from nsa.errors import ConfigError
from nsa.hf.cache import NSACacheLayer
from nsa.kernels import registry
from tests.backends import RUN_HERE
from tests.nsa.hf.tiny_model import padded, prompts, tiny_model

pytest.importorskip("triton", reason="it is in the dev extra")
if "triton" not in RUN_HERE:
    pytest.skip("runs under TRITON_INTERPRET=1", allow_module_level=True)
from nsa.kernels.triton import decode
from tests.nsa.hf.recorded_graph import recorded_graphs, recording

NEW = 6  # a compressed block of either row ends among replayed ones, and a page of one


@pytest.fixture(autouse=True)
def _decoded_by_triton(monkeypatch):
    """Prompts are read by the portable backend, tokens decoded by Triton's, in few programs: they are interpreted."""
    both = replace(registry.BACKENDS["portable"], decoder=registry.BACKENDS["triton"].decoder)
    monkeypatch.setitem(registry.BACKENDS, "portable", both)
    monkeypatch.setattr(registry, "_plan_once", registry._plan)
    monkeypatch.setenv("NSA_KERNEL", "portable")
    for name, value in dict(PROGRAMS=2, WINDOW_PART=32, STRETCHES=1, BLOCKS_AT_ONCE=16).items():
        monkeypatch.setattr(decode, name, value)


def stepping_model(**changes):
    return tiny_model(v_head_dim=16, **changes)


def generated(model, ids, **options):
    ask = dict(max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return model.generate(ids, **ask | options)


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        (dict(), dict()),
        (dict(kv="per_branch", phi="avg", qk_norm=True, num_hidden_layers=1), dict(cache_implementation="static")),
        (dict(phi="mlp", num_hidden_layers=1), dict()),
        (dict(attention=["merged", "global"]), dict()),
    ],
    ids=str,
)
def test_replayed_tokens_are_those_of_passes_as_written(variant, options):
    """Rows of different lengths: they end blocks and pages at different tokens, which a graph does not see."""
    model, (ids, mask) = stepping_model(**variant), padded([9, 14])
    want = generated(model, ids, attention_mask=mask, **options)
    with recorded_graphs() as graphs:
        got = generated(model, ids, attention_mask=mask, **options)
    (graph,) = graphs
    assert graph.replays == NEW - 2  # the prompt gives one token, the first pass after it compiles
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), atol=0, rtol=0)
    assert len(graph.launches) == model.config.num_hidden_layers * (5 if variant.get("phi") == "mlp" else 4)


def test_what_a_graph_cannot_repeat_runs_as_written():
    """Layers without a step, hidden states that are asked for, and a cache that `crop` may shorten."""
    ids = prompts(1, 10)
    with recorded_graphs() as graphs:
        for changes, options in (
            (dict(attention=["nsa", "window"]), {}),
            (dict(num_hidden_layers=1), dict(output_hidden_states=True)),
            (dict(num_hidden_layers=1), dict(prompt_lookup_num_tokens=2)),
        ):
            model = stepping_model(**changes)
            want = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False)
            assert torch.equal(generated(model, ids, max_new_tokens=4, **options).sequences, want)
    assert not graphs


def test_changed_weights_are_used_from_the_next_prompt_on():
    """One cache for two prompts; a captured pass has the addresses of the weights that it was captured with."""
    model, ids = stepping_model(num_hidden_layers=1), prompts(1, 10)
    cache = StaticCache(config=model.config, max_cache_len=64)
    with recorded_graphs() as graphs:
        generated(model, ids, past_key_values=cache)
        cache.reset()
        with torch.no_grad():
            for part in model.modules():
                for name, parameter in part.named_parameters(recurse=False):
                    setattr(part, name, torch.nn.Parameter(parameter.flip(0)))
        got = generated(model, ids, past_key_values=cache).sequences
    assert len(graphs) == 2
    assert torch.equal(got, generated(model, ids).sequences)


def test_a_capture_that_fails_is_told_and_decoding_goes_on(monkeypatch, caplog):
    model, ids = stepping_model(num_hidden_layers=1), prompts(1, 10)
    want = generated(model, ids).sequences

    def fails(*args, **options):
        raise RuntimeError("operation not permitted when stream is capturing")

    with recorded_graphs(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "graph", fails)
        got = generated(model, ids).sequences
    assert torch.equal(got, want)
    assert caplog.text.count("CUDA graph") == 1


def test_a_capture_that_fails_at_its_end_counts_no_token(monkeypatch):
    """The token runs once more, as written: the host counts it once, and the cache has room for the next one."""
    model, ids = stepping_model(num_hidden_layers=1), prompts(1, 10)
    cache = StaticCache(config=model.config, max_cache_len=13)

    @contextmanager
    def fails(graph, **options):
        with recording(graph, **options):
            yield
        raise RuntimeError("operation failed due to a previous error during capture")

    with recorded_graphs() as graphs, monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.cuda, "graph", fails)
        model(ids, past_key_values=cache)
        for _ in range(2):
            model(ids[:, :1], past_key_values=cache)
        assert graphs[0].launches
    assert cache.layers[0]._cache.length_B.tolist() == [12]
    assert cache.layers[0]._cache.has_room


def test_a_replay_refuses_what_the_cache_has_no_room_for():
    model, ids = stepping_model(num_hidden_layers=1), prompts(1, 10)
    cache = StaticCache(config=model.config, max_cache_len=13)
    token = ids[:, :1]
    with recorded_graphs() as graphs, torch.no_grad():
        model(ids, past_key_values=cache)
        for _ in range(3):
            model(token, past_key_values=cache)
        with pytest.raises(ConfigError, match="13"):
            model(token, past_key_values=cache)
    assert graphs[0].replays == 2
    assert isinstance(cache.layers[0], NSACacheLayer)
    assert cache.layers[0]._cache.length_B.tolist() == [13]
