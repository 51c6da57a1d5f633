"""The gate mix of the Triton backend against plain torch. Runs under TRITON_INTERPRET=1."""

import pytest
import torch

from tests.backends import RUN_HERE

pytestmark = pytest.mark.skipif("triton" not in RUN_HERE, reason="needs TRITON_INTERPRET=1")

CASES = [
    (heads, per_head, width, dtype)
    for heads, width in ((1, 16), (3, 24), (6, 128), (16, 24), (6, 192))
    for per_head in (True, False)
    for dtype in (torch.float32, torch.float16)
]


def tensors(heads: int, per_head: bool, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shape = (1, 19, 2, heads)
    gates = torch.rand(*shape[:3], heads if per_head else 1, 3)
    return [gates, *(torch.randn(*shape, width).to(dtype) for _ in range(3))]


def plain(gates: torch.Tensor, *branches: torch.Tensor) -> torch.Tensor:
    mixed = sum(gate[..., None] * out.float() for gate, out in zip(gates.unbind(-1), branches, strict=True))
    return mixed.to(branches[0].dtype)


@pytest.mark.parametrize(("heads", "per_head", "width", "dtype"), CASES)
def test_mix_and_its_gradients_equal_plain_torch(heads, per_head, width, dtype):
    from nsa.kernels.triton import mix_backward, mix_forward

    inputs = tensors(heads, per_head, width, dtype)
    leaves = [x.clone().requires_grad_() for x in inputs]
    want = plain(*leaves)
    got = mix_forward(*inputs)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want)
    dmixed = torch.randn(want.shape).to(dtype)
    gradients = mix_backward(dmixed, *inputs)
    assert [x.dtype for x in gradients] == [torch.float32, dtype, dtype, dtype]
    for ours, theirs in zip(gradients, torch.autograd.grad(want, leaves, dmixed), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_half_precision_is_rounded_once():
    """Products and sum are fp32: three terms that cancel leave what rounding each to fp16 would lose."""
    from nsa.kernels.triton import mix_forward

    gates = torch.tensor([1.0, -1.0, 1.0]).expand(1, 1, 1, 1, 3)
    big, tiny = torch.full((1, 1, 1, 1, 16), 2048.0).half(), torch.full((1, 1, 1, 1, 16), 0.25).half()
    assert (mix_forward(gates * 1.0001, big, big, tiny).float() - 0.25).abs().max() < 1e-3
    gates = torch.tensor([1.0001, -1.0, 1.0]).expand(1, 1, 1, 1, 3)
    want = 2048 * 0.0001 + 0.25
    assert (mix_forward(gates, big, big, tiny).float() - want).abs().max() < 2e-3


def test_strided_inputs_and_poisoned_memory_change_nothing():
    from nsa.kernels.triton import mix_backward, mix_forward

    inputs = tensors(6, True, 24, torch.float32)
    dmixed = torch.randn_like(inputs[1])
    want = [mix_forward(*inputs), *mix_backward(dmixed, *inputs)]
    torch.use_deterministic_algorithms(True)  # torch.empty then returns NaN
    try:
        views = [torch.stack((x, x), -2)[..., 0, :] for x in (dmixed, *inputs)]
        got = [mix_forward(*views[1:]), *mix_backward(*views)]
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
