"""Layers of other kinds than NSA: equal to PyTorch attention, packed as alone, cached as whole, equal start values."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from nsa.core import layer_kinds
from nsa.core.layer_kinds import LAYER_KINDS
from nsa.core.model_layers import _layer_parameters, layer_of_kind
from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import probing
from nsa.errors import ConfigError
from nsa.options import ATTENTION_KINDS
from tests.covering_cases import each_pair

SIZES = dict(n_heads=4, n_kv_groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=16, n_sel=4, w=24)
LENGTH, DIM = 96, 32
KINDS = ("dense", "window", "global")
OPTIONS = {
    "plain": dict(kv="per_branch", phi="avg"),
    "default": {},
    "options": dict(kv="per_branch", phi="avg", qk_norm=True, bias=True, out_bias=True, rope_scale=2.0),
    "shared": dict(kv="shared", phi="avg"),
    "mlp": dict(kv="per_branch", phi="mlp", gate="sigmoid", gate_per="group"),
}


def layer(kind, dtype=torch.float64, **changes):
    torch.manual_seed(1)
    module = NSAAttention(DIM, **{**SIZES, **changes}, kind=kind).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def inputs(batch=2, length=LENGTH, dtype=torch.float64):
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def masked_attention(module, x, visible_SS):
    """The module's own projections around PyTorch's attention with a mask."""
    q, streams = module.project(x, module.locate(x).tables)
    k, v = (each.transpose(1, 2).repeat_interleave(2, 1) for each in (streams.k_win, streams.v_win))
    out = F.scaled_dot_product_attention(q.flatten(2, 3).transpose(1, 2), k, v, attn_mask=visible_SS, scale=8**-0.5)
    return module.w_out(out.transpose(1, 2).flatten(2))


def visible(kind, length=LENGTH):
    age = torch.arange(length)[:, None] - torch.arange(length)
    return (age >= 0) & (age < (SIZES["w"] if kind == "window" else length))


def gradients(module, out, x):
    return torch.autograd.grad(out.square().sum(), [x, *module.parameters()])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kernels", ["auto", "reference", "portable"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
@pytest.mark.parametrize("kind", ["dense", "window"])
def test_outputs_and_gradients_are_those_of_masked_attention(kind, dtype, tolerance, kernels, options):
    module, x = layer(kind, dtype, kernels=kernels, **options), inputs(dtype=dtype).requires_grad_()
    want = masked_attention(module, x, visible(kind))
    got = module(x)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    for mine, theirs in zip(gradients(module, got, x), gradients(module, want, x), strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance * 30, rtol=tolerance * 30)


def test_pytorch_attention_and_the_sliding_kernel_give_the_same(monkeypatch):
    module, x = layer("dense", torch.float32), inputs(dtype=torch.float32)
    calls = []
    theirs = layer_kinds._torch_attention
    monkeypatch.setattr(layer_kinds, "_torch_attention", lambda *args: calls.append(1) or theirs(*args))
    own = module(x)
    assert not calls  # the compiled kernel is the faster one on a CPU
    monkeypatch.setattr(layer_kinds, "COMPILED_ON_CPU", "none")
    torch.testing.assert_close(module(x), own, atol=1e-5, rtol=1e-5)
    assert len(calls) == 1
    packed = module(x, cu_doc_lens=[0, 50, 2 * LENGTH])
    assert len(calls) == 1  # it knows no documents
    assert not torch.allclose(packed, own)


def test_a_dense_layer_through_named_kernels_never_calls_pytorchs(monkeypatch):
    monkeypatch.setattr(layer_kinds, "_torch_attention", None)
    layer("dense", kernels="portable")(inputs())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_global_is_nsa_without_the_gate_of_its_window(options):
    whole = layer("nsa", **{**options, "gate": "sigmoid"})
    x = inputs().requires_grad_()
    with torch.no_grad():
        whole.gates.proj.weight.unflatten(0, (-1, 3))[:, 2] = 0
        whole.gates.proj.bias.view(-1, 3)[:, 2] = -1e9
    part = layer_of_kind("global", whole)
    assert (part.kind, part.branches) == ("global", ("compressed", "selected"))
    got, want = part(x), whole(x)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    names = [name for name, _ in part.named_parameters()]
    mine = dict(zip(["x", *names], gradients(part, got, x), strict=True))
    of_whole = dict(zip(["x", *(n for n, _ in whole.named_parameters())], gradients(whole, want, x), strict=True))
    torch.testing.assert_close(mine["x"], of_whole["x"], atol=1e-10, rtol=1e-10)
    theirs = _layer_parameters(part, of_whole)
    for name in names:
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-9, rtol=1e-9)


def test_softmax_gates_of_a_global_layer_sum_to_one_over_two_branches():
    gates = layer("global").gates(inputs())
    assert gates.shape[-1] == 3
    assert (gates[..., 2] == 0).all()
    torch.testing.assert_close(gates.sum(-1), torch.ones_like(gates[..., 0]))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_separate_ones(kind):
    module, x = layer(kind), inputs(2)
    cu = [0, 3, 40, 41, 130, 2 * LENGTH]
    packed = module(x, cu_doc_lens=cu).flatten(0, 1)
    flat = x.flatten(0, 1)
    alone = torch.cat([module(flat[None, a:b])[0] for a, b in pairwise(cu)])
    torch.testing.assert_close(packed, alone, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind):
    module, x = layer(kind), inputs(2)
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :40] = 0
    got = module(x, attention_mask=mask)
    torch.testing.assert_close(got[0, 40:], module(x[:1, 40:])[0], atol=1e-12, rtol=1e-12)
    assert (got[0, :40] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_future_changes_nothing(kind):
    module, x = layer(kind), inputs(1)
    poisoned = x.clone()
    poisoned[:, 60:] = 1e4
    assert torch.equal(module(x)[:, :60], module(poisoned)[:, :60])


@pytest.mark.parametrize("kernels", ["auto", "portable"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_cached_chunks_and_single_tokens_equal_one_pass(kind, options, kernels):
    module, x = layer(kind, torch.float32, kernels=kernels, **options), inputs(2, dtype=torch.float32)
    cache, parts, at = module.new_cache(2, LENGTH), [], 0
    for n_new in (1, 30, 1, 1, 5, *[1] * 40, LENGTH - 78):
        parts.append(module(x[:, at : at + n_new], cache=cache))
        at += n_new
    torch.testing.assert_close(torch.cat(parts, 1), module(x), atol=2e-4, rtol=2e-4)
    assert cache.length_B.tolist() == [LENGTH, LENGTH]


@pytest.mark.parametrize("kind", KINDS)
def test_cached_rows_of_different_lengths(kind):
    module, x = layer(kind), inputs(2)
    cache = module.new_cache(2, LENGTH)
    first = module(x[:, :40], cache=cache, new_lens_B=torch.tensor([40, 13]))
    torch.testing.assert_close(first[1, :13], module(x[1:, :13])[0], atol=1e-10, rtol=1e-10)
    rows = torch.stack([x[0, 40:50], x[1, 13:23]])
    more = module(rows, cache=cache)
    torch.testing.assert_close(more[0], module(x[:1, :50])[0, 40:], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(more[1], module(x[1:, :23])[0, 13:], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_cropped_reordered_grown_and_picked_caches_continue(kind):
    module, x = layer(kind), inputs(2)
    cache = module.new_cache(2, LENGTH, rewind=10)
    module(x[:, :70], cache=cache)
    cache.crop(62)
    torch.testing.assert_close(module(x[:, 62:80], cache=cache), module(x[:, :80])[:, 62:], atol=1e-10, rtol=1e-10)
    cache.reorder([1, 0])
    swapped = x.flip(0)
    got = module(swapped[:, 80:81], cache=cache)
    torch.testing.assert_close(got, module(swapped[:, :81])[:, 80:], atol=1e-10, rtol=1e-10)
    longer = cache.grown(2 * LENGTH).picked([1])
    assert type(longer) is type(cache)
    more = inputs(1, 2 * LENGTH)[:, LENGTH:]
    got = module(more, cache=longer)
    want = module(torch.cat([x[:1, :81], more], 1))[:, 81:]
    torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)


def test_cache_sizes():
    """dense: all keys; window: a ring of w; global: as NSA without the window."""
    n_bytes = {kind: layer(kind, kv="per_branch").new_cache(1, 64 * 16).n_bytes() for kind in ("nsa", *KINDS)}
    slot = 2 * (8 + 6) * 8  # groups · (K + V) · fp64
    pages = layer("dense").new_cache(1, 64 * 16).page_table.n_stored  # 64, and spare ones
    assert 64 < pages <= 66
    assert n_bytes["dense"] == pages * SIZES["l_sel"] * slot
    assert n_bytes["window"] == (24 + 1) * slot
    assert n_bytes["nsa"] - n_bytes["global"] == n_bytes["window"]


def test_a_cache_of_another_kind_is_refused():
    for mine in ("nsa", *KINDS):
        for theirs in ("nsa", *KINDS):
            if mine != theirs:
                cache = layer(theirs, kv="shared").new_cache(2, LENGTH)
                if {mine, theirs} == {"nsa", "global"}:
                    continue  # with shared keys and values the same streams
                with pytest.raises(ConfigError, match="new_cache"):
                    layer(mine, kv="shared")(inputs(), cache=cache)


@pytest.mark.parametrize(("kind", "branches"), [("dense", 1), ("window", 1), ("global", 2)])
def test_parameters_are_a_part_of_those_of_an_nsa_layer(kind, branches):
    options = {"kv": "per_branch", "phi": "mlp", "qk_norm": True, "bias": True}
    whole = layer("nsa", **options)
    part = layer_of_kind(kind, whole)
    of_whole, mine = dict(whole.named_parameters()), dict(part.named_parameters())
    for name in ("w_q.weight", "w_q.bias", "w_out.weight", "q_norm.weight", "k_norm.weight"):
        assert torch.equal(mine[name], of_whole[name])
    assert part.w_k.out_features == 2 * 8 * branches
    assert (part.gates is not None) == (kind == "global") == any(name.startswith("phi") for name in mine)
    k_whole, k_mine = (m.w_k.weight.view(2, -1, 8, DIM) for m in (whole, part))
    own = [0, 1] if kind == "global" else [2]
    assert torch.equal(k_mine, k_whole[:, own])


def test_flops_count_what_is_read():
    length = 512
    flops = {kind: layer(kind).flops(length) for kind in ("nsa", *KINDS)}
    per_read = 2 * 4 * (8 + 6)
    assert flops["dense"]["dense"] == per_read * (length + 1) / 2
    assert flops["window"]["sliding"] == flops["nsa"]["sliding"]
    assert flops["global"]["selected"] == flops["nsa"]["selected"]
    assert flops["global"]["sliding"] == 0
    assert flops["dense"]["projections"] == 2 * sum(p.numel() for p in layer("dense").parameters())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_probes_count_the_keys_that_are_read(kind, packed):
    module = layer(kind)
    with probing(module) as probes:
        module(inputs(2), cu_doc_lens=[0, 60, 2 * LENGTH] if packed else None)
    (figures,) = (probe.figures for probe in probes.values())
    lengths = [60, 2 * LENGTH - 60] if packed else [LENGTH, LENGTH]
    own = ("compressed", "selected") if kind == "global" else ("sliding",)
    g = module.geometry
    want = sum(
        n * (n + 1) // 2 if kind == "dense" else sum(g.total_reads(n)[branch] for branch in own) for n in lengths
    )
    assert int(figures["reads_pred"]) == int(figures["reads_act_total"]) == want
    assert ("gate_entropy_mean" in figures) == (kind == "global")


@pytest.mark.parametrize(("kind", "packed", "through_pytorch"), each_pair(KINDS, [False, True], [False, True]))
def test_compiles_without_graph_breaks(kind, packed, through_pytorch, monkeypatch):
    if through_pytorch:
        monkeypatch.setattr(layer_kinds, "COMPILED_ON_CPU", "none")
    torch._dynamo.reset()
    module, x = layer(kind, torch.float32), inputs(dtype=torch.float32)
    options = dict(cu_doc_lens=torch.tensor([0, 50, 2 * LENGTH], dtype=torch.int32)) if packed else {}
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.compile(module, fullgraph=True, backend="aot_eager")(mine, **options).square().sum().backward()
    module(theirs, **options).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4)


def test_every_kind_that_can_be_asked_for_has_a_strategy():
    assert tuple(LAYER_KINDS) == ATTENTION_KINDS
    assert not NSAAttention.__subclasses__()  # kinds differ by their strategy alone
