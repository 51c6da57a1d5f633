"""The runbook's own checks, as an operator types them."""

import os
from pathlib import Path

import pytest
import torch

from nsa.model.llama_block_nsa import LlamaBlockNSA
from tests import fork_server

ROOT = Path(__file__).parents[3]
RUNBOOK = {
    "block import": "from nsa.model.llama_block_nsa import LlamaBlockNSA; print('NSA import OK')",
    "attention import": "from nsa.core.nsa_attention import NSAAttention; print('Attention import OK')",
    "forward": """
import torch
from nsa.model.llama_block_nsa import LlamaBlockNSA
block = LlamaBlockNSA(dim=512, n_heads=8, n_kv_groups=2, d_k=64, d_v=64, l=32, d=16, l_sel=64, n_sel=4, w=128)
x = torch.randn(1, 32, 512)
out = block(x)
print(f'Forward pass OK: {out.shape}')
""",
}


@pytest.mark.parametrize("check", RUNBOOK)
def test_runbook_checks(check):
    done = fork_server.run(["-c", RUNBOOK[check]], cwd=ROOT, env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stdout
    if check == "forward":
        assert "torch.Size([1, 32, 512])" in done.stdout


def test_block_is_residual():
    block = LlamaBlockNSA(16, n_heads=2, n_kv_groups=1, d_k=4, d_v=4, l=8, d=4, l_sel=8, n_sel=4, w=12)
    with torch.no_grad():
        block.attention.w_out.weight.zero_()
        block.feed_forward.w2.weight.zero_()
    x = torch.randn(1, 20, 16)
    assert torch.equal(block(x), x)


def test_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="n_head"):
        LlamaBlockNSA(16, n_head=2, n_kv_groups=1, d_k=4, d_v=4)
