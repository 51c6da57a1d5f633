"""The portable backend cuts queries into chunks and loads chosen blocks in one of two ways; neither must show."""

import pytest
import torch

from nsa.core.nsa_attention import NSAAttention
from nsa.kernels.portable import chunk, selected
from nsa.kernels.registry import BackendRequest
from tests.nsa.core.hostile_arguments import run as run_branch
from tests.nsa.core.hostile_arguments import tensors
from tests.shapes import attention_args


@pytest.mark.parametrize("elements", [1, 1 << 9, 1 << 13, 1 << 19])
@pytest.mark.parametrize("union_factor", [0, 6], ids=["copies", "union"])
@pytest.mark.parametrize("cu_doc_lens", [[0, 180], [0, 50, 180]], ids=str)
def test_any_chunk_gives_the_same_output_and_gradients(monkeypatch, elements, union_factor, cu_doc_lens):
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny", phi="linear"), kernels=BackendRequest(*["portable"] * 4))
    x = torch.randn(2, 90, 24, requires_grad=True)
    cu = torch.tensor(cu_doc_lens, dtype=torch.int32)

    def run():
        out = module(x, cu_doc_lens=cu)
        return [out, *torch.autograd.grad(out.square().sum(), (x, *module.parameters()))]

    whole = run()
    monkeypatch.setattr(chunk, "CPU_ELEMENTS", elements)
    monkeypatch.setattr(selected, "UNION_FACTOR", union_factor)
    for a, b in zip(run(), whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_a_block_far_after_the_query_takes_no_memory():
    """A table with a place for every block up to it would have 77 GB."""
    operands = tensors()
    operands["idx"] = torch.tensor([0, 1, 3, 2**31 - 1], dtype=torch.int32).expand(2, 9, 2, 4).contiguous()
    torch.testing.assert_close(
        run_branch("selected", "portable", operands), run_branch("selected", "reference", operands)
    )
