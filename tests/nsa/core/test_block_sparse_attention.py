"""Attention over given blocks: outputs and gradients against the oracle at random shapes, and what an index may be."""

import functools
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import nsa
from nsa import Geometry, block_sparse_attention
from nsa.errors import ConfigError, KernelUnavailable
from tests.backends import RUN_HERE
from tests.oracle import Array, attend_and_differentiate, tokens_of_blocks

BLOCK_SIZES = (1, 4, 16, 32, 64, 128, 7)
N_SHAPES = 210
FORWARD, GRADIENT = 1e-6, 1e-5


class BlockCase(NamedTuple):
    """Random tensors in fp32, the blocks that each query reads, and the oracle's results in fp64."""

    inputs: tuple[torch.Tensor, ...]
    options: dict[str, Any]
    weights: tuple[torch.Tensor, torch.Tensor]
    """Gradients of output and log-sum-exp."""
    results: tuple[Array, ...]
    """Output, log-sum-exp, gradients of queries, keys and values."""


def random_case(seed: int, most_tokens: int = 50) -> BlockCase:
    """A shape by its number: packed or not, one choice per group or for all heads, indices in any order with repeats,
    entries of −1, and blocks after the query."""
    rng = np.random.default_rng(seed)
    block_size = BLOCK_SIZES[seed % len(BLOCK_SIZES)]
    batch, length, groups = (int(rng.integers(1, most)) for most in (3, most_tokens, 4))
    per_group, d_k, d_v, n = (int(rng.integers(1, most)) for most in (6, 20, 20, 7))
    packed = bool(rng.integers(2))
    tokens = batch * length
    cu = sorted({0, tokens, *rng.integers(0, tokens + 1, 3).tolist()}) if packed else list(range(0, tokens + 1, length))
    shape = (batch, length, groups if rng.integers(2) else 1, n)
    blocks = rng.integers(-1, -(-length // block_size) + 2, shape)
    q, k, v, dout = (
        rng.standard_normal((batch, length, heads, width)).astype(np.float32)
        for heads, width in ((groups * per_group, d_k), (groups, d_k), (groups, d_v), (groups * per_group, d_v))
    )
    dlse = rng.standard_normal((batch, length, groups * per_group)).astype(np.float32)
    scale = float(rng.uniform(0.3, 1.2)) * d_k**-0.5
    results = by_hand(q, k, v, blocks, dout, dlse, cu, block_size, scale)
    options = dict(block_size=block_size, scale=scale, cu_seqlens=cu if packed else None)
    inputs = tuple(map(torch.from_numpy, (q, k, v, blocks.astype(np.int32))))
    return BlockCase(inputs, options, (torch.from_numpy(dout), torch.from_numpy(dlse)), results)


random_case_once = functools.cache(random_case)  # every backend compares with it


def by_hand(q, k, v, blocks, dout, dlse, cu, block_size, scale) -> tuple[Array, ...]:
    """One document, one query, one head at a time."""
    shape, (groups, width) = q.shape, (k.shape[2], v.shape[3])
    q, k, v, blocks, dout, dlse = (
        x.reshape(-1, *x.shape[2:]).astype(np.float64) for x in (q, k, v, blocks, dout, dlse)
    )
    out, lse = np.zeros((*q.shape[:2], width)), np.full(q.shape[:2], -np.inf)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for begin, end in pairwise(cu):
        for t in range(begin, end):
            for h in range(q.shape[1]):
                g = h * groups // q.shape[1]
                chosen = blocks[t, g % blocks.shape[1]].astype(int).tolist()
                read = [begin + token for token in tokens_of_blocks(t - begin, chosen, block_size)]
                one = attend_and_differentiate(
                    q[t, h], [k[i, g] for i in read], [v[i, g] for i in read], scale, dout[t, h], dlse[t, h]
                )
                out[t, h], lse[t, h], dq[t, h] = one.out, one.lse, one.q
                for i, of_key, of_value in zip(read, one.keys, one.values, strict=True):
                    dk[i, g] += of_key
                    dv[i, g] += of_value
    return tuple(x.reshape(*shape[:2], *x.shape[1:]) for x in (out, lse, dq, dk, dv))


def worst_errors(case: BlockCase, backend: str) -> tuple[float, float]:
    """Largest error of output and log-sum-exp, and of a gradient; an error counts relative to numbers above 1."""
    leaves = [x.clone().requires_grad_() for x in case.inputs[:3]]
    out, lse = block_sparse_attention(*leaves, case.inputs[3], kernels=backend, return_lse=True, **case.options)
    dout, dlse = case.weights
    gradients = torch.autograd.grad((out * dout).sum() + (lse.where(lse > -torch.inf, 0) * dlse).sum(), leaves)
    both = [(x.detach().double().numpy(), want) for x, want in zip((out, lse, *gradients), case.results, strict=True)]
    assert all(np.array_equal(np.isinf(got), np.isinf(want)) for got, want in both)
    finite = [(got[np.isfinite(want)], want[np.isfinite(want)]) for got, want in both]
    errors = [float(np.max(np.abs(got - want) / np.maximum(1, np.abs(want)), initial=0)) for got, want in finite]
    return max(errors[:2]), max(errors[2:])


def failures(backend: str, seeds: range, most_tokens: int = 50) -> list[str]:
    rows = []
    for seed in seeds:
        forward, gradient = worst_errors(random_case_once(seed, most_tokens), backend)
        if not (forward <= FORWARD and gradient <= GRADIENT):
            rows.append(f"shape {seed}: forward {forward:.1e}, gradients {gradient:.1e}")
    return rows


@pytest.mark.parametrize("backend", [name for name in RUN_HERE if name != "triton"])
def test_equals_the_oracle_at_random_shapes(backend):
    assert failures(backend, range(N_SHAPES)) == []


@pytest.mark.skipif("triton" not in RUN_HERE, reason="Triton's kernels run here under TRITON_INTERPRET=1 only")
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_triton_equals_the_oracle_or_refuses_by_name(block_size):
    """Fewer and shorter shapes: an interpreted call takes seconds, and more of them the smaller the blocks."""
    of_size = range(BLOCK_SIZES.index(block_size), 3 * len(BLOCK_SIZES), len(BLOCK_SIZES))
    assert failures("triton", of_size, most_tokens=12 if block_size == 1 else 40) == []


@pytest.mark.parametrize("backend", RUN_HERE)
def test_what_a_query_reads_is_a_set_of_blocks(backend):
    """Order, repeats, entries below 0, blocks after the query and the integer type change nothing."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 50, 4, 8), torch.randn(1, 50, 2, 8), torch.randn(1, 50, 2, 8)
    blocks = torch.stack((torch.zeros(50, dtype=torch.int32), torch.arange(50, dtype=torch.int32) // 8), -1)
    blocks = blocks[None, :, None]
    run = functools.partial(block_sparse_attention, q, k, v, block_size=8, kernels=backend, return_lse=True)
    want = run(blocks)
    after = torch.full_like(blocks, 2**30)
    for same in (
        blocks.flip(-1),
        torch.cat((blocks, blocks, after, after * 0 - 1), -1).long(),
        blocks.expand(-1, -1, 2, -1),
        torch.cat((blocks, blocks.new_full(blocks.shape, -7)), -1),
    ):
        for got, expected in zip(run(same), want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    none, lse = run(blocks[..., :0])
    assert not none.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("backend", RUN_HERE)
def test_gradients_are_bitwise_the_same_every_time(backend):
    case = random_case_once(2)
    runs = []
    for _ in range(3 if backend == "triton" else 25):
        leaves = [x.clone().requires_grad_() for x in case.inputs[:3]]
        out = block_sparse_attention(*leaves, case.inputs[3], kernels=backend, **case.options)
        runs.append([out.detach(), *torch.autograd.grad((out * case.weights[0]).sum(), leaves)])
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("backend", RUN_HERE)
def test_the_last_queries_alone_read_what_they_read_among_all(backend):
    case = random_case_once(9, most_tokens=40)
    options = dict(case.options, cu_seqlens=None, kernels=backend)
    q, k, v, blocks = case.inputs
    whole = block_sparse_attention(q, k, v, blocks, **options)
    last = block_sparse_attention(q[:, -3:], k, v, blocks[:, -3:], **options)
    torch.testing.assert_close(last, whole[:, -3:], atol=1e-6, rtol=1e-6)


def test_selected_attention_is_the_same_computation():
    case = random_case_once(4)
    q, k, v, blocks = case.inputs
    geometry = Geometry(l=1, d=1, l_sel=case.options["block_size"], n_sel=3, w=1)
    options = dict(scale=case.options["scale"], cu_seqlens=case.options["cu_seqlens"])
    assert torch.equal(
        nsa.selected_attention(q, k, v, blocks, geometry=geometry, **options),
        block_sparse_attention(q, k, v, blocks, **case.options),
    )


def test_compiles_in_one_graph():
    case = random_case_once(2)

    def run(q, k, v, blocks):
        return block_sparse_attention(q, k, v, blocks, **case.options)

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(*case.inputs), run(*case.inputs))


@pytest.mark.parametrize("size", [0, -4, 2**16 + 1, 4.0, True, None])
def test_a_wrong_block_size_is_named(size):
    q, k, blocks = torch.randn(1, 8, 2, 4), torch.randn(1, 8, 1, 4), torch.zeros(1, 8, 1, 1, dtype=torch.int32)
    with pytest.raises(ConfigError, match="block_size"):
        block_sparse_attention(q, k, k, blocks, block_size=size)


def test_wrong_indices_are_named():
    q, k = torch.randn(1, 8, 4, 4), torch.randn(1, 8, 2, 4)
    of_no_shape = [torch.zeros(shape).int() for shape in ((1, 8, 3, 1), (8, 2, 1), (1, 7, 1, 1), (1,), ())]
    for blocks in (torch.zeros(1, 8, 2, 1), *of_no_shape):
        with pytest.raises(ConfigError, match="blocks"):
            block_sparse_attention(q, k, k, blocks, block_size=4)
    with pytest.raises(ConfigError, match="block_indices name 65537"):
        block_sparse_attention(q, k, k, torch.zeros(1, 8, 1, 65537).int(), block_size=1)


@pytest.mark.skipif("triton" not in RUN_HERE, reason="Triton's kernels run here under TRITON_INTERPRET=1 only")
def test_triton_refuses_more_blocks_than_it_reads():
    q, k = torch.randn(1, 8, 4, 4), torch.randn(1, 8, 2, 4)
    with pytest.raises(KernelUnavailable, match="at most 64 blocks"):
        block_sparse_attention(q, k, k, torch.zeros(1, 8, 1, 65).int(), block_size=1, kernels="triton")
