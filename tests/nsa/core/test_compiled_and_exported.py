"""Graphs of whole layers: compiled decoding from the first token on, with page pools; export with a dynamic length."""

import copy

import pytest
import torch

from nsa import NSATransformer
from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError
from tests.shapes import GEOMETRIES, attention_args


def compiled(module):
    torch.compiler.reset()
    return torch.compile(module, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    ("kind", "pages"), [pytest.param("nsa", None, marks=pytest.mark.nightly), ("nsa", 8), ("dense", 8)]
)
def test_decoding_compiles_from_the_first_token_on(kind, pages):
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny", kv="shared", kernels="portable"), kind=kind)
    caches = [module.new_cache(2, 30, pages=pages) for _ in range(2)]
    run = compiled(module)
    for _ in range(12):  # more than a page of 8 tokens
        x = torch.randn(2, 1, module.dim)
        torch.testing.assert_close(run(x, cache=caches[1]), module(x, cache=caches[0]))
    assert torch.equal(caches[0].length_B, caches[1].length_B)
    assert caches[0].page_table.n_free == caches[1].page_table.n_free


def test_a_compiled_step_writes_to_no_page_that_rows_share():
    module = NSAAttention(**attention_args("tiny", kv="shared", kernels="portable"))
    first, tokens = torch.randn(2, 11, module.dim), torch.randn(9, 2, 1, module.dim)
    outputs = []
    run = compiled(module)
    for step in (module, run):
        cache = module.new_cache(2, 30, pages=8)
        module(first, cache=cache)
        cache.reorder([1, 1])
        cache = copy.deepcopy(cache)  # which has pages of its own, and is not mistaken for the other
        outputs.append(torch.stack([step(x, cache=cache) for x in tokens]))
    torch.testing.assert_close(*outputs)


def test_a_compiled_step_refuses_an_empty_pool():
    module = NSAAttention(**attention_args("tiny", kv="shared", kernels="portable"))
    cache, run = module.new_cache(2, 30, pages=1), compiled(module)
    with pytest.raises(ConfigError, match="pages"):
        run(torch.randn(2, 1, module.dim), cache=cache)


def exported(module, example, name):
    length = {1: torch.export.Dim.DYNAMIC}
    return torch.export.export(module, (example,), dynamic_shapes={name: length}).module()


@pytest.mark.parametrize(
    ("kind", "geometry", "phi"),
    [
        pytest.param("nsa", "tiny", "linear", marks=pytest.mark.nightly),
        ("nsa", "odd", "softmax"),
        ("global", "no_overlap", "mlp"),
    ],
)
def test_a_layer_is_exported_with_a_dynamic_length(kind, geometry, phi):
    """Holds from 2 l + d tokens on: fewer have no two compressed blocks that share no token, which is another graph."""
    torch.manual_seed(0)
    module = NSAAttention(**attention_args(geometry, kv="shared", phi=phi), kind=kind)
    shortest = 2 * GEOMETRIES[geometry]["l"] + GEOMETRIES[geometry]["d"]
    graph = exported(module, torch.randn(2, shortest + 30, module.dim), "x_BSD")
    for length in (shortest, shortest + 16, shortest + 57):
        x, again = (torch.randn(2, length, module.dim, requires_grad=True) for _ in range(2))
        again.data.copy_(x.data)
        torch.testing.assert_close(graph(x), module(again))
        graph(x).square().sum().backward()
        module(again).square().sum().backward()
        torch.testing.assert_close(x.grad, again.grad)


def test_a_model_of_several_kinds_is_exported_with_a_dynamic_length():
    torch.manual_seed(0)
    sizes = {name: value for name, value in attention_args("tiny", kv="shared", phi="softmax").items() if name != "dim"}
    model = NSATransformer(50, 24, 3, layers=("nsa", "merged", "dense"), **sizes)
    graph = exported(model, torch.randint(0, 50, (2, 40)), "tokens_BS")
    for length in (20, 97):
        tokens = torch.randint(0, 50, (2, length))
        torch.testing.assert_close(graph(tokens), model(tokens))
