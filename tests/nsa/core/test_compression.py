"""Gradients of tokens that several blocks share: the right sum, and one that no order of additions can change."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.core.compression import BlockCompressor, store_as_rows
from nsa.core.positions import packed_layout, plain_layout
from nsa.geometry import Geometry
from tests.attention_options import PHIS

LENGTH = 61


class Additions(TorchDispatchMode):
    """Counts how often one addition adds to the same row, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.most: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::index_add", "aten::index_add_"):
            added = args[2][args[3].flatten(1).any(1)]  # slots that no document fills add nothing
            self.most.append(int(added.bincount().max()))
        return func(*args, **(kwargs or {}))


def test_weights_per_place_start_as_the_mean_and_are_separate_per_group():
    weighted, mean = (BlockCompressor(phi, 8, 4, n_groups=2, width=3, pos_emb=False) for phi in ("weighted", "avg"))
    weighted.reset_parameters()
    raw, begin_BC = torch.randn(2, LENGTH, 2, 3), torch.tensor([[0, 4, 9], [1, 20, 53]])
    torch.testing.assert_close(weighted(raw, begin_BC), mean(raw, begin_BC))
    with torch.no_grad():
        weighted.w_place.zero_()[1, 2] = 3.0
    pooled = weighted(raw, begin_BC)
    assert (pooled[:, :, 0] == 0).all()
    assert torch.equal(pooled[:, :, 1], torch.stack([3 * raw[b, begin_BC[b] + 2, 1] for b in range(2)]))


def test_softmax_weights_follow_the_tokens_of_their_group():
    phi, mean = (BlockCompressor(phi, 8, 4, n_groups=2, width=3, pos_emb=False) for phi in ("softmax", "avg"))
    phi.reset_parameters()
    raw, begin_BC = torch.randn(2, LENGTH, 2, 3), torch.tensor([[0, 4, 9], [1, 20, 53]])
    with torch.no_grad():
        phi.w_square[0] = 0  # group 0: the mean; group 1: the token whose last channel is largest
        phi.w_score[1, 2] = 1e6
    pooled = phi(raw, begin_BC)
    torch.testing.assert_close(pooled[:, :, 0], mean(raw, begin_BC)[:, :, 0])
    for b in range(2):
        for c in range(3):
            block = raw[b, begin_BC[b, c] : begin_BC[b, c] + 8, 1]
            torch.testing.assert_close(pooled[b, c, 1], block[block[:, 2].argmax()])


@pytest.mark.parametrize("phi", PHIS)
def test_parameters_stored_as_rows_compute_the_same_and_load_from_both_forms(phi):
    by_group, rows, again = (BlockCompressor(phi, 8, 4, n_groups=2, width=6, pos_emb=True) for _ in range(3))
    store_as_rows(rows)
    assert all(each.dim() < 3 and len(each) >= 12 for name, each in rows.named_parameters() if name != "pos_emb")
    torch.manual_seed(0)
    by_group.reset_parameters()
    torch.manual_seed(0)
    rows.reset_parameters()
    raw, begin_BC = torch.randn(2, LENGTH, 2, 6), torch.tensor([[0, 4, 9], [1, 20, 53]])
    assert torch.equal(rows(raw, begin_BC), by_group(raw, begin_BC))
    again.load_state_dict(rows.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), by_group.parameters(), strict=True))
    with torch.no_grad():
        for parameter in rows.parameters():
            parameter.zero_()
    rows.load_state_dict(by_group.state_dict())
    assert torch.equal(rows(raw, begin_BC), by_group(raw, begin_BC))


def test_softmax_is_what_gaussian_queries_read_of_the_block():
    torch.manual_seed(0)
    phi = BlockCompressor("softmax", 4, 4, n_groups=1, width=2, pos_emb=False)
    phi.reset_parameters()
    keys = torch.randn(1, 4, 1, 2)
    scale = 2**-0.5
    with torch.no_grad():
        phi.w_score[:] = torch.tensor([0.4, -0.2])
        phi.w_square[:] = torch.tensor([0.3, 0.6])
    queries = phi.w_score / scale + torch.randn(400_000, 2) * (2 * phi.w_square).sqrt()
    weight = (queries @ keys[0, :, 0].T * scale).exp().mean(0)
    expected = (weight[:, None] * keys[0, :, 0]).sum(0) / weight.sum()
    torch.testing.assert_close(phi(keys, torch.tensor([[0]]))[0, 0, 0], expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(("l", "d"), [(8, 8), (8, 4), (12, 4), (8, 2)])
def test_no_order_of_additions_changes_a_gradient(l, d, packed):
    geometry = Geometry(l=l, d=d, l_sel=l, n_sel=4, w=8)
    cu = torch.tensor([0, 1, 20, 20, LENGTH])
    layout = packed_layout(cu, LENGTH, geometry) if packed else plain_layout(2, LENGTH, geometry, torch.device("cpu"))
    begin_BC = layout.begin_BC
    raw = torch.randn(begin_BC.shape[0], LENGTH, 2, 3, dtype=torch.float64, requires_grad=True)
    phi = BlockCompressor("avg", l, d, n_groups=2, width=3, pos_emb=False)
    n_filled = begin_BC.shape[1]
    if packed:
        n_filled = int(((cu.diff() - l) // d + 1).clamp(min=0).sum())
    weight = torch.randn(begin_BC.shape[0], n_filled, 2, 3, dtype=torch.float64)
    out = phi(raw, begin_BC)[:, :n_filled]
    with Additions() as additions:
        (gradient,) = torch.autograd.grad((out * weight).sum(), raw)
    want = torch.zeros_like(raw)
    for b in range(raw.shape[0]):
        for c in range(n_filled):
            at = int(begin_BC[b, c])
            want[b, at : at + l] += weight[b, c] / l
            assert torch.allclose(out[b, c], raw[b, at : at + l].mean(0))
    assert torch.allclose(gradient, want)
    assert max(additions.most) <= 2
