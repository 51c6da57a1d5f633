"""Relative position only: the same tokens thousands of positions later give the same output, for every φ and branch."""

import pytest
import torch

from nsa.core.branches import BRANCH_ORDER
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import Positions
from nsa.errors import ConfigError
from tests.attention_options import PHIS, PHIS_OF_UNROTATED_KEYS, PHIS_WITH_POS_EMB
from tests.shapes import attention_args

SHIFT = 5_000


def make(branch: str, **changes) -> NSAAttention:
    """A module far from its initial weights whose gates let one branch through, whole."""
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny", **changes))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
        module.gates.proj.weight.zero_()
        bias = torch.full((module.n_heads, 3), -1e4)
        bias[:, BRANCH_ORDER.index(branch)] = 1e4
        module.gates.proj.bias.copy_(bias.flatten())
    return module


def located(module: NSAAttention, x_BSD: torch.Tensor, shift: int, **kwargs) -> Positions:
    """The positions of these tokens, `shift` later: everything a rotation is made from is moved."""
    layout = module.locate(x_BSD, **kwargs).layout
    assert layout is not None
    moved = layout._replace(block_pos_BC=layout.block_pos_BC + shift)
    return Positions(moved, module.rotary.tables(layout.pos_BS + shift))


@pytest.mark.parametrize("branch", BRANCH_ORDER)
@pytest.mark.parametrize(
    "changes",
    [*(dict(phi=phi) for phi in PHIS), *(dict(phi=phi, phi_pos_emb=True) for phi in PHIS_WITH_POS_EMB)]
    + [dict(phi=phi, rope_compressed="after") for phi in PHIS]
    + [dict(phi=phi, rope_compressed="before") for phi in PHIS if phi not in PHIS_OF_UNROTATED_KEYS],
    ids=str,
)
def test_shifting_all_positions_changes_nothing(branch, changes):
    module = make(branch, **changes)
    x = torch.randn(2, 150, 24)
    cu = torch.tensor([0, 40, 190, 300])
    with torch.no_grad():
        for kwargs in (dict(), dict(cu_doc_lens=cu)):
            here = module(x, **kwargs)
            assert here.abs().max() > 0.1
            there = module(x, **kwargs, where=located(module, x, SHIFT, **kwargs))
            torch.testing.assert_close(there, here, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("phi", PHIS_OF_UNROTATED_KEYS)
def test_an_operator_that_reads_channels_is_refused_after_a_rotation(phi):
    with pytest.raises(ConfigError, match="rope_compressed"):
        NSAAttention(**attention_args("tiny", phi=phi, rope_compressed="before"))


def test_auto_rotates_sums_with_fixed_weights_before_and_the_others_after():
    chosen = {phi: NSAAttention(**attention_args("tiny", phi=phi)).rope_compressed for phi in PHIS}
    assert chosen == {"avg": "before", "weighted": "before", "softmax": "after", "linear": "after", "mlp": "after"}
