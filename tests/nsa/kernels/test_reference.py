"""The reference kernels against loops that share no code with them."""

import numpy as np
import pytest
import torch

from nsa.geometry import Geometry
from nsa.kernels import reference
from tests.oracle import attend_to, chosen_blocks, complete_blocks, window_tokens
from tests.shapes import GEOMETRIES

B, G, R, K, V = 2, 2, 3, 4, 5
SCALE = 0.37


def draw(n_queries, n_keys, n_compressed, seed=0):
    torch.manual_seed(seed)
    sizes = [(n_queries, G, R, K), (n_keys, G, K), (n_keys, G, V), (n_compressed, G, K), (n_compressed, G, V)]
    return [torch.randn(B, *size, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize("geometry", ["tiny", "no_overlap", "long_blocks", "showcase"])
@pytest.mark.parametrize(("before", "n_queries"), [(0, 61), (23, 11), (40, 1)])
def test_each_branch_equals_the_loops(geometry, before, n_queries):
    """`before` tokens came first: queries are the last ones, as in chunked prefill and decode."""
    g = Geometry(**GEOMETRIES[geometry])
    l, d, l_sel, n_sel, w = g.l, g.d, g.l_sel, g.n_sel, g.w
    n = before + n_queries
    q, k, v, kc, vc = draw(n_queries, n, max(0, (n - l) // d + 1))
    pos = torch.arange(before, n).expand(B, -1)
    zero = torch.zeros_like(pos)
    idx = reference.select_blocks(q, kc, pos, zero, geometry=g, scale=SCALE)
    sliding = reference.sliding_attention(q, k, v, pos, zero, geometry=g, scale=SCALE)
    compressed = reference.compressed_attention(q, kc, vc, pos, zero, geometry=g, scale=SCALE)
    selected = reference.selected_attention(q, k, v, idx, pos, zero, geometry=g, scale=SCALE)
    for b in range(B):
        for s, t in enumerate(range(before, n)):
            for group in range(G):
                heads = [q[b, s, group, r].numpy() for r in range(R)]
                keys, values = list(k[b, :, group].numpy()), list(v[b, :, group].numpy())
                c_keys, c_values = list(kc[b, :, group].numpy()), list(vc[b, :, group].numpy())
                blocks = chosen_blocks(
                    heads, c_keys, t, l=l, d=d, l_sel=l_sel, n_sel=n_sel, scale=SCALE, visible=complete_blocks(t, l, d)
                )
                assert idx[b, s, group].tolist() == blocks + [-1] * (n_sel - len(blocks))
                sees = {
                    sliding: ([keys[i] for i in window_tokens(t, w)], [values[i] for i in window_tokens(t, w)]),
                    compressed: (
                        [c_keys[c] for c in complete_blocks(t, l, d)],
                        [c_values[c] for c in complete_blocks(t, l, d)],
                    ),
                    selected: (
                        [keys[i] for i in range(t + 1) if i // l_sel in blocks],
                        [values[i] for i in range(t + 1) if i // l_sel in blocks],
                    ),
                }
                for out, (seen_keys, seen_values) in sees.items():
                    for r in range(R):
                        want = attend_to(heads[r], seen_keys, seen_values, V, SCALE)
                        np.testing.assert_allclose(out[b, s, group, r].numpy(), want, atol=1e-12)


def test_lse_is_the_log_of_the_sum_and_minus_infinity_where_nothing_is_seen():
    q, _, _, kc, vc = draw(40, 40, 9)
    pos = torch.arange(40).expand(B, -1)
    out, lse = reference.compressed_attention(
        q, kc, vc, pos, torch.zeros_like(pos), geometry=Geometry(**GEOMETRIES["tiny"]), scale=SCALE, return_lse=True
    )
    assert (lse[:, :7] == -torch.inf).all()
    assert (out[:, :7] == 0).all()
    scores = SCALE * torch.einsum("bgrk,bcgk->bgrc", q[:, 39], kc)
    torch.testing.assert_close(lse[:, 39], scores.logsumexp(-1))


def test_overlap_of_the_base_sizes_is_the_papers():
    weights = reference.overlap(20, 4, Geometry(**GEOMETRIES["seed"]))
    assert weights[:, 1].nonzero().flatten().tolist() == [3, 4, 5, 6, 7]
    assert weights[3:8, 1].tolist() == [1, 2, 2, 2, 1]
    assert weights[:4, 0].tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_overlap_counts_shared_tokens(geometry):
    g = GEOMETRIES[geometry]
    weights = reference.overlap(30, 12, Geometry(**g))
    for c in range(30):
        tokens = set(range(c * g["d"], c * g["d"] + g["l"]))
        for j in range(12):
            block = set(range(j * g["l_sel"], (j + 1) * g["l_sel"]))
            assert weights[c, j] * g["d"] == len(tokens & block)
