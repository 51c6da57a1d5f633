"""The portable backend cuts queries into chunks by size; the cut must not show."""

import pytest
import torch

from nsa.core.nsa_attention import NSAAttention
from nsa.kernels import portable
from tests.shapes import attention_args


@pytest.mark.parametrize("elements", [1, 1 << 9, 1 << 13])
def test_any_chunk_gives_the_same_output_and_gradients(monkeypatch, elements):
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny", phi="linear"))
    x = torch.randn(2, 90, 24, requires_grad=True)
    cu = torch.tensor([0, 50, 180], dtype=torch.int32)

    def run():
        out = module(x, cu_doc_lens=cu)
        return [out, *torch.autograd.grad(out.square().sum(), (x, *module.parameters()))]

    whole = run()
    monkeypatch.setattr(portable, "_CPU_ELEMENTS", elements)
    for a, b in zip(run(), whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
