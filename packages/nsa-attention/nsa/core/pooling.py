"""Table of the pooling operators φ: a block of `l` tokens of a stream becomes one entry.

One row holds all that is particular to a φ: parameters and their start, forward pass, cost, and what rules, planning
and conversion need to know. This file needs no torch: forward passes are written in methods of `BlockCompressor`.

B batch · T tokens · C blocks · l tokens in a block · G kv groups · X width of the stream · H hidden width
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from nsa.core.compression import BlockCompressor

_MLP_EXPANSION = 2


@dataclass(frozen=True)
class PoolingParameter:
    """A learned parameter of φ, one for each kv group."""

    shape: tuple[int, ...]
    start: "Callable[[Tensor], object]"
    """Sets the initial values, in place."""
    decays: bool = True
    """Whether weight decay applies."""


def _no_parameters(l: int, width: int) -> dict[str, PoolingParameter]:
    return {}


@dataclass(frozen=True, kw_only=True)
class PoolingOperator:
    """A row of the table. Functions of (l, width) are of one block and one kv group."""

    pool: "Callable[[BlockCompressor, Tensor, Tensor, Tensor], Tensor]"
    """(compressor, its blocks [B, C, l, G, X], the stream [B, T, G, X], begin of each block [B, C]) → [B, C, G, X]."""
    parameters: Callable[[int, int], Mapping[str, PoolingParameter]] = _no_parameters
    flops: Callable[[int, int], int] = lambda l, width: 0
    """Multiply-adds count two; sums without weights count nothing."""
    is_mean: bool = False
    """The C++ decoding step pools so by itself."""
    sums: bool = False
    """An entry is a sum of its block's tokens, each with one weight: fused decoding steps know how to compute it."""
    needs_unrotated_keys: bool = False
    """The entry depends on the channels of each key, which does not commute with their rotation."""
    takes_pos_emb: bool = False
    """A learned embedding of the place in the block may be added first."""
    starts_near_mean: bool = False
    """At its start it can stand in for the mean in a converted dense model."""
    scores_tokens: bool = False
    """The forward pass saves a score of every token, and its softmax over every block."""
    hidden: Callable[[int], int] = lambda width: 0
    """Numbers between two maps, each saved before and after its activation."""

    @property
    def has_weights(self) -> bool:
        return bool(self.parameters(1, 1))


def _mean(phi: "BlockCompressor", block_BClGX: "Tensor", raw_BTGX: "Tensor", begin_BC: "Tensor") -> "Tensor":
    return block_BClGX.mean(2)


def _weighted(phi: "BlockCompressor", block_BClGX: "Tensor", raw_BTGX: "Tensor", begin_BC: "Tensor") -> "Tensor":
    """A sum with a learned weight per place in the block."""
    return phi.product("bclgx,gl->bcgx", block_BClGX, phi.weight("w_place", block_BClGX.dtype))


def _softmax(phi: "BlockCompressor", block_BClGX: "Tensor", raw_BTGX: "Tensor", begin_BC: "Tensor") -> "Tensor":
    """A sum whose weights are the softmax, over the block, of a learned score of each token.

    The score is w · x + mean(a ⊙ x²). For queries with mean w and variances 2a around it, in units of the attention's
    scale, its exponential is the weight that a key x has on average before normalisation: the pooled entry is what such
    queries would read of the block.
    """
    wide_BTGX = phi.widened(raw_BTGX)
    score_BTG = (wide_BTGX * (phi.weight("w_score") + wide_BTGX * (phi.weight("w_square") / phi.width))).sum(-1)
    share_BClG = phi.blocks(score_BTG, begin_BC).softmax(2)
    return phi.product("bclgx,bclg->bcgx", block_BClGX, share_BClG.to(block_BClGX.dtype))


def _linear(phi: "BlockCompressor", block_BClGX: "Tensor", raw_BTGX: "Tensor", begin_BC: "Tensor") -> "Tensor":
    return phi.product("bclgx,glxy->bcgy", block_BClGX, phi.weight("w_block", block_BClGX.dtype))


def _mlp(phi: "BlockCompressor", block_BClGX: "Tensor", raw_BTGX: "Tensor", begin_BC: "Tensor") -> "Tensor":
    dtype = block_BClGX.dtype
    hidden_BCGH = phi.product("bclgx,glxh->bcgh", block_BClGX, phi.weight("w_in", dtype))
    hidden_BCGH = phi.gelu(hidden_BCGH + phi.weight("b_in", dtype))
    return phi.product("bcgh,ghy->bcgy", hidden_BCGH, phi.weight("w_out", dtype))


def _mlp_parameters(l: int, width: int) -> dict[str, PoolingParameter]:
    hidden = _MLP_EXPANSION * width
    return {
        "w_in": PoolingParameter((l, width, hidden), lambda w: w.normal_(std=(l * width) ** -0.5)),
        "b_in": PoolingParameter((hidden,), lambda b: b.zero_(), decays=False),
        "w_out": PoolingParameter((hidden, width), lambda w: w.normal_(std=hidden**-0.5)),
    }


OPERATORS: dict[str, PoolingOperator] = {
    "avg": PoolingOperator(pool=_mean, is_mean=True, sums=True, starts_near_mean=True),
    "weighted": PoolingOperator(
        pool=_weighted,
        parameters=lambda l, width: {"w_place": PoolingParameter((l,), lambda w: w.fill_(1 / l), decays=False)},
        flops=lambda l, width: 2 * l * width,
        sums=True,
        starts_near_mean=True,
    ),
    "softmax": PoolingOperator(  # close to the mean at its start, while keys are small
        pool=_softmax,
        parameters=lambda l, width: {
            "w_score": PoolingParameter((width,), lambda w: w.zero_(), decays=False),
            "w_square": PoolingParameter((width,), lambda w: w.fill_(1), decays=False),
        },
        flops=lambda l, width: 3 * 2 * l * width,  # two products of the score, then the sum
        needs_unrotated_keys=True,
        sums=True,
        starts_near_mean=True,
        scores_tokens=True,
    ),
    "linear": PoolingOperator(
        pool=_linear,
        parameters=lambda l, width: {
            "w_block": PoolingParameter((l, width, width), lambda w: w.zero_().diagonal(dim1=-2, dim2=-1).fill_(1 / l))
        },
        flops=lambda l, width: 2 * l * width * width,
        needs_unrotated_keys=True,
        takes_pos_emb=True,
    ),
    "mlp": PoolingOperator(
        pool=_mlp,
        parameters=_mlp_parameters,
        flops=lambda l, width: 2 * _MLP_EXPANSION * width * width * (l + 1),
        needs_unrotated_keys=True,
        takes_pos_emb=True,
        hidden=lambda width: _MLP_EXPANSION * width,
    ),
}
"""Every φ by its name, as `phi` takes it. All learned ones but `mlp` start as the mean, or close to it: selection is
sensible from the first step."""


def phis(fact: Callable[[PoolingOperator], bool]) -> tuple[str, ...]:
    """Names of the φ of which this is true."""
    return tuple(name for name, operator in OPERATORS.items() if fact(operator))


def undecayed_parameters() -> tuple[str, ...]:
    """Names of the parameters of φ without weight decay."""
    rows = [operator.parameters(1, 1) for operator in OPERATORS.values()]
    return ("pos_emb", *(name for row in rows for name, parameter in row.items() if not parameter.decays))


_AXES = {name: len(each.shape) for row in OPERATORS.values() for name, each in row.parameters(1, 1).items()}
"""Axes of every parameter of φ in one kv group."""


def rows_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of a parameter of φ stored as rows: all its axes but the last in one, or its only two in one. The shape
    itself, if it is stored so already.

    FSDP cuts a parameter along its first axis and pads one that is shorter than the number of ranks: rows are many, kv
    groups few.
    """
    if name not in _AXES or len(shape) != 1 + _AXES[name]:
        return tuple(shape)
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 2 else (prod(shape),)
