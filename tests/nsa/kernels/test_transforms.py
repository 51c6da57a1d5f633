"""Transforms of torch.func: gradients on every backend, in the module and in the loss; others are refused by name."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from nsa import Geometry, NSAAttention, NSATransformer, nsa_attention
from nsa.errors import UnsupportedTransform
from nsa.model.loss import linear_cross_entropy
from tests.backends import RUN_HERE
from tests.shapes import GEOMETRIES, attention_args

TINY = Geometry(**GEOMETRIES["tiny"])
WITH_KERNELS = [name for name in RUN_HERE if name != "reference"]
LENGTH = 21


def inputs(dtype=torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    widths = (4, 8), (2, 8), (2, 6), (4, 3)
    return tuple(torch.randn(1, LENGTH, *heads_and_width, dtype=dtype) for heads_and_width in widths)


def loss_with(backend: str):
    def loss(q, k, v, gates):
        return nsa_attention(q, k, v, gates, geometry=TINY, kernels=backend).square().sum()

    return loss


def by_autograd(loss, operands) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    return torch.autograd.grad(loss(*leaves), leaves)


def assert_all_close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", RUN_HERE)
def test_func_grad_is_autograds_gradient(backend):
    operands, loss = inputs(), loss_with(backend)
    assert_all_close(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*operands), by_autograd(loss, operands))


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("changes", [{}, dict(coarse_block=4, n_coarse=4, l_sel=16)], ids=["nsa", "coarse"])
@pytest.mark.parametrize("selector_blocks", ["chosen", "all"])
def test_func_grad_of_a_module_and_its_selector_loss(backend, selector_blocks, changes):
    arguments = attention_args("tiny", phi="linear", selector_loss=1.0, selector_loss_share=1.0)
    module = NSAAttention(**arguments | dict(kernels=backend, selector_blocks=selector_blocks) | changes)
    x = torch.randn(2, 40, module.dim)
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    got = torch.func.grad(lambda held: torch.func.functional_call(module, held, (x,)).square().sum())(parameters)
    module(x).square().sum().backward()
    assert_all_close([got[name] for name in parameters], [p.grad for p in module.parameters()])


@pytest.mark.parametrize("kind", ["nsa", "merged", "global", "window", "dense"])
@pytest.mark.parametrize("backend", RUN_HERE)
def test_func_grad_of_the_models_loss(backend, kind):
    sizes = {name: value for name, value in attention_args("tiny", kv="shared").items() if name != "dim"}
    model = NSATransformer(30, 24, 2, layers=(kind,), kernels=backend, **sizes)
    tokens = torch.randint(0, 30, (2, LENGTH + 1))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model.loss(tokens[:, :-1], tokens[:, 1:])

    held = {f"model.{name}": value for name, value in parameters.items()}
    got = torch.func.grad(lambda held: torch.func.functional_call(Loss(), held, (tokens,)))(held)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert_all_close(got.values(), [p.grad for p in model.parameters()])


def vmapped(loss, q, *rest):
    return torch.func.vmap(lambda q: loss(q, *rest))(torch.stack((q, q)))


def per_row_gradients(loss, q, *rest):
    return torch.func.vmap(torch.func.grad(lambda q: loss(q, *rest)))(torch.stack((q, q)))


def pushed_forward(loss, q, *rest):
    return torch.func.jvp(lambda q: loss(q, *rest), (q,), (q,))


def by_dual_numbers(loss, q, *rest):
    with forward_ad.dual_level(), torch.no_grad():
        return forward_ad.unpack_dual(loss(forward_ad.make_dual(q, q), *rest)).tangent


def twice(loss, q, *rest):
    q = q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(loss(q, *rest), q, create_graph=True)
    return torch.autograd.grad(dq.square().sum(), q)


def nested(loss, q, *rest):
    return torch.func.grad(lambda q: torch.func.grad(lambda q: loss(q, *rest))(q).square().sum())(q)


OTHERS = [vmapped, per_row_gradients, pushed_forward, by_dual_numbers, twice, nested]


@pytest.mark.parametrize("transform", OTHERS)
@pytest.mark.parametrize("backend", WITH_KERNELS)
def test_other_transforms_are_refused_by_name(backend, transform):
    with pytest.raises(UnsupportedTransform, match="reference"):
        transform(loss_with(backend), *inputs())


@pytest.mark.parametrize("backend", WITH_KERNELS)
def test_a_second_gradient_is_refused_where_the_first_does_not_depend_on_the_output(backend):
    q, *rest = inputs()
    q.requires_grad_()
    out = nsa_attention(q, *rest, geometry=TINY, kernels=backend)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(UnsupportedTransform, match="double backward"):
        torch.autograd.grad(dq.square().sum(), q)


def test_the_reference_supports_every_transform():
    operands, loss = inputs(torch.float64), loss_with("reference")
    q, *rest = operands
    assert_all_close(vmapped(loss, *operands), [loss(*operands)] * 2)
    gradient = by_autograd(loss, operands)[0]
    assert_all_close(per_row_gradients(loss, *operands), [gradient] * 2)
    for tangent in (pushed_forward(loss, *operands)[1], by_dual_numbers(loss, *operands)):
        torch.testing.assert_close(tangent, (gradient * q).sum())
    step, far = 1e-5 * torch.randn_like(q), []
    for side in (q + step, q - step):
        far.append(by_autograd(loss, (side, *rest))[0].square().sum() / 2)
    along = (far[0] - far[1]).item()
    for second in (twice(loss, *operands)[0], nested(loss, *operands)):
        assert (second * step).sum().item() == pytest.approx(along, rel=1e-5)


@pytest.mark.parametrize("transform", OTHERS)
def test_the_chunked_loss_refuses_other_transforms(transform):
    x, head, labels = torch.randn(5, 4), torch.randn(7, 4), torch.arange(5)
    with pytest.raises(UnsupportedTransform):
        transform(lambda x: linear_cross_entropy(x, head, labels), x)


@pytest.mark.parametrize("transform", [vmapped, per_row_gradients, pushed_forward, by_dual_numbers])
def test_the_selector_loss_refuses_other_transforms(transform):
    module = NSAAttention(**attention_args("tiny", selector_loss=1.0, kernels="reference", kv="per_branch"))

    def loss(weight, x):
        return torch.func.functional_call(module, {"w_k.weight": weight}, (x,)).square().sum()

    if transform is by_dual_numbers:
        with forward_ad.dual_level(), pytest.raises(UnsupportedTransform):
            loss(forward_ad.make_dual(module.w_k.weight, module.w_k.weight), torch.randn(1, 40, module.dim))
        return
    with pytest.raises(UnsupportedTransform):
        transform(loss, module.w_k.weight.detach(), torch.randn(1, 40, module.dim))


def test_the_selector_loss_refuses_a_second_derivative():
    module = NSAAttention(**attention_args("tiny", selector_loss=1.0, kernels="reference", kv="per_branch"))
    out = module(torch.randn(1, 40, module.dim)).square().sum()
    (gradient,) = torch.autograd.grad(out, module.w_k.weight, create_graph=True)
    with pytest.raises(UnsupportedTransform):
        gradient.square().sum().backward()
