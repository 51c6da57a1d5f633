"""Rotary position embedding (RoPE), rotate-half convention, with linear, llama3 and yarn scaling.

B batch · S positions · H any head axes · K key dim · F frequencies: half of the channels that are rotated
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.core.attention_config import RopeConfig, yarn_betas
from nsa.errors import ConfigError
from nsa.kernels.precision import widest_float

Tables = tuple[Tensor, Tensor]
"""Cosines and sines of the angles: [B, S, F]."""


class RotaryEmbedding:
    """Angles pos / scale · frequency, where frequency i is base^(−2i/rotary_dim), changed by the scaling.

    With angles in fp32 and on a CPU the tables are bit for bit those of Transformers. Those of a layer without rotation
    have no columns.
    """

    def __init__(self, d_k: int, rope: RopeConfig) -> None:
        plain = rope.layer != "scaled"
        self.base, self.scale = rope.base, 1.0 if plain else rope.scale
        self.scaling: dict[str, Any] = {"rope_type": "default"} if plain else rope.checked_scaling
        self.rotary_dim = 0 if rope.layer == "none" else rope.rotary_dim or d_k
        self.dtype = torch.float64 if rope.angles == "fp64" else torch.float32
        self.attention_factor = _yarn_attention_factor(self.scaling) if self.scaling["rope_type"] == "yarn" else 1.0
        self.key = (self.rotary_dim, self.base, self.scale, rope.angles, *sorted(self.scaling.items()))
        """Equal for rotations that have equal tables."""
        self._device_tables: dict[torch.device, Tensor] = {}
        self._device_frequencies: dict[torch.device, Tensor] = {}

    def tables(self, pos_BS: Tensor, dtype: torch.dtype = torch.float64, limit: int | None = None) -> Tables:
        """Cosines and sines in `dtype`, rounded once from that of the angles. `limit`: if known, what every position
        is below.

        On an accelerator they are looked up in a table made on the CPU, because fp64 is slow or missing there. Without
        a limit, or while torch.compile traces, they are computed from the positions.
        """
        device = pos_BS.device
        if self.rotary_dim == 0:
            none = torch.empty(*pos_BS.shape, 0, dtype=dtype, device=device)
            return none, none
        if device.type == "cpu" or dtype == torch.float64 or torch.compiler.is_compiling():
            return self._computed(pos_BS, dtype)
        if limit is not None:
            cos, sin = F.embedding(pos_BS, self._device_table(limit, device)).to(dtype).chunk(2, -1)
            return cos, sin
        if widest_float(device) != torch.float64:
            cos, sin = self._computed(pos_BS.cpu(), dtype)
            return cos.to(device), sin.to(device)
        return self._computed(pos_BS, dtype)

    def _computed(self, pos_BS: Tensor, dtype: torch.dtype) -> Tables:
        # In fp64: at position 1,000,000 an fp32 angle is off by up to 0.06 rad in the fastest pair.
        pos_BS = pos_BS.to(self.dtype)
        if self.scale != 1:
            pos_BS = pos_BS / self.scale
        angle_BSF = pos_BS[..., None] * self._known_frequencies(pos_BS.device)
        cos, sin = angle_BSF.cos(), angle_BSF.sin()
        if self.attention_factor != 1:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos.to(dtype), sin.to(dtype)

    def _known_frequencies(self, device: torch.device) -> Tensor:
        """`frequencies`, computed once per device."""
        if torch.compiler.is_compiling():
            return self.frequencies(device)
        known = self._device_frequencies.get(device)
        if known is None:
            with torch.inference_mode(False):  # what is kept must serve training too
                known = self.frequencies(device)
            if type(known) is Tensor:  # not the stand-ins of a tracer
                self._device_frequencies[device] = known
        return known

    def _device_table(self, limit: int, device: torch.device) -> Tensor:
        """Cosines and sines in fp32 for at least `limit` positions: [positions, 2 F], so that one lookup gives both."""
        table = self._device_tables.get(device)
        if table is None or table.shape[0] < limit:
            with torch.inference_mode(False):  # what is kept must serve training too
                pos_S = torch.arange(1 << (limit - 1).bit_length(), device="cpu")
                table = torch.cat(self._computed(pos_S, torch.float32), -1).to(device, non_blocking=True)
            if type(table) is Tensor:  # not the stand-ins of a tracer
                self._device_tables[device] = table
        return table

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians per position of each pair: [F], in the precision of the angles."""
        if self.dtype == torch.float32:
            return self._fp32_frequencies(device)
        exponent_F = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=device) / self.rotary_dim
        plain_F, s = self.base**-exponent_F, self.scaling
        if s["rope_type"] == "default":
            return plain_F
        slow_F = plain_F / s["factor"]
        if s["rope_type"] == "linear":
            return slow_F
        if s["rope_type"] == "llama3":
            turns_F = s["original_max_position_embeddings"] * plain_F / (2 * math.pi)
            keep_F = (turns_F - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        else:
            first, last = self._yarn_range()
            keep_F = 1 - (torch.arange(self.rotary_dim // 2, device=device).double() - first) / (last - first)
        keep_F = keep_F.clamp(0, 1)
        return slow_F * (1 - keep_F) + plain_F * keep_F

    def _fp32_frequencies(self, device: torch.device) -> Tensor:
        """Compute in Transformers' order of operations, on which the last bits depend."""
        s, exponent_F = self.scaling, torch.arange(0, self.rotary_dim, 2, device=device).float() / self.rotary_dim
        radian_F = self.base**exponent_F  # positions per radian
        plain_F = 1.0 / radian_F
        if s["rope_type"] == "default":
            return plain_F
        if s["rope_type"] == "linear":
            return plain_F / s["factor"]
        if s["rope_type"] == "yarn":
            first, last = self._yarn_range()
            pair_F = torch.arange(self.rotary_dim // 2, device=device).float()
            keep_F = 1 - ((pair_F - first) / (last - first)).clamp(0, 1)
            return (1 - keep_F) * (1.0 / (s["factor"] * radian_F)) + keep_F * plain_F
        length, low, high = (
            s[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        turn_F = 2 * math.pi / plain_F  # positions per turn
        keep_F = (length / turn_F - low) / (high - low)
        between_F = (1 - keep_F) * plain_F / s["factor"] + keep_F * plain_F
        slow_or_between_F = torch.where(turn_F > length / low, plain_F / s["factor"], between_F)
        return torch.where(turn_F < length / high, plain_F, slow_or_between_F)

    def _yarn_range(self) -> tuple[float, float]:
        """Pairs up to the first keep their frequency, pairs from the last on are slowed down by `factor`."""
        s = self.scaling

        def pair(turns: float) -> float:
            """The pair that makes so many turns within the original length."""
            length = s["original_max_position_embeddings"]
            return self.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        first, last = (pair(turns) for turns in yarn_betas(s))
        if s.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.rotary_dim - 1)
        return first, last + 0.001 if first == last else last


def rotate(x_BSHK: Tensor, tables: Tables) -> Tensor:
    """Rotate the pairs (i, i + F) of the first 2 F channels of the last axis; the rest stays as it is. Any number of
    axes may lie between S and K."""
    batch, length, half = tables[0].shape
    if half == 0:
        return x_BSHK
    if 2 * half < x_BSHK.shape[-1]:
        return torch.cat((rotate(x_BSHK[..., : 2 * half], tables), x_BSHK[..., 2 * half :]), dim=-1)
    wide = torch.promote_types(x_BSHK.dtype, torch.float32)
    shape = (batch, length, *[1] * (x_BSHK.dim() - 3), half)
    cos, sin = (table.to(wide).view(shape) for table in tables)
    a, b = x_BSHK.to(wide).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BSHK.dtype)


def given_tables(cos_sin: Sequence[Tensor], batch: int, length: int, rotary_dim: int) -> Tables:
    """Tables made elsewhere as [B, S, F]: the caller's may have 2 F columns (both halves alike) and no batch axis. A
    layer without RoPE ignores them."""
    half, parts = rotary_dim // 2, []
    for name, x in zip(("cos", "sin"), cos_sin, strict=True):
        fits = x.dim() in (2, 3) and x.shape[-2] == length and (half == 0 or x.shape[-1] in (half, rotary_dim))
        if not fits:
            raise ConfigError(
                f"position_embeddings: {name} has shape {list(x.shape)} and the input {batch} rows of {length} tokens "
                f"with {rotary_dim} rotated channels. Pass [{batch}, {length}, {half}], or {rotary_dim} columns whose "
                f"halves are equal."
            )
        if x.dim() == 3 and x.shape[0] not in (1, batch):
            raise ConfigError(f"position_embeddings: {name} has {x.shape[0]} rows and the input {batch}. Pass as many.")
        parts.append(x[..., :half].expand(batch, length, half))
    return parts[0], parts[1]


def _yarn_attention_factor(s: Mapping[str, Any]) -> float:
    """Factor by which yarn multiplies cosines and sines."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(s["factor"]) + 1 if s["factor"] > 1 else 1.0

    if "attention_factor" in s:
        return float(s["attention_factor"])
    if s.get("mscale") and s.get("mscale_all_dim"):
        return mscale(s["mscale"]) / mscale(s["mscale_all_dim"])
    return mscale(1.0)
