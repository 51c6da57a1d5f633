"""Compression φ: pools blocks of `l` tokens with stride `d` of the keys or the values into one entry each.

B batch · T tokens · C blocks · l tokens in a block · G kv groups · X width of the stream · H hidden width
x any axes
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.attention_rules import INIT_STD, broken_phi_rules
from nsa.errors import require_rules
from nsa.kernels.precision import einsum

MLP_EXPANSION = 2


class BlockCompressor(nn.Module):
    """`avg`: the mean. `weighted`: a sum with a learned weight per place in the block. `softmax`: a sum whose weights
    are the softmax, over the block, of a learned score of each token. `linear`: one learned map of the whole block.
    `mlp`: two, with a GELU between.

    The score of `softmax` is w · x + mean(a ⊙ x²). For queries with mean w and variances 2a around it, in units of the
    attention's scale, its exponential is the weight that a key x has on average before normalisation: the pooled entry
    is what such queries would read of the block.

    Learned weights are separate per kv group. `pos_emb` adds a learned embedding of the place inside the block first.
    """

    def __init__(self, phi: str, l: int, d: int, n_groups: int, width: int, pos_emb: bool) -> None:
        super().__init__()
        require_rules(broken_phi_rules(phi, pos_emb))
        self.phi, self.l, self.d, self.width = phi, l, d, width
        hidden = MLP_EXPANSION * width
        self.pos_emb = nn.Parameter(torch.empty(l, n_groups, width)) if pos_emb else None
        self.w_in = nn.Parameter(torch.empty(n_groups, l, width, hidden)) if phi == "mlp" else None
        self.b_in = nn.Parameter(torch.empty(n_groups, hidden)) if phi == "mlp" else None
        self.w_out = nn.Parameter(torch.empty(n_groups, hidden, width)) if phi == "mlp" else None
        self.w_block = nn.Parameter(torch.empty(n_groups, l, width, width)) if phi == "linear" else None
        self.w_place = nn.Parameter(torch.empty(n_groups, l)) if phi == "weighted" else None
        self.w_score = nn.Parameter(torch.empty(n_groups, width)) if phi == "softmax" else None
        self.w_square = nn.Parameter(torch.empty(n_groups, width)) if phi == "softmax" else None

    def reset_parameters(self, std: float = INIT_STD) -> None:
        """std: of `pos_emb`. `weighted` and `linear` start as the mean, `softmax` close to it while keys are small:
        selection is sensible from the first step."""
        if self.pos_emb is not None:
            nn.init.normal_(self.pos_emb, std=std)
        if self.w_place is not None:
            nn.init.constant_(self.w_place, 1 / self.l)
        if self.w_score is not None and self.w_square is not None:
            nn.init.zeros_(self.w_score)
            nn.init.ones_(self.w_square)
        if self.w_block is not None:
            with torch.no_grad():
                self.w_block.copy_(torch.eye(self.width).expand_as(self.w_block) / self.l)
        if self.w_in is not None and self.b_in is not None and self.w_out is not None:
            nn.init.normal_(self.w_in, std=(self.l * self.width) ** -0.5)
            nn.init.zeros_(self.b_in)
            nn.init.normal_(self.w_out, std=self.w_out.shape[1] ** -0.5)

    def forward(self, raw_BTGX: Tensor, begin_BC: Tensor) -> Tensor:
        """Compress the l tokens that start at each `begin`: [B, C, G, X]."""
        block_BClGX = _blocks(raw_BTGX, begin_BC, self.l, self.d)
        dtype = block_BClGX.dtype
        if self.pos_emb is not None:
            block_BClGX = block_BClGX + self.own(self.pos_emb).to(dtype)
        if self.w_place is not None:
            return einsum("bclgx,gl->bcgx", block_BClGX, self.own(self.w_place).to(dtype))
        if self.w_score is not None and self.w_square is not None:
            wide_BTGX = raw_BTGX.to(torch.promote_types(raw_BTGX.dtype, torch.float32))
            w_score, w_square = self.own(self.w_score), self.own(self.w_square)
            score_BTG = (wide_BTGX * (w_score + wide_BTGX * (w_square / self.width))).sum(-1)
            share_BClG = _blocks(score_BTG, begin_BC, self.l, self.d).softmax(2)
            return einsum("bclgx,bclg->bcgx", block_BClGX, share_BClG.to(dtype))
        if self.w_block is not None:
            return einsum("bclgx,glxy->bcgy", block_BClGX, self.own(self.w_block).to(dtype))
        if self.w_in is not None and self.b_in is not None and self.w_out is not None:
            hidden_BCGH = einsum("bclgx,glxh->bcgh", block_BClGX, self.own(self.w_in).to(dtype))
            hidden_BCGH = F.gelu(hidden_BCGH + self.own(self.b_in).to(dtype))
            return einsum("bcgh,ghy->bcgy", hidden_BCGH, self.own(self.w_out).to(dtype))
        return block_BClGX.mean(2)

    def own(self, parameter: Tensor) -> Tensor:
        """The part of a parameter that belongs to the groups computed here: all of it, unless it is sharded."""
        return parameter

    def flops_per_block(self) -> int:
        """Multiply-adds count two; all groups."""
        of_sum = 0 if self.w_place is None else 2 * self.w_place.numel() * self.width
        if self.w_score is not None:
            of_sum = 3 * 2 * self.w_score.numel() * self.l  # two products of the score, then the sum
        return of_sum + sum(2 * w.numel() for w in (self.w_in, self.w_out, self.w_block) if w is not None)


def mean_of_blocks(raw_BTGX: Tensor, begin_BC: Tensor, l: int, d: int) -> Tensor:
    """The mean of the l tokens from each `begin` on: [B, C, G, X]."""
    return _blocks(raw_BTGX, begin_BC, l, d).mean(2)


def _blocks(raw_BTxx: Tensor, begin_BC: Tensor, l: int, d: int) -> Tensor:
    """The tokens of every block, or a score of each. Gradients add up where blocks overlap, on a GPU in any order: two
    have the same sum either way, but of three or more only blocks that share no token may be gathered at a time."""
    if l == raw_BTxx.shape[1] and begin_BC.shape[1] == 1:
        return raw_BTxx[:, None]
    turns, n_blocks = -(-l // d), begin_BC.shape[1]
    if n_blocks == 0:  # rows shorter than l: l / d turns would gather nothing
        return raw_BTxx[:, :0, None].expand(-1, -1, l, *raw_BTxx.shape[2:])
    if turns <= 2:
        return _gather(raw_BTxx, begin_BC, l)
    whole_BC = F.pad(begin_BC, (0, -n_blocks % turns))
    parts = [_gather(raw_BTxx, whole_BC[:, turn::turns], l) for turn in range(turns)]
    blocks = torch.stack(parts, 2).flatten(1, 2)
    if torch.compiler.is_exporting():  # whether a slice is all of it depends on the length, and so would the graph
        return blocks.index_select(1, torch.arange(n_blocks, device=blocks.device))
    return blocks[:, :n_blocks]


def _gather(raw_BTxx: Tensor, begin_BC: Tensor, l: int) -> Tensor:
    B, T = raw_BTxx.shape[:2]
    token_BCl = begin_BC[..., None] + torch.arange(l, device=begin_BC.device)
    row_BCl = token_BCl + torch.arange(B, device=begin_BC.device)[:, None, None] * T
    return raw_BTxx.flatten(0, 1).index_select(0, row_BCl.flatten()).view(*row_BCl.shape, *raw_BTxx.shape[2:])
