"""Head dimensions as tiles: a width that is no power of two is split in two, 192 as 128 + 64, because 256 spills."""

from typing import NamedTuple

import torch
import triton


class HeadDim(NamedTuple):
    """A row's length as the sum of a power of two and a second one, which may be absent (0)."""

    n: int
    main: int
    rest: int


def split_width(n: int) -> HeadDim:
    main = max(16, 1 << (n.bit_length() - 1))
    rest = n - main
    return HeadDim(n, main, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0)


def widths(k: int, v: int) -> dict[str, int]:
    kw, vw = split_width(k), split_width(v)
    return dict(K=k, K1=kw.main, K2=kw.rest, V=v, V1=vw.main, V2=vw.rest)


def is_wide(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and triton.knobs.runtime.interpret
