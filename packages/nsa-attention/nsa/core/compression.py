"""Compression φ: pools blocks of `l` tokens with stride `d` of the keys or the values into one entry each.

B batch · T tokens · C blocks · l tokens in a block · G kv groups · X width of the stream · x any axes
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.core.attention_config import INIT_STD, AttentionConfig
from nsa.core.initial_values import draw
from nsa.core.pooling import OPERATORS, PoolingOperator, PoolingParameter, rows_shape
from nsa.kernels.precision import einsum


class BlockCompressor(nn.Module):
    """A pooling operator of `nsa.core.pooling` with its parameters, which are separate per kv group.

    `pos_emb` adds a learned embedding of the place inside the block first. The methods that `phi` names are what the
    operators' forward passes are written in.
    """

    def __init__(self, phi: str, l: int, d: int, n_groups: int, width: int, pos_emb: bool) -> None:
        super().__init__()
        self.phi, self.l, self.d, self.n_groups, self.width = phi, l, d, n_groups, width
        self.pos_emb = nn.Parameter(torch.empty(l, n_groups, width)) if pos_emb else None
        self.own: Callable[[Tensor], Tensor] = _whole
        """Gives the part of a parameter that belongs to the groups computed here; tensor parallelism sets it."""
        self._shapes = {name: parameter.shape for name, parameter in self.operator.parameters(l, width).items()}
        for name, shape in self._shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(n_groups, *shape)))

    @classmethod
    def of_config(cls, config: AttentionConfig, width: int) -> Self:
        """The compressor of a layer's keys or values, which have this width."""
        c, g = config.compression, config.geometry
        return cls(c.phi, g.l, g.d, config.n_kv_groups, width, c.phi_pos_emb)

    @property
    def operator(self) -> PoolingOperator:
        return OPERATORS[self.phi]

    def reset_parameters(self, std: float = INIT_STD) -> None:
        """std: of `pos_emb`."""
        if self.pos_emb is not None:
            draw(self.pos_emb, partial(nn.init.normal_, std=std))
        for name, parameter in self.operator.parameters(self.l, self.width).items():
            draw(self.get_parameter(name), partial(_start, parameter))

    def store_as_rows(self) -> None:
        for name in self._shapes:
            parameter = self.get_parameter(name)
            rows = parameter.detach().view(rows_shape(name, parameter.shape))
            self.register_parameter(name, nn.Parameter(rows, requires_grad=parameter.requires_grad))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        """Take parameters in both forms, as rows or not."""
        for name in self._shapes:
            shape, value = self.get_parameter(name).shape, state_dict.get(f"{prefix}{name}")
            if value is None or value.shape == shape:
                continue
            if rows_shape(name, value.shape) == rows_shape(name, shape):
                state_dict[f"{prefix}{name}"] = value.view(shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, raw_BTGX: Tensor, begin_BC: Tensor) -> Tensor:
        """Compress the l tokens that start at each `begin`: [B, C, G, X]."""
        block_BClGX = _blocks(raw_BTGX, begin_BC, self.l, self.d)
        if self.pos_emb is not None:
            block_BClGX = block_BClGX + self.own(self.pos_emb).to(block_BClGX.dtype)
        return self.operator.pool(self, block_BClGX, raw_BTGX, begin_BC)

    def weight(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        parameter, shape = self.own(getattr(self, name)), self._shapes[name]
        if parameter.dim() != 1 + len(shape):  # stored as rows
            parameter = parameter.view(-1, *shape)
        return parameter if dtype is None else parameter.to(dtype)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return tuple(map(self.weight, self._shapes))

    def blocks(self, of_tokens: Tensor, begin_BC: Tensor) -> Tensor:
        """Values of tokens, by block."""
        return _blocks(of_tokens, begin_BC, self.l, self.d)

    @staticmethod
    def widened(x: Tensor) -> Tensor:
        """At least in fp32."""
        return x.to(torch.promote_types(x.dtype, torch.float32))

    product = staticmethod(einsum)
    gelu = staticmethod(F.gelu)

    def flops_per_block(self) -> int:
        """FLOPs of one block, all groups."""
        return self.n_groups * self.operator.flops(self.l, self.width)


def store_as_rows(model: nn.Module) -> None:
    """Store the parameters of all compressors of a model in the shapes of `rows_shape`, so that FSDP need not pad them.

    What is computed stays, and `load_state_dict` takes both forms. Call it before parameters are sharded.
    """
    for module in model.modules():
        if isinstance(module, BlockCompressor):
            module.store_as_rows()


def pooling_shapes(config: AttentionConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a layer's compressors, by their names in the layer, not stored as rows."""
    widths = {"phi_k": config.d_k, "phi_v": config.d_v}
    operator, l = config.compression.operator, config.geometry.l
    return {
        f"{part}.{name}": (config.n_kv_groups, *parameter.shape)
        for part, width in widths.items()
        for name, parameter in operator.parameters(l, width).items()
    }


def _start(parameter: PoolingParameter, whole: Tensor) -> object:
    return parameter.start(whole.view(-1, *parameter.shape))


def _whole(parameter: Tensor) -> Tensor:
    return parameter


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
