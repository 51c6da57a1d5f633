"""Rotary position embedding, rotate-half convention.

B batch · S positions · H any head axes · K key dim
"""

import torch
from torch import Tensor


class RotaryEmbedding:
    """Angles pos / scale · base^(−2i/K). No state on a device: tables are made from the positions of each call."""

    def __init__(self, d_k: int, base: float, scale: float) -> None:
        self.d_k, self.base, self.scale = d_k, base, scale

    def tables(self, pos_BS: Tensor) -> tuple[Tensor, Tensor]:
        # fp64 angles: at position 1,000,000 an fp32 angle is off by up to 0.06 rad in the fastest pair.
        exponent = torch.arange(0, self.d_k, 2, dtype=torch.float64, device=pos_BS.device) / self.d_k
        angle = (pos_BS.double() / self.scale)[..., None] * self.base**-exponent
        return angle.cos(), angle.sin()


def rotate(x_BSHK: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + K/2) of the last axis; any number of axes may lie between S and K."""
    wide = torch.promote_types(x_BSHK.dtype, torch.float32)
    batch, length, half = tables[0].shape
    shape = (batch, length, *[1] * (x_BSHK.dim() - 3), half)
    cos, sin = (table.to(wide).view(shape) for table in tables)
    a, b = x_BSHK.to(wide).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BSHK.dtype)
