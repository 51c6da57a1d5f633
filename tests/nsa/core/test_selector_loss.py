"""Selector loss: value and gradient against a dense fp64 computation, what it trains, and what it leaves alone."""

from functools import partial

import pytest
import torch
from torch.library import opcheck

from nsa.core import selector_loss as module_under_test
from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import probing
from nsa.core.selector_loss_sampling import _sampled_queries, attach_loss, set_sampling_step
from nsa.kernels import reference
from nsa.kernels.registry import BackendRequest
from nsa.model.transformer import NSATransformer
from tests.backends import RUN_HERE
from tests.shapes import attention_args, fp64_backends

CU_DOC_LENS = [0, 37, 41, 150, 200]
CASES = [
    ("tiny", dict()), ("tiny", dict(phi="mlp", phi_pos_emb=True)), ("tiny", dict(kv="shared_keys", phi="weighted")),
    ("tiny", dict(kv="shared", phi="linear", qk_norm=True, bias=True)), ("tiny", dict(kv="shared", phi="softmax")),
    ("long_blocks", dict(phi="linear")), ("no_overlap", dict(selector_loss_share=1.0)),
]  # fmt: skip


def layer_of(shape: str = "tiny", seed: int = 0, backend: str = "reference", **options) -> NSAAttention:
    torch.manual_seed(seed)
    args = attention_args(shape, **{"selector_loss": 1.0, **options})
    layer = NSAAttention(**args, kernels=BackendRequest(*[backend] * 4)).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(std=0.15 if name.startswith("phi") else 0.4)  # no score so large that others vanish
    return layer


def dense_loss(layer: NSAAttention, x_BSD: torch.Tensor, cu_doc_lens=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean over the queries with blocks to compare, and over all sampled ones, of which the others add nothing.

    Everything materialised: all scores of all queries over all keys, in fp64, query by query and group by group.
    """
    g, scale = layer.geometry, layer.scale
    where = layer.locate(x_BSD, cu_doc_lens=cu_doc_lens)
    x_BSD = x_BSD if cu_doc_lens is None else x_BSD.flatten(0, 1)[None]
    with torch.no_grad():
        q, streams = layer.project(x_BSD, where.tables)
        compressed, selected, _ = layer._lay_out(streams, where.layout, where)
        blocks = reference.select_blocks(
            q, compressed.k, compressed.pos_BS, compressed.start_BS, geometry=g, scale=scale
        )
    with torch.set_grad_enabled(layer.kv == "per_branch"):
        _, again = layer.project(x_BSD.detach(), where.tables)
    k_cmp = layer._lay_out(again, where.layout, where)[0].k
    terms = []
    for b in range(len(x_BSD)):
        for s in where.sample.queries_Q.tolist():
            pos, start, first = (int(t[b, s]) for t in (selected.pos_BS, selected.start_BS, compressed.start_BS))
            for group in range(layer.n_kv_groups):
                chosen = [j for j in blocks[b, s, group].tolist() if j >= 0]
                tokens = [t for j in chosen for t in range(j * g.l_sel, (j + 1) * g.l_sel) if t <= pos]
                read = (q[b, s, group] @ selected.k[b, [start + t for t in tokens], group].T * scale).softmax(-1).sum(0)
                entries = range(g.n_compressed(pos + 1))
                scores = q[b, s, group] @ k_cmp[b, [first + c for c in entries], group].T * scale
                p = (scores - scores.detach().logsumexp(-1, keepdim=True)).exp().sum(0)
                overlap = reference.overlap(len(entries), pos // g.l_sel + 1, g)
                mass = p @ overlap.to(p)
                compared = [j for j in chosen if (j + 1) * g.l_sel <= pos + 1 and overlap[:, j].any()]
                if len(compared) < 2:
                    continue
                target = torch.stack([read[[t // g.l_sel == j for t in tokens]].sum() for j in compared])
                target, own = target / target.sum(), mass[compared] / mass[compared].sum()
                terms.append((target * (target.log() - own.log())).sum())
    total = torch.stack(terms)
    return total.mean(), total.sum() / (layer.n_kv_groups * len(x_BSD) * len(where.sample.queries_Q))


def loss_of(layer: NSAAttention, x_BSD: torch.Tensor, **options) -> torch.Tensor:
    with probing(layer) as probes:
        layer(x_BSD, **options)
    return probes[""].figures["selector_loss"]


def gradients(layer: NSAAttention, x_BSD: torch.Tensor, **options) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Gradients of the selector loss alone: with it minus without it."""
    passes = []
    for weight in (1.0, 0.0):
        layer.selector_loss = layer.selector_weight = weight
        x = x_BSD.clone().requires_grad_()
        layer.zero_grad()
        layer(x, **options).square().sum().backward()
        passes.append(({name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}, x.grad))
    layer.selector_loss = layer.selector_weight = 1.0
    (with_it, dx), (without, dx_without) = passes
    return {name: with_it[name] - without[name] for name in with_it}, dx - dx_without


@pytest.mark.parametrize("backend", fp64_backends())
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(("shape", "options"), CASES, ids=str)
def test_value_and_gradient_equal_those_of_dense_scores(backend, packed, options, shape, monkeypatch):
    monkeypatch.setattr(module_under_test, "budget", lambda x: 30_000)  # several chunks, the last one shorter
    layer = layer_of(shape, backend=backend, **options)
    x = torch.randn(1 if packed else 2, 200, layer.dim, dtype=torch.float64)
    more = dict(cu_doc_lens=CU_DOC_LENS) if packed else {}
    mean, want = dense_loss(layer, x, **more)
    assert 1e-3 < want < mean
    torch.testing.assert_close(loss_of(layer, x, **more), mean.detach(), rtol=1e-9, atol=1e-12)

    names, parameters = zip(*layer.named_parameters(), strict=True)
    wanted = dict(zip(names, torch.autograd.grad(want, parameters, allow_unused=True), strict=True))
    got, dx = gradients(layer, x, **more)
    assert dx.abs().max() < 1e-9
    trained = {name for name, grad in wanted.items() if grad is not None and grad.abs().max() > 0}
    may_train = ("w_k", "k_norm", "phi_k") if layer.kv == "per_branch" else ("phi_k",)
    assert any(name.startswith(may_train[0]) for name in trained)
    assert trained <= {name for name in names if name.startswith(may_train)}
    for name, grad in got.items():
        torch.testing.assert_close(
            grad, wanted[name] if name in trained else torch.zeros_like(grad), rtol=1e-6, atol=1e-9
        )


def test_own_keys_of_the_other_branches_get_no_gradient():
    layer = layer_of()
    got, _ = gradients(layer, torch.randn(2, 120, layer.dim, dtype=torch.float64))
    of_branch = got["w_k.weight"].unflatten(0, (layer.n_kv_groups, 3, layer.d_k)).abs().amax((0, 2, 3))
    assert of_branch[0] > 1e-3
    assert of_branch[1:].max() < 1e-9


def test_the_output_is_unchanged():
    layer = layer_of()
    x = torch.randn(2, 100, layer.dim, dtype=torch.float64)
    out = layer(x)
    layer.selector_loss = 0.0
    assert torch.equal(out, layer(x))


def test_equal_masses_cost_nothing_and_short_rows_have_no_loss():
    layer = layer_of()
    assert loss_of(layer, torch.randn(2, 9, layer.dim, dtype=torch.float64)) == 0
    assert loss_of(layer, torch.zeros(2, 90, layer.dim, dtype=torch.float64)) == pytest.approx(0, abs=0.2)
    with torch.no_grad():
        layer.w_q.weight.zero_()
    # Without queries all keys weigh the same: complete blocks are read alike, and entries overlap them alike inside.
    assert loss_of(layer, torch.randn(2, 90, layer.dim, dtype=torch.float64)) < 0.2


@pytest.mark.parametrize("off", ["weight", "eval", "no_grad", "cache", "padding"])
def test_no_loss_where_nothing_is_trained(off, monkeypatch):
    layer = layer_of(selector_loss=0.0 if off == "weight" else 1.0)
    monkeypatch.setattr("nsa.core.layer_kinds.selector_loss_of_queries", lambda *a, **b: pytest.fail("computed"))
    x = torch.randn(1, 60, layer.dim, dtype=torch.float64)
    if off == "eval":
        layer.eval()
    with torch.set_grad_enabled(off != "no_grad"):
        if off == "padding":
            layer(x, attention_mask=torch.tensor([[0] * 3 + [1] * 57]))
        else:
            layer(x, cache=layer.new_cache(1, 64) if off == "cache" else None)


def test_layers_add_their_mean():
    torch.manual_seed(0)
    model = NSATransformer(50, n_layers=4, **attention_args("tiny", selector_loss=2.0))
    assert [block.attention.selector_weight for block in model.blocks] == [0.5] * 4
    tokens = torch.randint(50, (2, 100))
    model.loss(tokens, tokens).backward()
    assert all(block.attention.w_k.weight.grad is not None for block in model.blocks)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.3, 1.0])
def test_every_query_is_sampled_over_the_steps_evenly(share):
    n, counts = 128, torch.zeros(128)
    steps = round(60 / share)
    for step in range(steps):
        at = _sampled_queries(n, share, step, torch.device("cpu"))
        assert len(at) == max(1, round(share * n))
        assert len({i for i in at.tolist() if 0 <= i < n}) == len(at)
        counts[at] += 1
    assert counts.min() > 0.7 * counts.mean()
    assert counts.max() < 1.3 * counts.mean()
    assert torch.equal(
        _sampled_queries(n, share, 5, torch.device("cpu")), _sampled_queries(n, share, 5, torch.device("cpu"))
    )


def test_the_step_moves_the_sample():
    layer = layer_of()
    x = torch.randn(1, 90, layer.dim, dtype=torch.float64)
    losses = []
    for step in (0, 1, 0):
        set_sampling_step([layer], step)
        losses.append(loss_of(layer, x).item())
    assert losses[0] == losses[2] != losses[1]


def recomputed(forward, x: torch.Tensor, **options) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(partial(forward, **options), x, use_reentrant=True)


def phi_gradients(model: NSATransformer) -> list[torch.Tensor]:
    return [p.grad.clone() for name, p in model.named_parameters() if "phi_k" in name]


@pytest.mark.parametrize(
    "run", ["eager", "reentrant", "compiled blocks", pytest.param("compiled", marks=pytest.mark.nightly)]
)
def test_whatever_scales_the_loss_scales_the_selector_loss(run):
    """Four passes of a quarter each, as a plain training loop divides them; a gradient scaler's factor."""
    torch.manual_seed(0)
    options = attention_args("tiny", selector_loss=5.0, selector_loss_share=0.3, phi="softmax", kv="shared")
    model = NSATransformer(50, n_layers=2, **options, kernels="portable")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # scores that differ
    tokens, labels = torch.randint(50, (4, 100)), torch.randint(50, (4, 100))
    loss = torch.compile(model.loss, fullgraph=True, backend="aot_eager") if run == "compiled" else model.loss
    for block in model.blocks:
        if run == "reentrant":
            block.forward = partial(recomputed, block.forward)
        elif run == "compiled blocks":
            block.compile(backend="aot_eager")
    unscaled = []
    for passes, factor in ((1, 1.0), (4, 1.0), (1, 1024.0)):
        model.zero_grad()
        for some, theirs in zip(tokens.chunk(passes), labels.chunk(passes), strict=True):
            (loss(some, theirs) * (factor / passes)).backward()
        unscaled.append([grad / factor for grad in phi_gradients(model)])
    model.zero_grad()
    model.loss(tokens, labels.fill_(-100)).backward()
    assert all(grad.abs().max() == 0 for grad in phi_gradients(model))  # no label, no loss
    for want, *others in zip(*unscaled, strict=True):
        assert want.abs().max() > 1e-4
        for other in others:
            torch.testing.assert_close(other, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


def test_an_attached_loss_gets_gradient_one_whatever_follows():
    x, y = torch.randn(3, requires_grad=True), torch.randn((), requires_grad=True)
    attached = attach_loss(x * 1, 5 * y, torch.ones(()))
    assert torch.equal(attached, x)
    (attached * 7).sum().backward()
    assert x.grad.tolist() == [7] * 3
    assert y.grad == 5


@pytest.mark.parametrize("backend", [name for name in RUN_HERE if name not in fp64_backends()])
def test_other_backends_agree_with_the_reference_in_fp32(backend):
    layer, same = layer_of(backend=backend).float(), layer_of().float()
    x = torch.randn(2, 150, layer.dim)
    torch.testing.assert_close(loss_of(layer, x), loss_of(same, x), rtol=1e-4, atol=1e-6)


def test_bf16_under_autocast_is_close_to_fp32():
    layer = layer_of(backend="portable").float()
    x = torch.randn(2, 150, layer.dim)
    want = loss_of(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        got = loss_of(layer, x)
        layer(x).float().square().sum().backward()
    assert got.dtype == torch.float32
    assert got == pytest.approx(want.item(), rel=0.25)
    assert layer.w_k.weight.grad.isfinite().all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_gives_the_same_gradients(reentrant):
    layer = layer_of()
    x = torch.randn(2, 90, layer.dim, dtype=torch.float64, requires_grad=True)
    want, _ = gradients(layer, x.detach())
    results = []
    for recompute in (True, False):
        layer.zero_grad()
        out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
        out.square().sum().backward()
        results.append(layer.w_k.weight.grad.clone())
    assert want["w_k.weight"].abs().max() > 1e-3
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=0)


def test_compiles_without_graph_breaks():
    layer = layer_of(backend="portable").float()
    x = torch.randn(2, 90, layer.dim)
    where = layer.locate(x)
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        run(x, where=where).square().sum().backward()
        results.append(layer.w_k.weight.grad.clone())
    torch.testing.assert_close(results[0], results[1])


def test_the_operator_keeps_torchs_contract():
    layer = layer_of("tiny")
    seen = []
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
