import pytest
import torch
import torch.nn.functional as F

from nsa.errors import ConfigError
from nsa.model import loss as loss_module
from nsa.model.loss import linear_agreement, linear_cross_entropy, linear_score_sums, linear_token_scores
from tests.nsa.kernels.fake_gpu import wide_products_on_cpu


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


def exact_loss(x, weight, labels):
    """Loss and gradients in fp64 of the same inputs."""
    inputs = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(inputs[0] @ inputs[1].T, labels)
    return loss, *torch.autograd.grad(loss, inputs)


def large_logits(device="cpu"):
    """bf16 inputs whose logits reach 30, where bf16 has steps of 0.125."""
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape, device=device).bfloat16() for shape in ((150, 64), (301, 64)))
    labels = (x.float() @ weight.float().T).topk(3).indices[:, 2]
    labels[::5] = -100
    return x.requires_grad_(), weight.requires_grad_(), labels


def assert_exact(x, weight, labels):
    """Require no error but the last rounding, that of the gradients to their dtype."""
    loss = linear_cross_entropy(x, weight, labels)
    assert loss.dtype == torch.float32
    want, *gradients = exact_loss(x, weight, labels)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    for ours, exact in zip(torch.autograd.grad(loss, (x, weight)), gradients, strict=True):
        assert ours.dtype == torch.bfloat16
        rounding = (exact.bfloat16().double() - exact).norm()
        assert (ours.double() - exact).norm() <= 1.1 * rounding
    scores = linear_token_scores(x, weight, labels)
    losses = F.cross_entropy(x.detach().double() @ weight.detach().double().T, labels, reduction="none")
    torch.testing.assert_close(scores.losses.double(), losses, rtol=1e-5, atol=1e-5)
    agreement = linear_agreement(x, weight, x, weight, labels)
    torch.testing.assert_close(agreement.own.losses.double(), losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("elements", [301 * 7, 1 << 22])
def test_logits_of_a_bf16_model_are_not_rounded(monkeypatch, elements):
    monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", elements)
    assert_exact(*large_logits())


def test_autocast_casts_the_inputs_and_not_the_logits():
    x, weight, labels = large_logits()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x.float(), weight.float(), labels)
        scores = linear_token_scores(x.float(), weight.float(), labels)
    assert torch.equal(loss, linear_cross_entropy(x, weight, labels))
    assert torch.equal(scores.losses, linear_token_scores(x, weight, labels).losses)


def test_products_of_a_gpu_give_the_same(monkeypatch):
    """A GPU multiplies bf16 with a result in fp32; here the CPU does so in its place."""
    x, weight, labels = large_logits()
    want = [loss := linear_cross_entropy(x, weight, labels), *torch.autograd.grad(loss, (x, weight))]
    monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", 301 * 7)
    with wide_products_on_cpu():
        ours = [loss := linear_cross_entropy(x, weight, labels), *torch.autograd.grad(loss, (x, weight))]
    torch.testing.assert_close(ours[0], want[0], rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(ours[1:], want[1:], strict=True):
        assert (mine - theirs).norm() <= 4e-3 * theirs.norm()


@pytest.mark.cuda
def test_logits_of_a_bf16_model_are_not_rounded_on_a_gpu():
    x, weight, labels = large_logits("cuda")
    loss = linear_cross_entropy(x, weight, labels)
    want, *gradients = exact_loss(x, weight, labels)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    for ours, exact in zip(torch.autograd.grad(loss, (x, weight)), gradients, strict=True):
        assert (ours.double() - exact).norm() <= 4e-3 * exact.norm()


@pytest.mark.parametrize("label", [-1, -5, -99, -101, 23, 1 << 40])
def test_labels_that_are_no_tokens_are_refused(label):
    x, weight, labels = case()
    labels[3] = label
    for function in (linear_cross_entropy, linear_token_scores, linear_score_sums):
        with pytest.raises(ConfigError):
            function(x, weight, labels)
    with pytest.raises(ConfigError):
        linear_agreement(x, weight, x, weight, labels)


def test_a_compiled_loss_refuses_them_too():
    x, weight, labels = case()
    labels[3] = 23
    with pytest.raises(ConfigError):
        torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)(x, weight, labels)


def test_no_label_at_all_is_a_loss_of_zero():
    x, weight, labels = case()
    loss = linear_cross_entropy(x, weight, labels.fill_(-100))
    assert loss == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (x, weight)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_logits_never_exist(monkeypatch, dtype):
    """Peak of what is allocated stays near one chunk, far below all logits, and the weight is never converted whole."""
    monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", 1 << 16)
    x, weight, labels = torch.randn(1024, 32), torch.randn(4096, 32), torch.randint(4096, (1024,))
    with torch.profiler.profile(profile_memory=True) as prof:
        linear_cross_entropy(x.to(dtype).requires_grad_(), weight.to(dtype), labels)
    allocations = ("aten::mm", "aten::matmul", "aten::_to_copy", "aten::empty", "aten::addmm_", "aten::zeros_like")
    largest = max(event.cpu_memory_usage for event in prof.events() if event.name in allocations)
    assert largest <= 4 * 4096 * 32  # the gradient of the weight is the largest tensor


def test_operator_is_well_formed():
    x, weight, labels = case()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # the fourth differentiates gradients too
    torch.library.opcheck(torch.ops.nsa.linear_cross_entropy.default, (x, weight, labels, True, True), test_utils=tests)


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
    agreement = linear_agreement(x, weight, other, other_weight, labels)
    own, reference = (logits.detach().double().log_softmax(-1) for logits in (x @ weight.T, other @ other_weight.T))
    for scores, log_shares in ((agreement.own, own), (agreement.reference, reference)):
        plain = F.nll_loss(log_shares, labels, reduction="none")
        torch.testing.assert_close(scores.losses.double(), plain, atol=1e-5, rtol=1e-5)
        assert torch.equal(scores.hits, log_shares.argmax(-1) == labels)
    torch.testing.assert_close(
        agreement.divergence.double(), (reference.exp() * (reference - own)).sum(-1), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(agreement.same_top, own.argmax(-1) == reference.argmax(-1))
    assert 0 < agreement.same_top.double().mean() < 1


def test_a_model_agrees_with_itself():
    x, weight, labels = case()
    agreement = linear_agreement(x, weight, x, weight, labels)
    assert agreement.same_top.all()
    assert agreement.divergence.min() >= 0
    assert agreement.divergence.max() < 1e-6
