import pytest
import torch
import torch.nn.functional as F

from nsa.model import loss as loss_module
from nsa.model.loss import linear_agreement, linear_cross_entropy, linear_token_scores


def case(dtype=torch.float32, n=37, v=23):
    torch.manual_seed(0)
    x = torch.randn(n, 8).to(dtype).requires_grad_()
    weight = torch.randn(v, 8).to(dtype).requires_grad_()
    labels = torch.randint(v, (n,))
    labels[::5] = -100
    return x, weight, labels


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("elements", [1, 23 * 7, 1 << 22])
def test_equals_plain_cross_entropy_in_any_chunks(monkeypatch, reduction, elements):
    monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", elements)
    x, weight, labels = case(torch.float64)
    ours = linear_cross_entropy(x, weight, labels, reduction) * 3
    plain = F.cross_entropy(x @ weight.T, labels, reduction=reduction) * 3
    torch.testing.assert_close(ours, plain)
    for a, b in zip(torch.autograd.grad(ours, (x, weight)), torch.autograd.grad(plain, (x, weight)), strict=True):
        torch.testing.assert_close(a, b)


def test_the_loss_is_fp32_for_a_bf16_model():
    x, weight, labels = case(torch.bfloat16)
    loss = linear_cross_entropy(x, weight, labels)
    assert loss.dtype == torch.float32
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    assert dx.dtype == dweight.dtype == torch.bfloat16
    exact = F.cross_entropy((x @ weight.T).float(), labels)
    torch.testing.assert_close(loss, exact)


def test_no_label_at_all_is_a_loss_of_zero():
    x, weight, labels = case()
    loss = linear_cross_entropy(x, weight, labels.fill_(-100))
    assert loss == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (x, weight)))


def test_full_logits_never_exist(monkeypatch):
    """Peak of what is allocated stays near one chunk, far below all logits."""
    monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", 1 << 16)
    x, weight, labels = torch.randn(4096, 8), torch.randn(4096, 8), torch.randint(4096, (4096,))
    with torch.profiler.profile(profile_memory=True) as prof:
        linear_cross_entropy(x.requires_grad_(), weight, labels)
    largest = max(event.cpu_memory_usage for event in prof.events() if event.name in ("aten::mm", "aten::matmul"))
    assert largest <= 4 * (1 << 16)


def test_operator_is_well_formed():
    x, weight, labels = case()
    torch.library.opcheck(torch.ops.nsa.linear_cross_entropy.default, (x, weight, labels, True, True))


@pytest.mark.parametrize("elements", [1, 23 * 7, 1 << 22])
def test_scores_by_token_equal_those_of_all_logits(monkeypatch, elements):
    monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", elements)
    x, weight, labels = case(torch.float64)
    logits = (x @ weight.T).detach()
    labels[1::5] = logits.argmax(-1)[1::5]
    ours = linear_token_scores(x, weight, labels)
    assert not ours.losses.requires_grad
    torch.testing.assert_close(ours.losses, F.cross_entropy(logits, labels, reduction="none"))
    assert ours.hits.tolist() == (logits.argmax(-1) == labels).tolist()
    assert len(labels) > ours.hits.sum() >= len(labels[1::5])
    assert [each.shape for each in linear_token_scores(x[:0], weight, labels[:0])] == [(0,), (0,)]


@pytest.mark.parametrize("elements", [1, 23 * 7, 1 << 22])
def test_agreement_of_two_heads_equals_that_of_all_logits(monkeypatch, elements):
    monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", elements)
    x, weight, labels = case()
    other, other_weight = torch.randn(37, 5), torch.randn(23, 5)
    found = linear_agreement(x, weight, other, other_weight, labels)
    own, reference = (logits.detach().double().log_softmax(-1) for logits in (x @ weight.T, other @ other_weight.T))
    for scores, log_shares in ((found.own, own), (found.reference, reference)):
        plain = F.nll_loss(log_shares, labels, reduction="none")
        torch.testing.assert_close(scores.losses.double(), plain, atol=1e-5, rtol=1e-5)
        assert torch.equal(scores.hits, log_shares.argmax(-1) == labels)
    torch.testing.assert_close(
        found.divergence.double(), (reference.exp() * (reference - own)).sum(-1), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(found.same_top, own.argmax(-1) == reference.argmax(-1))
    assert 0 < found.same_top.double().mean() < 1


def test_a_model_agrees_with_itself():
    x, weight, labels = case()
    found = linear_agreement(x, weight, x, weight, labels)
    assert found.same_top.all()
    assert found.divergence.min() >= 0
    assert found.divergence.max() < 1e-6
