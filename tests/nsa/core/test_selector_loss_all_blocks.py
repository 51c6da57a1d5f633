"""Selector loss over all blocks: value and gradient against dense attention computed query by query in fp64."""

import pytest
import torch
from torch.library import opcheck

from nsa.core import selector_loss as module_under_test
from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import probing
from nsa.errors import ConfigError
from nsa.kernels import reference
from nsa.kernels.registry import BackendRequest
from tests.attention_options import SELECTOR_BLOCKS
from tests.shapes import attention_args

CU_DOC_LENS = [0, 37, 41, 150, 200]
CASES = [
    ("tiny", "nsa", dict(kv="per_branch")), ("tiny", "nsa", dict(kv="shared", phi="softmax")),
    ("tiny", "merged", dict(phi="softmax")), ("tiny", "merged", dict(phi="weighted", qk_norm=True)),
    ("long_blocks", "merged", dict(phi="linear")), ("no_overlap", "merged", dict(phi="linear")),
    ("tiny", "merged", dict(phi="softmax", coarse_block=4, n_coarse=4)),
]  # fmt: skip


def layer_of(kind="merged", shape="tiny", seed=0, backend="portable", **options) -> NSAAttention:
    torch.manual_seed(seed)
    chosen = {"selector_loss": 1.0, "selector_loss_share": 0.25, "selector_blocks": "all", **options}
    layer = NSAAttention(**attention_args(shape, **chosen), kind=kind, kernels=BackendRequest(*[backend] * 4)).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(std=0.15 if name.startswith("phi") else 0.4)
    return layer.train()


def divergence(layer: NSAAttention, x_BSD: torch.Tensor, cu_doc_lens=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean over the queries with blocks to compare, and over all sampled ones, of which the others add nothing.

    From the layer's projections on nothing is shared: dense probabilities of each sampled query, block by block.
    """
    g = layer.geometry
    where = layer.locate(x_BSD, cu_doc_lens=cu_doc_lens)
    x_BSD = x_BSD if cu_doc_lens is None else x_BSD.flatten(0, 1)[None]
    with torch.no_grad():
        q, streams = layer.project(x_BSD, where.tables)
    with torch.set_grad_enabled(layer.kv == "per_branch"):
        k_raw = layer.project(x_BSD, where.tables)[1].k_cmp
    k_cmp = layer._compress_keys(k_raw, where.layout.begin_BC, where.layout.block_pos_BC, where.tables)
    reach = g.w if layer.kind == "merged" else 0
    terms = []
    for b in range(len(x_BSD)):
        for s in where.sample.queries_Q.tolist():
            pos, start, first = (int(t[b, s]) for t in where.layout[:3])
            n_blocks, entries = (pos + 1 - reach) // g.l_sel, g.n_compressed(max(0, pos + 1 - reach))
            overlap = reference.overlap(entries, max(0, n_blocks), g).double()
            for group in range(layer.n_kv_groups):
                keys = streams.k_sel[b, start : start + pos + 1, group]
                mass = (q[b, s, group] @ keys.T * layer.scale).softmax(-1).sum(0)
                shares = (q[b, s, group] @ k_cmp[b, first : first + entries, group].T * layer.scale).softmax(-1).sum(0)
                compared = [j for j in range(n_blocks) if overlap[:, j].any()]
                if len(compared) < 2:
                    continue
                target = torch.stack([mass[j * g.l_sel : (j + 1) * g.l_sel].sum() for j in compared])
                own = (shares @ overlap)[compared]
                target, own = target / target.sum(), own / own.sum()
                terms.append((target * (target.log() - own.log())).sum())
    total = torch.stack(terms)
    return total.mean(), total.sum() / (layer.n_kv_groups * len(x_BSD) * len(where.sample.queries_Q))


def loss_of(layer: NSAAttention, x_BSD: torch.Tensor, **options) -> torch.Tensor:
    with probing(layer) as probes:
        layer(x_BSD, **options)
    return probes[""].figures["selector_loss"]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(("shape", "kind", "options"), CASES, ids=str)
def test_value_and_gradient_are_those_of_dense_attention(shape, kind, options, packed, monkeypatch):
    monkeypatch.setattr(module_under_test, "budget", lambda x: 6_000)  # several chunks, the last one shorter
    layer = layer_of(kind, shape, **options)
    x = torch.randn(1 if packed else 2, 200, layer.dim, dtype=torch.float64)
    more = dict(cu_doc_lens=CU_DOC_LENS) if packed else {}
    mean, want = divergence(layer, x, **more)
    assert 1e-3 < want < mean
    torch.testing.assert_close(loss_of(layer, x, **more), mean.detach(), rtol=1e-9, atol=1e-12)

    names, parameters = zip(*layer.named_parameters(), strict=True)
    wanted = dict(zip(names, torch.autograd.grad(want, parameters, allow_unused=True), strict=True))
    trained = {name for name, grad in wanted.items() if grad is not None and grad.abs().max() > 0}
    assert trained
    assert all(name.startswith(("w_k", "phi_k") if layer.kv == "per_branch" else "phi_k") for name in trained)
    got = gradients(layer, x, **more)
    for name, parameter in layer.named_parameters():
        want_grad = wanted[name] if name in trained else torch.zeros_like(parameter)
        torch.testing.assert_close(got[name], want_grad, rtol=1e-6, atol=1e-9)


def gradients(layer: NSAAttention, x_BSD: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    """Gradients of the selector loss alone: with it minus without it."""
    passes = []
    for weight in (1.0, 0.0):
        layer.selector_loss = layer.selector_weight = weight
        layer.zero_grad(set_to_none=False)
        layer(x_BSD, **options).square().sum().backward()
        grads = {name: p.grad for name, p in layer.named_parameters()}
        passes.append({name: torch.zeros(()) if grad is None else grad.clone() for name, grad in grads.items()})
    layer.selector_loss = layer.selector_weight = 1.0
    return {name: passes[0][name] - passes[1][name] for name in passes[0]}


def test_every_block_counts_not_only_the_chosen():
    """Keys of a block that is never chosen change the loss."""
    layer = layer_of(phi="softmax", selector_loss_share=1.0)
    x = torch.randn(1, 200, layer.dim, dtype=torch.float64)
    seen = {}
    for blocks in SELECTOR_BLOCKS:
        layer.strategy.loss_blocks = blocks
        seen[blocks] = loss_of(layer, x)
    assert seen["chosen"] != seen["all"]


def test_a_row_too_short_for_two_blocks_has_no_loss():
    layer = layer_of(phi="softmax")
    for length in (1, layer.geometry.l_sel - 1, layer.geometry.w + layer.geometry.l_sel):
        x = torch.randn(2, length, layer.dim, dtype=torch.float64)
        assert loss_of(layer, x) == 0
        layer.zero_grad()
        layer(x).sum().backward()
        assert all(p.grad is None or p.grad.abs().max() == 0 for p in layer.phi_k.parameters())


def test_an_unknown_value_is_refused():
    with pytest.raises(ConfigError, match="selector_blocks"):
        layer_of(selector_blocks="some", phi="softmax")


def test_bf16_under_autocast_is_close_to_fp32():
    layer = layer_of(phi="softmax").float()
    x = torch.randn(2, 150, layer.dim)
    want = loss_of(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        got = loss_of(layer, x)
        layer(x).float().square().sum().backward()
    assert got.dtype == torch.float32
    assert got == pytest.approx(want.item(), rel=0.25)
    assert layer.phi_k.w_score.grad.isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_graph_breaks(packed):
    torch._dynamo.reset()
    layer = layer_of(phi="softmax").float()
    x = torch.randn(2, 90, layer.dim)
    options = dict(cu_doc_lens=torch.tensor([0, 50, 180], dtype=torch.int32)) if packed else {}
    gradients_seen = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        run(x, **options).square().sum().backward()
        gradients_seen.append(layer.phi_k.w_score.grad.clone())
    assert gradients_seen[0].abs().max() > 0
    torch.testing.assert_close(gradients_seen[0], gradients_seen[1], atol=1e-6, rtol=1e-4)


def test_the_operator_keeps_torchs_contract():
    layer, seen = layer_of(phi="softmax"), []
    original = module_under_test._differentiable_divergence
    module_under_test._differentiable_divergence = lambda *arguments: seen.append(arguments) or original(*arguments)
    try:
        layer(torch.randn(2, 60, layer.dim, dtype=torch.float64))
    finally:
        module_under_test._differentiable_divergence = original
    (arguments,) = seen
    arguments = tuple(
        x.detach().requires_grad_(i == 0) if isinstance(x, torch.Tensor) else x for i, x in enumerate(arguments)
    )
    opcheck(
        module_under_test._divergence,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
