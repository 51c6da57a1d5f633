"""Layers of kind `merged`: dense attention as far as blocks and window reach, and the oracle's attention beyond."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nsa.core.layer_kinds import merge
from nsa.core.model_layers import layer_of_kind
from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import Probe, probing
from nsa.core.selection_quality import SelectionProbe
from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels import reference
from nsa.kernels.cpu import CpuDecoder
from nsa.kernels.portable import chunk
from nsa.kernels.registry import BACKENDS, BackendRequest
from tests.backends import RUN_HERE
from tests.oracle import merged_layer
from tests.shapes import attention_args, fp64_backends

DIM = 24
SIZES = dict(n_heads=4, n_kv_groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=8, n_sel=4, w=12)
COVERED = 4 * 8 + 12


def layer(dtype=torch.float64, seed=1, **changes) -> NSAAttention:
    torch.manual_seed(seed)
    module = NSAAttention(DIM, **{**SIZES, **changes}, kind="merged").to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def inputs(batch=2, length=COVERED, dtype=torch.float64, seed=2):
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(module, x):
    """The module's own projections around PyTorch's causal attention."""
    q, streams = module.project(x, module.locate(x).tables)
    heads = module.n_heads // module.n_kv_groups
    k, v = (each.transpose(1, 2).repeat_interleave(heads, 1) for each in (streams.k_sel, streams.v_sel))
    out = F.scaled_dot_product_attention(q.flatten(2, 3).transpose(1, 2), k, v, is_causal=True, scale=module.scale)
    return module.w_out(out.transpose(1, 2).flatten(2))


def oracle(module, x_SD):
    weights = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    g = module.geometry
    sizes = dict(n_heads=module.n_heads, n_kv_groups=module.n_kv_groups, d_k=module.d_k, d_v=module.d_v, **vars(g))
    coarse = {} if module.coarse is None else dict(coarse_block=module.coarse.entries, n_coarse=module.coarse.n_blocks)
    return merged_layer(x_SD.detach().numpy(), weights, **sizes, **coarse, rope_compressed=module.rope_compressed)


DTYPES = {name: torch.float64 if name in fp64_backends() else torch.float32 for name in RUN_HERE}


@pytest.mark.parametrize(("backend", "dtype"), DTYPES.items())
@pytest.mark.parametrize("changes", [{}, dict(phi="avg", kv="per_branch"), dict(qk_norm=True, bias=True, phi="mlp")])
def test_is_dense_attention_up_to_the_covered_length(backend, dtype, changes):
    module, x = layer(dtype, kernels=backend, **changes), inputs(dtype=dtype).requires_grad_()
    got, want = module(x), dense(module, x)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    parameters = [p for name, p in module.named_parameters() if not name.startswith("phi_k")]
    mine, theirs = (torch.autograd.grad(out.square().sum(), [x, *parameters]) for out in (got, want))
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("backend", ["reference", "portable", "cpu"])
def test_the_first_inexact_position_is_the_covered_length(backend):
    module, x = layer(torch.float32, kernels=backend), inputs(length=COVERED + 4, dtype=torch.float32)
    wrong_S = (module(x) - dense(module, x)).abs().amax((0, 2)) > 1e-5
    assert wrong_S.nonzero()[0].item() == COVERED
    assert wrong_S[COVERED:].all()


def test_on_a_device_whose_values_the_host_does_not_read(monkeypatch):
    """Runs the portable kernels as on a GPU, at lengths where no query, and where some, have blocks to choose from."""
    module, exact = layer(kernels="portable"), layer(kernels="reference")
    monkeypatch.setattr(chunk, "READABLE_DEVICES", ())
    for length in (5, 90):
        x = inputs(length=length).requires_grad_()
        got, want = module(x), exact(x)
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)
        mine, theirs = (torch.autograd.grad(out.square().sum(), x)[0] for out in (got, want))
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(module(x, cache=module.new_cache(2, length)), want, atol=1e-10, rtol=1e-10)


def test_packed_documents_are_dense_attention_each():
    module, x = layer(), inputs(2)
    cu = [0, 3, 40, 41, 2 * COVERED]
    packed = module(x, cu_doc_lens=cu).flatten(0, 1)
    alone = torch.cat([dense(module, x.flatten(0, 1)[None, a:b])[0] for a, b in pairwise(cu)])
    torch.testing.assert_close(packed[:41], alone[:41], atol=1e-10, rtol=1e-10)
    longest = module(x.flatten(0, 1)[None, 41:])
    torch.testing.assert_close(packed[41:], longest[0], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("phi", ["avg", "softmax"])
@pytest.mark.parametrize(("backend", "dtype"), [("portable", torch.float64), ("auto", torch.float32)])
@pytest.mark.parametrize("length", [COVERED, 131])
def test_cached_chunks_and_single_tokens_equal_one_pass(length, backend, dtype, phi):
    module, x = layer(dtype, kernels=backend, phi=phi), inputs(2, length, dtype)
    whole = module(x)
    if length == COVERED:
        torch.testing.assert_close(whole, dense(module, x), atol=1e-5, rtol=1e-5)
    for steps in ([1] * length, [20, 1, 7, *[1] * 6, length - 34], [length]):
        cache = module.new_cache(2, length)
        got = torch.cat([module(part, cache=cache) for part in x.split(steps, 1)], 1)
        torch.testing.assert_close(got, whole, atol=1e-5, rtol=1e-5)


def test_cached_rows_of_different_lengths_reordered_cropped_and_grown():
    module, x = layer(), inputs(2, 100)
    cache = module.new_cache(2, 100, rewind=10)
    first = module(x[:, :70], cache=cache, new_lens_B=torch.tensor([70, 33]))
    torch.testing.assert_close(first[1, :33], module(x[1:, :33])[0], atol=1e-10, rtol=1e-10)
    more = module(torch.stack([x[0, 70:75], x[1, 33:38]]), cache=cache)
    torch.testing.assert_close(more[1], module(x[1:, :38])[0, 33:], atol=1e-10, rtol=1e-10)
    cache.crop([69, 38])
    cache.reorder([1, 0])
    got = module(torch.stack([x[1, 38:39], x[0, 69:70]]), cache=cache)
    torch.testing.assert_close(got[1], module(x[:1, :70])[0, 69:], atol=1e-10, rtol=1e-10)
    longer = cache.grown(200).picked([1])
    got = module(x[:1, 70:], cache=longer)
    torch.testing.assert_close(got, module(x[:1])[:, 70:], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (1, {}),
        (9, dict(phi="avg")),
        (3, dict(l=16, d=8, l_sel=32, n_sel=20, w=300, n_heads=6, d_k=32, d_v=16)),  # several pieces of keys
        (2, dict(l=24, d=4, l_sel=8, n_sel=5, w=7, phi="avg")),
    ],
)
def test_the_fused_decoder_gives_what_the_four_functions_give(rows, changes, dtype, monkeypatch):
    torch.manual_seed(0)
    fused, plain = (NSAAttention(DIM, **{**SIZES, **changes}, kind="merged", init_std=0.3).to(dtype) for _ in range(2))
    monkeypatch.setattr(plain.strategy, "decodes", None)
    plain.load_state_dict(fused.state_dict())
    capacity = 5 * fused.geometry.w + 12 * 8 * rows
    caches = [each.new_cache(rows, capacity) for each in (fused, plain)]
    lengths = torch.arange(rows) * (capacity - 40) // rows + 1
    prompt = inputs(rows, int(lengths.max()), dtype)
    for each, cache in zip((fused, plain), caches, strict=True):
        each(prompt, cache=cache, new_lens_B=lengths)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for step, x in enumerate(inputs(rows, 35, dtype, seed=3).split(1, 1)):
        with probing(fused, _BlockProbe) as of_fused, probing(plain, _BlockProbe) as of_plain:
            got, want = fused(x, cache=caches[0]), plain(x, cache=caches[1])
        (mine,), (theirs,) = of_fused.values(), of_plain.values()
        assert torch.equal(mine.blocks, theirs.blocks), step
        assert int(mine.figures["reads_act_total"]) == int(theirs.figures["reads_act_total"])
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    assert isinstance(caches[0].prepared[1], CpuDecoder)
    assert caches[1].prepared[1] is None
    torch.testing.assert_close(caches[0].n_compressed_B, caches[1].n_compressed_B)


class _BlockProbe(Probe):
    def record(self, gates, gate_kind, idx_BSGN, *more):
        super().record(gates, gate_kind, idx_BSGN, *more)
        self.blocks = idx_BSGN.clone()


def test_a_decoder_of_the_other_kind_is_refused():
    module = layer(torch.float32)
    cache = module.new_cache(1, 64)
    module(inputs(1, 1, torch.float32), cache=cache)
    with pytest.raises(ConfigError, match="merged"):
        cache.prepared[1].attend(torch.randn(1, 1, 2, 2, 8), torch.rand(1, 1, 2, 2, 3))


@pytest.mark.parametrize("backend", fp64_backends())
@pytest.mark.parametrize(
    ("length", "args"),
    [
        (110, attention_args("tiny")),
        (77, attention_args("no_overlap")),
        (90, attention_args("long_blocks", phi="mlp", qk_norm=True, bias=True)),
        (90, attention_args("tiny", (5, 1), phi="softmax")),
        (90, attention_args("tiny", phi="weighted", coarse_block=4, n_coarse=3)),
        (13, attention_args("tiny")),
        (1, attention_args("tiny")),
    ],
)
def test_equals_the_oracle(backend, length, args):
    options = {name: value for name, value in args.items() if name != "dim"}
    module, x = layer(kernels=backend, **options), inputs(1, length)
    np.testing.assert_allclose(module(x)[0].detach().numpy(), oracle(module, x[0]), atol=1e-10)


@pytest.mark.parametrize("backend", ["portable", "cpu"])
def test_gradients_are_those_of_one_softmax_over_what_is_read(backend):
    """Against fp64 autograd through a mask of the blocks that the layer chose and the window."""
    dtype = torch.float32 if backend == "cpu" else torch.float64
    module, x = layer(dtype, kernels=backend), inputs(1, 90, dtype).requires_grad_()
    exact = layer().double()
    exact.load_state_dict(module.state_dict())
    x64 = x.detach().double().requires_grad_()
    with probing(module, lambda: SelectionProbe(keep=range(90))) as probes:
        out = module(x)
    (idx_SGN,) = (probe.chosen_BQGN[0].long() for probe in probes.values())
    q, streams = exact.project(x64, exact.locate(x64).tables)
    at = torch.arange(90)
    near = (at <= at[:, None]) & (at > at[:, None] - 12)
    chosen_SGT = ((at // 8)[None, None, None] == idx_SGN[..., None]).any(2) & (at <= at[:, None] - 12)[:, None]
    assert not (chosen_SGT & near[:, None]).any()
    scores = torch.einsum("bsgrk,btgk->bsgrt", q, streams.k_sel) * exact.scale
    scores = scores.masked_fill(~(chosen_SGT | near[:, None])[None, :, :, None], -torch.inf)
    want = exact.w_out(torch.einsum("bsgrt,btgv->bsgrv", scores.softmax(-1), streams.v_sel).flatten(2))
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    names = [name for name, _ in module.named_parameters() if not name.startswith("phi_k")]
    weight = torch.randn(90, DIM, dtype=torch.float64)
    mine = torch.autograd.grad((out * weight).sum(), [x, *(module.get_parameter(n) for n in names)])
    theirs = torch.autograd.grad((want * weight).sum(), [x64, *(exact.get_parameter(n) for n in names)])
    for name, own, other in zip(["x", *names], mine, theirs, strict=True):
        torch.testing.assert_close(own.double(), other, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("backend", ["portable", "cpu"])
def test_in_bf16_it_is_as_near_to_dense_attention_as_pytorchs(backend):
    x, exact = inputs(2, dtype=torch.bfloat16), layer(torch.bfloat16).double()
    want = dense(exact, x.double())
    module = layer(torch.bfloat16, kernels=backend)
    own, theirs = ((out.double() - want).abs().max() for out in (module(x), dense(module, x)))
    assert own <= 2 * theirs
    module(x.requires_grad_()).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("backend", RUN_HERE)
def test_queries_before_the_document_choose_and_read_nothing(backend):
    """Positions of queries so early that nothing lies before their window, alone in a batch and among others."""
    run, g = BACKENDS[backend].functions, Geometry(4, 2, 4, 3, 5)
    q, k_cmp, k = (torch.randn(1, n, 1, *more, generator=torch.Generator().manual_seed(0)) for n, *more in
                   ((12, 2, 16), (20, 16), (40, 16)))  # fmt: skip
    for pos in ([-1] * 12, [-7] * 12, [-1] * 6 + [*range(6)], [-2, -1, *range(20, 30)]):
        pos_BS = torch.tensor([pos])
        start_BS, options = torch.zeros_like(pos_BS), dict(geometry=g, scale=0.25)
        idx = run.select(q, k_cmp, pos_BS, start_BS, **options)
        assert torch.equal(idx, reference.select_blocks(q, k_cmp, pos_BS, start_BS, **options))
        early = pos_BS < 0
        assert (idx[early] == -1).all()
        out, lse = run.selected(q, k, k, idx, pos_BS, start_BS, **options, return_lse=True)
        assert (lse[early] == -torch.inf).all()
        assert (out[early] == 0).all()
        assert (lse[~early] > -torch.inf).all()


def test_merging_with_nothing_changes_nothing():
    one, other = torch.randn(2, 1, 3, 1, 1, 4, requires_grad=True).unbind(0)
    lse = torch.tensor([-torch.inf, 0.5, -torch.inf]).view(1, 3, 1, 1).requires_grad_()
    lse_other = torch.tensor([0.5, -torch.inf, -torch.inf]).view(1, 3, 1, 1)
    merged = merge(one, lse, other, lse_other)
    assert torch.equal(merged[0, 0], other[0, 0])
    assert torch.equal(merged[0, 1], one[0, 1])
    assert torch.autograd.grad(merged[0, :2].sum(), lse)[0].isfinite().all()


def test_parameters():
    module = layer(kv="per_branch", phi="mlp", qk_norm=True)
    assert {name.split(".")[0] for name, _ in module.named_parameters()} == {
        "w_q", "w_k", "w_v", "q_norm", "k_norm", "phi_k", "w_out"
    }  # fmt: skip
    assert (module.w_k.out_features, module.w_v.out_features) == (2 * 8, 2 * 6)
    assert module.gates is None
    whole = NSAAttention(DIM, **SIZES, kv="per_branch", phi="mlp")
    part = layer_of_kind("merged", whole)
    assert torch.equal(part.w_k.weight.view(2, 8, DIM), whole.w_k.weight.view(2, 3, 8, DIM)[:, 1])
    assert torch.equal(part.phi_k.w_in, whole.phi_k.w_in)


def test_the_cache_holds_no_compressed_values():
    module = layer(torch.float32, phi="avg")
    cache = module.new_cache(1, 64)
    pages = cache.page_table.n_stored
    assert cache.n_bytes() == 4 * 2 * pages * (8 * (8 + 6) + 2 * 8)
    with pytest.raises(ConfigError, match="new_cache"):
        NSAAttention(DIM, **SIZES, kv="shared", phi="avg")(inputs(1, 4, torch.float32), cache=cache)


def test_flops_and_probes_count_the_keys_that_are_read():
    module, length = layer(kernels=BackendRequest(*["portable"] * 4)), 120
    g, x = module.geometry, inputs(2, length)
    with probing(module) as probes:
        module(x)
    (figures,) = (probe.figures for probe in probes.values())
    far = g.total_reads(length - 12)
    want = far["selected"] + far["compressed"] + g.total_reads(length)["sliding"]
    assert int(figures["reads_pred"]) == int(figures["reads_act_total"]) == 2 * want
    assert sum(g.total_merged_reads(length).values()) == want
    assert "gate_entropy_mean" not in figures
    assert figures["sel_k_max"] == 4 * 8
    flops, per_read = module.flops(length), 2 * 4 * (8 + 6)
    assert flops["selected"] == pytest.approx(per_read * far["selected"] / length)
    assert flops["sliding"] == pytest.approx(per_read * g.total_reads(length)["sliding"] / length)
    assert flops["select"] == pytest.approx(2 * 4 * 8 * far["compressed"] / length)
    assert flops["compressed"] == 0
    with probing(module) as probes:
        module(x[:, :9], cache=module.new_cache(2, 64))
    (figures,) = (probe.figures for probe in probes.values())
    assert int(figures["reads_pred"]) == int(figures["reads_act_total"]) == 2 * 45


def test_selection_statistics_are_of_the_tokens_before_the_window():
    module, x = layer(n_sel=3), inputs(1, 90)
    with probing(module, lambda: SelectionProbe(every=1)) as probes:
        module(x)
    (counts,) = (probe.counts for probe in probes.values())
    # Three blocks are always chosen, so that no other can be hit; queries with four blocks or more before the window.
    assert counts.queries == 2 * (90 - 12 - 3 * 8)
    assert counts.hits == counts.expected_hits == 0
    assert 0 < counts.mass_caught < counts.queries


@pytest.mark.parametrize("coarse", [{}, dict(coarse_block=4, n_coarse=4)])
def test_the_selector_loss_trains_phi_alone_and_lowers_its_divergence(coarse):
    module, x = layer(phi="linear", selector_loss=1.0, selector_loss_share=1.0, **coarse), inputs(2, 120)
    without = layer(phi="linear", **coarse)
    module.train()
    grads = []
    for each in (module, without):
        out = each(x)
        out.square().sum().backward()
        grads.append({name: p.grad for name, p in each.named_parameters()})
    for name, grad in grads[0].items():
        if name.startswith("phi_k"):
            assert grads[1][name] is None
            assert grad.abs().max() > 0
        else:
            assert torch.equal(grad, grads[1][name])

    def loss():
        with probing(module) as probes:
            module(x).sum().backward()
        return next(iter(probes.values())).figures["selector_loss"].item()

    optimizer = torch.optim.SGD(module.phi_k.parameters(), lr=0.05)
    before = loss()
    for _ in range(5):
        module.zero_grad()
        loss()
        optimizer.step()
    assert loss() < before


def test_phi_without_weights_has_no_selector_loss():
    assert layer(phi="avg", kv="per_branch", selector_loss=1.0).selector_loss == 0


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_graph_breaks(packed):
    torch._dynamo.reset()
    module = layer(torch.float32, selector_loss=1.0).train()
    options = dict(cu_doc_lens=torch.tensor([0, 50, 180], dtype=torch.int32)) if packed else {}
    mine, theirs = (inputs(2, 90, torch.float32).requires_grad_() for _ in range(2))
    torch.compile(module, fullgraph=True, backend="aot_eager")(mine, **options).square().sum().backward()
    of_phi = [p.grad.clone() for p in module.phi_k.parameters()]
    module.zero_grad()
    module(theirs, **options).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(of_phi, [p.grad for p in module.phi_k.parameters()], atol=1e-5, rtol=1e-4)


def test_the_future_changes_nothing():
    module, x = layer(), inputs(1, 100)
    poisoned = x.clone()
    poisoned[:, 80:] = 1e4
    assert torch.equal(module(x)[:, :80], module(poisoned)[:, :80])


def test_padding_changes_nothing():
    module, x = layer(), inputs(2, 100)
    mask = torch.ones(2, 100, dtype=torch.int64)
    mask[0, :40] = 0
    got = module(x, attention_mask=mask)
    torch.testing.assert_close(got[0, 40:], module(x[:1, 40:])[0], atol=1e-12, rtol=1e-12)
