"""Second level of the compressed branch: against the oracle, between backends, packed, cached, compiled, and equal to
one level where it reads everything."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.core.coarse_attention import _coarse_keys
from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import probing
from nsa.errors import ConfigError
from nsa.geometry import CoarseLevel, Geometry
from tests import oracle
from tests.backends import RUN_HERE
from tests.shapes import attention_args, fp64_backends

COARSE = {
    "tiny": dict(coarse_block=4, n_coarse=3),
    "showcase": dict(coarse_block=4, n_coarse=4, n_sel=4),
    "no_overlap": dict(coarse_block=3, n_coarse=3),
    "long_blocks": dict(coarse_block=6, n_coarse=3),
}
LENGTHS = {"tiny": 120, "showcase": 220, "no_overlap": 100, "long_blocks": 150}


def layer(geometry: str, seed: int = 0, **changes: Any) -> NSAAttention:
    torch.manual_seed(seed)
    arguments = attention_args(geometry, **{**COARSE[geometry], **changes})
    module = NSAAttention(**arguments).double()
    with torch.no_grad():
        module.w_q.weight.mul_(20)  # decided scores: no near-ties
        module.w_k.weight.mul_(20)
    return module


def tokens(length: int, batch: int = 1, seed: int = 1) -> Tensor:
    return torch.randn(batch, length, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("geometry", COARSE)
@pytest.mark.parametrize("changes", [{}, dict(kv="shared", phi="softmax")], ids=["per_branch", "shared"])
def test_equals_the_oracle(geometry: str, changes: dict[str, Any]) -> None:
    module, x = layer(geometry, **changes), tokens(LENGTHS[geometry])
    weights = {name: value.numpy() for name, value in module.state_dict().items()}
    arguments = attention_args(geometry, **COARSE[geometry], **changes)
    expected = oracle.nsa_layer(x[0].numpy(), weights, **arguments)
    one_level = oracle.nsa_layer(x[0].numpy(), weights, **{**arguments, "coarse_block": 0})
    for kernels in fp64_backends():
        out = layer(geometry, kernels=kernels, **changes)(x)[0]
        torch.testing.assert_close(out, torch.from_numpy(expected), atol=1e-9, rtol=1e-9)
    assert abs(expected - one_level).max() > 1e-3  # it reads less than one level does


@pytest.mark.parametrize("geometry", COARSE)
def test_equals_one_level_where_it_reads_all_entries(geometry: str) -> None:
    x = tokens(LENGTHS[geometry], batch=2)
    one, two = layer(geometry, coarse_block=0), layer(geometry, n_coarse=64)
    torch.testing.assert_close(two(x), one(x), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("geometry", COARSE)
def test_packed_documents_do_not_see_each_other(geometry: str) -> None:
    module, length = layer(geometry), LENGTHS[geometry]
    cuts = [0, 3, length // 2 + 1, length // 2 + 2, length]
    x = tokens(length)
    packed = module(x, cu_doc_lens=torch.tensor(cuts, dtype=torch.int32))
    for begin, end in pairwise(cuts):
        torch.testing.assert_close(packed[:, begin:end], module(x[:, begin:end]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kernels", [name for name in RUN_HERE if name != "reference"])
def test_backends_agree_in_fp32_with_gradients(kernels: str) -> None:
    x, results = tokens(120).float(), {}
    for name in ("reference", kernels):
        module = layer("tiny", kernels=name).float()
        own_x = x.clone().requires_grad_()
        module(own_x).square().sum().backward()
        results[name] = [own_x.grad, *(p.grad for p in module.parameters())]
    for ours, reference in zip(results[kernels], results["reference"], strict=True):
        torch.testing.assert_close(ours, reference, atol=2e-4, rtol=1e-3)


def test_gradcheck() -> None:
    module = layer("tiny")
    x = tokens(60).requires_grad_()
    assert torch.autograd.gradcheck(module, (x,), fast_mode=True, nondet_tol=1e-12)


@pytest.mark.parametrize("geometry", COARSE)
def test_prefill_in_chunks_and_decode_equal_one_pass(geometry: str) -> None:
    module, length = layer(geometry), LENGTHS[geometry]
    x = tokens(length, batch=2)
    expected, cache = module(x), module.new_cache(2, length)
    cut, parts = length - 20, []
    for begin, end in [(0, 50), (50, cut), *((t, t + 1) for t in range(cut, length))]:
        parts.append(module(x[:, begin:end], cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-9, rtol=1e-9)


def test_compiles_without_graph_breaks() -> None:
    module, x = layer("tiny", kernels="portable"), tokens(100)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x), atol=1e-12, rtol=1e-12)


def test_reads_are_counted_and_predicted() -> None:
    module, x = layer("showcase"), tokens(700)
    with probing(module) as probes, torch.no_grad():
        module(x)
    (figures,) = [probe.figures for probe in probes.values()]
    assert int(figures["reads_act_total"]) == int(figures["reads_pred"])
    g, coarse = module.geometry, module.coarse
    assert coarse is not None
    one_level = sum(g.total_reads(700).values())
    in_two = coarse.total_reads(g, 700)
    assert int(figures["reads_pred"]) == one_level - g.total_reads(700)["compressed"] + in_two["compressed"]
    assert module.flops(700)["compressed"] < layer("showcase", coarse_block=0).flops(700)["compressed"]


@pytest.mark.parametrize("n_tokens", [1, 31, 32, 300, 1001])
def test_total_reads_are_the_sum_over_queries(n_tokens: int) -> None:
    g, coarse = Geometry(16, 8, 32, 8, 64), CoarseLevel(8, 4)
    entries = [g.n_compressed(t + 1) for t in range(n_tokens)]
    expected = dict(
        coarse=sum(n // 8 for n in entries), compressed=sum(coarse.geometry.n_selected_tokens(n) for n in entries if n)
    )
    assert coarse.total_reads(g, n_tokens) == expected


def test_a_million_tokens_read_a_bounded_number_of_entries() -> None:
    g, coarse, million = Geometry(), CoarseLevel(64, 16), 2**20
    reads = coarse.total_reads(g, million)
    assert g.total_reads(million)["compressed"] / million > 32_000
    assert reads["compressed"] / million < 1024
    assert reads["coarse"] / million < 520


def test_coarse_keys_are_means_of_whole_blocks_of_each_document() -> None:
    k_BCGK = torch.arange(11.0)[None, :, None, None]
    first_BS = torch.tensor([[0, 3, 3, 11]])  # documents of three and eight entries, and one without
    means = _coarse_keys(k_BCGK, first_BS, CoarseLevel(2, 3))[0, :, 0, 0]
    assert means.shape == (5,)
    assert means[0] == 0.5  # entries 0, 1
    assert means[1:5].tolist() == [3.5, 5.5, 7.5, 9.5]  # slot 3 // 2 + j


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        (dict(coarse_block=3), "coarse_block=4"),
        (dict(coarse_block=-1), "at least 0"),
        (dict(n_coarse=2), "n_coarse=16"),
        (dict(n_sel=9), "n_coarse=5"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        layer("tiny", **{"coarse_block": 8, "n_coarse": 4, "l_sel": 16, "l": 8, "d": 4, **changes})


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("documents", [None, [0, 2, 10]], ids=["rows", "packed"])
def test_rows_without_a_compressed_entry(backend: str, documents: list[int] | None) -> None:
    """Shorter than l: there are no entries, and nothing but the other branches is attended to."""
    module = layer("tiny", kernels=backend).float()
    x = tokens(5, batch=2).float().requires_grad_()
    out = module(x, cu_doc_lens=documents)
    reference = layer("tiny", kernels="reference").float()
    expected = reference(x, cu_doc_lens=documents)
    torch.testing.assert_close(out, expected)
    gradients = (torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected))
    torch.testing.assert_close(*gradients)
