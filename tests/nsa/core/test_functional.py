"""Functional NSA: against the oracle and the module, gradients, packed documents, given blocks, log-sum-exps."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

import nsa
from nsa import Geometry, compress_blocks, nsa_attention
from nsa.core.branches import BRANCH_ORDER
from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError, KernelUnavailable
from tests.backends import RUN_HERE
from tests.oracle import attend_to, chosen_blocks, complete_blocks, window_tokens
from tests.shapes import GEOMETRIES, attention_args, fp64_backends

TINY = Geometry(**GEOMETRIES["tiny"])
B, S, H, G, K, V = 2, 61, 6, 2, 8, 6


def tensors(dtype=torch.float64, batch=B, length=S):
    torch.manual_seed(0)
    q = torch.randn(batch, length, H, K, dtype=dtype)
    k, v = ([torch.randn(batch, length, G, width, dtype=dtype) for _ in BRANCH_ORDER] for width in (K, V))
    gates = torch.rand(batch, length, H, 3, dtype=torch.promote_types(dtype, torch.float32))
    return q, k, v, gates


def by_hand(q_SHK, k, v, gates_SH3, g, scale):
    """One document, one query and head at a time: output, log-sum-exps per branch, chosen blocks."""
    n, per_group = len(q_SHK), H // G
    out, lse, blocks = np.zeros((n, H, V)), np.full((3, n, H), -np.inf), np.full((n, G, g.n_sel), -1)
    for group in range(G):
        keys, values = ([x[:, group] for x in streams] for streams in (k, v))
        cuts = [slice(c * g.d, c * g.d + g.l) for c in complete_blocks(n - 1, g.l, g.d)]
        c_keys, c_values = ([x[0][cut].mean(0) for cut in cuts] for x in (keys, values))
        for t in range(n):
            heads = range(group * per_group, (group + 1) * per_group)
            chosen = chosen_blocks([q_SHK[t, h] for h in heads], c_keys, t, l=g.l, d=g.d, l_sel=g.l_sel,
                                   n_sel=g.n_sel, scale=scale, visible=complete_blocks(t, g.l, g.d))  # fmt: skip
            blocks[t, group, : len(chosen)] = chosen
            seen = (
                [(c_keys[c], c_values[c]) for c in complete_blocks(t, g.l, g.d)],
                [(keys[1][i], values[1][i]) for i in range(t + 1) if i // g.l_sel in chosen],
                [(keys[2][i], values[2][i]) for i in window_tokens(t, g.w)],
            )
            for h in heads:
                for branch, pairs in enumerate(seen):
                    part = attend_to(q_SHK[t, h], [a for a, _ in pairs], [b for _, b in pairs], V, scale)
                    out[t, h] += gates_SH3[t, h, branch] * part
                    if pairs:
                        lse[branch, t, h] = math.log(sum(math.exp(scale * float(q_SHK[t, h] @ a)) for a, _ in pairs))
    return out, lse, blocks


def numpy_rows(b, q, k, v, gates):
    return q[b].numpy(), [x[b].numpy() for x in k], [x[b].numpy() for x in v], gates[b].numpy()


@pytest.mark.parametrize("backend", fp64_backends())
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("geometry", ["tiny", "no_overlap", "long_blocks"])
def test_equals_the_oracle_with_log_sum_exps_and_blocks(backend, scale, geometry):
    q, k, v, gates = tensors()
    g = Geometry(**GEOMETRIES[geometry])
    got = nsa_attention(q, k, v, gates, geometry=g, scale=scale, kernels=backend, return_lse=True, return_blocks=True)
    assert torch.equal(got.out, nsa_attention(q, k, v, gates, geometry=g, scale=scale, kernels=backend))
    for b in range(B):
        out, lse, blocks = by_hand(*numpy_rows(b, q, k, v, gates), g, scale or K**-0.5)
        np.testing.assert_allclose(got.out[b].numpy(), out, atol=1e-10)
        np.testing.assert_array_equal(got.blocks[b].numpy(), blocks)
        for branch in range(3):
            np.testing.assert_allclose(got.lse[branch][b].numpy(), lse[branch], atol=1e-10)


@pytest.mark.parametrize("backend", RUN_HERE)
def test_single_branches_add_up_to_the_whole(backend):
    q, (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win), gates = tensors(torch.float32)
    options = dict(geometry=TINY, kernels=backend)
    whole = nsa_attention(q, (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win), gates, return_lse=True, return_blocks=True,
                          **options)  # fmt: skip
    entries = [compress_blocks(x, geometry=TINY) for x in (k_cmp, v_cmp)]
    blocks = nsa.select_blocks(q, entries[0], **options)
    assert torch.equal(blocks, whole.blocks)
    branches = (
        nsa.compressed_attention(q, *entries, return_lse=True, **options),
        nsa.selected_attention(q, k_sel, v_sel, blocks, return_lse=True, **options),
        nsa.sliding_attention(q, k_win, v_win, return_lse=True, **options),
    )
    mixed = sum(gates[..., i, None] * out for i, (out, _) in enumerate(branches))
    torch.testing.assert_close(mixed, whole.out, atol=1e-5, rtol=1e-5)
    for (_, lse), want in zip(branches, whole.lse, strict=True):
        assert torch.equal(lse, want)
    assert torch.equal(nsa.sliding_attention(q, k_win, v_win, **options), branches[2][0])


def test_one_set_of_keys_serves_every_branch_and_branches_may_be_named():
    q, (k, *_), (v, *_), gates = tensors()
    one = nsa_attention(q, k, v, gates, geometry=TINY)
    assert torch.equal(one, nsa_attention(q, (k, k, k), (v, v, v), gates, geometry=TINY))
    named = [dict.fromkeys(reversed(BRANCH_ORDER), x) for x in (k, v)]
    assert torch.equal(one, nsa_attention(q, *named, gates, geometry=TINY))
    entries = compress_blocks(k, geometry=TINY), compress_blocks(v, geometry=TINY)
    assert torch.equal(one, nsa_attention(q, k, v, gates, compressed=entries, geometry=TINY))
    assert torch.equal(one, nsa_attention(q, (None, k, k), (None, v, v), gates, compressed=entries, geometry=TINY))


def test_gates_are_broadcast():
    q, k, v, _ = tensors()
    shares = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    want = nsa_attention(q, k, v, shares.expand(B, S, H, 3), geometry=TINY)
    assert torch.equal(nsa_attention(q, k, v, shares, geometry=TINY), want)
    assert torch.equal(nsa_attention(q, k, v, shares.expand(B, S, 1, 3), geometry=TINY), want)


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("cu", [[0, 5, 40, 40, 41, 2 * S], [0, 2 * S]], ids=str)
def test_packed_documents_equal_separate_ones(backend, cu):
    """Covers every function; documents may cross the rows of the batch."""
    q, k, v, gates = tensors(torch.float32)
    options = dict(geometry=TINY, kernels=backend)
    cu_seqlens = torch.tensor(cu, dtype=torch.int32)
    leaves = [q, *k, *v, gates]
    for x in leaves:
        x.requires_grad_()
    packed = nsa_attention(q, k, v, gates, cu_seqlens=cu_seqlens, return_lse=True, return_blocks=True, **options)
    rows = [x.flatten(0, 1)[None] for x in leaves]
    alone = []
    for begin, end in pairwise(cu):
        if begin < end:
            own_q, *own = (x[:, begin:end] for x in rows)
            result = nsa_attention(own_q, own[:3], own[3:6], own[6], return_lse=True, return_blocks=True, **options)
            alone.append((result.out, *result.lse, result.blocks))
    for got, want in zip((packed.out, *packed.lse, packed.blocks), zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(got.flatten(0, 1)[None], torch.cat(want, 1), atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(packed.out)
    whole = torch.cat([out for out, *_ in alone], 1).view_as(packed.out)
    gradients = [torch.autograd.grad((out * weight).sum(), leaves, retain_graph=True) for out in (packed.out, whole)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    entries = [compress_blocks(x.detach(), geometry=TINY, cu_seqlens=cu) for x in (k[0], v[0])]
    from_entries = nsa_attention(q, k, v, gates, compressed=entries, cu_seqlens=cu, **options)
    torch.testing.assert_close(from_entries, packed.out, atol=1e-6, rtol=1e-5)
    blocks = nsa.select_blocks(q, entries[0], cu_seqlens=cu, **options)
    assert torch.equal(blocks, packed.blocks)
    for got, want in (
        (nsa.compressed_attention(q, *entries, cu_seqlens=cu, return_lse=True, **options)[1], packed.lse.compressed),
        (nsa.selected_attention(q, k[1], v[1], blocks, cu_seqlens=cu, return_lse=True, **options)[1],
         packed.lse.selected),
        (nsa.sliding_attention(q, k[2], v[2], cu_seqlens=cu, return_lse=True, **options)[1], packed.lse.sliding),
    ):  # fmt: skip
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("n", [1, 7, 60])
def test_the_last_queries_alone_equal_those_of_a_whole_row(backend, n):
    """One token against the keys of a cache, or a chunk: outputs, log-sum-exps, blocks and gradients."""
    q, k, v, gates = tensors(torch.float32)
    leaves = [x.requires_grad_() for x in (q, *k, *v, gates)]
    options = dict(geometry=TINY, kernels=backend, return_lse=True, return_blocks=True)
    whole = nsa_attention(q, k, v, gates, **options)
    last = nsa_attention(q[:, -n:], k, v, gates[:, -n:], **options)
    torch.testing.assert_close(last.out, whole.out[:, -n:], atol=1e-5, rtol=1e-5)
    for got, want in zip(last.lse, whole.lse, strict=True):
        torch.testing.assert_close(got, want[:, -n:], atol=1e-5, rtol=1e-5)
    assert torch.equal(last.blocks, whole.blocks[:, -n:])
    weight = torch.randn_like(last.out)
    got = torch.autograd.grad((last.out * weight).sum(), leaves)
    want = torch.autograd.grad((whole.out[:, -n:] * weight).sum(), leaves)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", RUN_HERE)
def test_given_blocks_replace_the_selection(backend):
    q, k, v, gates = tensors(torch.float32)
    options = dict(geometry=TINY, kernels=backend)
    result = nsa_attention(q, k, v, gates, return_blocks=True, **options)
    again = nsa_attention(q, k, v, gates, blocks=result.blocks, return_blocks=True, **options)
    torch.testing.assert_close(again.out, result.out, atol=1e-6, rtol=1e-6)
    assert torch.equal(again.blocks, result.blocks)
    # In any order, with repetitions, of any integer type and number: what is chosen is a set.
    shuffled = torch.cat((result.blocks, result.blocks[..., :1]), -1).flip(-1).long()  # block 0 twice, the others once
    torch.testing.assert_close(
        nsa_attention(q, k, v, gates, blocks=shuffled, **options), result.out, atol=1e-6, rtol=1e-6
    )
    # Blocks after the query are not seen, however far.
    far = torch.cat((result.blocks.long(), torch.full((B, S, G, 1), 2**40)), -1)
    torch.testing.assert_close(nsa_attention(q, k, v, gates, blocks=far, **options), result.out, atol=1e-6, rtol=1e-6)
    # Block 0 alone: the selected branch sees the first l_sel tokens.
    only_first = torch.zeros(B, S, G, 1, dtype=torch.int32)
    out, lse = nsa.selected_attention(q, k[1], v[1], only_first, return_lse=True, **options)
    whole = nsa_attention(q, k, v, torch.tensor([0.0, 1.0, 0.0]), blocks=only_first, return_blocks=True, **options)
    torch.testing.assert_close(whole.out, out, atol=1e-6, rtol=1e-6)
    assert torch.equal(whole.blocks, only_first)
    want = nsa.selected_attention(q[:, : TINY.l_sel], k[1][:, : TINY.l_sel], v[1][:, : TINY.l_sel],
                                  only_first[:, : TINY.l_sel], **options)  # fmt: skip
    torch.testing.assert_close(out[:, : TINY.l_sel], want, atol=1e-6, rtol=1e-6)
    late = torch.einsum("bgrk,btgk->bgrt", q[:, -1].unflatten(1, (G, -1)), k[1][:, : TINY.l_sel]) * K**-0.5
    torch.testing.assert_close(lse[:, -1], late.logsumexp(-1).flatten(1), atol=1e-5, rtol=1e-5)
    none, lse = nsa.selected_attention(q, k[1], v[1], only_first - 1, return_lse=True, **options)
    assert not none.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("backend", RUN_HERE)
def test_a_block_given_twice_is_read_once(backend):
    """Long enough that neighbours choose unrelated blocks: a backend may then copy each query's own."""
    q, k, v, _ = tensors(torch.float32, batch=1, length=800)
    blocks = torch.randint(0, 100, (1, 800, G, 6), generator=torch.Generator().manual_seed(0))
    once, twice = (
        nsa.selected_attention(q, k[1], v[1], chosen, geometry=TINY, kernels=name)
        for chosen, name in ((blocks, "reference"), (torch.cat((blocks, blocks[..., :2]), -1), backend))
    )
    torch.testing.assert_close(twice, once, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", fp64_backends())
def test_gradcheck_with_log_sum_exps(backend):
    q, k, v, gates = (x for x in tensors(batch=1, length=30))
    leaves = [x[:, :, :, :].clone().requires_grad_() for x in (q, *k, *v, gates)]

    def run(q, k0, k1, k2, v0, v1, v2, gates):
        result = nsa_attention(q, (k0, k1, k2), (v0, v1, v2), gates, geometry=TINY, kernels=backend, return_lse=True)
        return result.out, *(x.where(x > -torch.inf, 0) for x in result.lse)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_the_module_equals_the_function():
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny")).double()
    x = torch.randn(B, S, 24, dtype=torch.float64)
    tables = module.rotary.tables(torch.arange(S).expand(B, -1))
    q, streams = module.project(x, tables)
    k, v = ((streams[i], streams[i + 2], streams[i + 4]) for i in (0, 1))
    out = nsa_attention(q.flatten(2, 3), k, v, module.gates(x).flatten(2, 3), geometry=module.geometry)
    torch.testing.assert_close(module.w_out(out.flatten(2)), module(x), atol=1e-12, rtol=1e-12)


def test_compiles_without_graph_breaks():
    q, k, v, gates = tensors(torch.float32)
    cu = torch.tensor([0, 40, 2 * S], dtype=torch.int32)

    def run(q, k, v, gates, cu_seqlens, blocks):
        result = nsa_attention(q, k, v, gates, geometry=TINY, cu_seqlens=cu_seqlens, blocks=blocks, return_lse=True)
        return result.out, result.lse.sliding

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    blocks = nsa_attention(q, k, v, gates, geometry=TINY, return_blocks=True).blocks
    for packing, chosen in ((None, None), (cu, None), (None, blocks)):
        results = []
        for function in (run, compiled):
            leaf = q.clone().requires_grad_()
            out, lse = function(leaf, tuple(k), tuple(v), gates, packing, chosen)
            (out.sum() + lse.sum()).backward()
            results.append((out, lse, leaf.grad))
        torch.testing.assert_close(*results)


def test_autocast_does_not_change_the_result():
    q, k, v, gates = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = nsa_attention(q, k, v, gates, geometry=TINY)
    assert torch.equal(inside, nsa_attention(q, k, v, gates, geometry=TINY))
    half = nsa_attention(*(x.bfloat16() for x in (q, k[0], v[0], gates)), geometry=TINY)
    assert half.dtype == torch.bfloat16


def change(**changes):
    q, k, v, gates = tensors(torch.float32)
    return dict(q_BSHK=q, k=k, v=v, gates_BSH3=gates, geometry=TINY) | changes


WRONG = {
    "q": lambda: change(q_BSHK=torch.randn(S, H, K)),
    "heads": lambda: change(q_BSHK=torch.randn(B, S, 5, K)),
    "fewer keys": lambda: change(k=torch.randn(B, S - 1, G, K)),
    "narrower keys": lambda: change(k=torch.randn(B, S, G, K - 2)),
    "rows of values": lambda: change(v=torch.randn(1, S, G, V)),
    "two tensors": lambda: change(k=[torch.randn(B, S, G, K)] * 2),
    "no compressed": lambda: change(k=[None, *[torch.randn(B, S, G, K)] * 2]),
    "no window": lambda: change(k=dict(compressed=torch.randn(B, S, G, K), selected=torch.randn(B, S, G, K))),
    "unknown branch": lambda: change(k=dict(window=torch.randn(B, S, G, K))),
    "gates": lambda: change(gates_BSH3=torch.rand(B, S, G, 3)),
    "gates of two": lambda: change(gates_BSH3=torch.rand(B, S, H, 2)),
    "entries": lambda: change(compressed=(torch.randn(B, 3, G, K), torch.randn(B, 3, G, V))),
    "blocks": lambda: change(blocks=torch.zeros(B, S, H, 4, dtype=torch.int32)),
    "float blocks": lambda: change(blocks=torch.zeros(B, S, G, 4)),
    "documents": lambda: change(cu_seqlens=[0, 5, S]),
    "dtypes": lambda: change(v=torch.randn(B, S, G, V).double()),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_that_do_not_fit_are_refused(case):
    with pytest.raises(ConfigError):
        nsa_attention(**WRONG[case]())


def test_documents_are_named_as_the_caller_spells_them():
    with pytest.raises(ConfigError, match="cu_seqlens"):
        nsa_attention(**WRONG["documents"]())


def test_an_unknown_backend_is_refused():
    with pytest.raises(KernelUnavailable):
        nsa_attention(**change(kernels="warp"))
