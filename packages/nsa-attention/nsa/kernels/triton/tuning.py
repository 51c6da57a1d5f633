"""Tile sizes of every kernel, by width of the rows and kind of GPU; head dimensions as tiles.

Checked ahead of time by the compile report.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton

from nsa.gpus import ARCHITECTURES, GpuArchitecture
from nsa.kernels.gpu_versions import architecture_of
from nsa.kernels.triton.tile_store import TileSizes as TileSizes

_NARROW = {
    "range_forward": TileSizes(64, 64, 4, 3),
    "range_dq": TileSizes(64, 32, 4, 2),
    "range_dkv": TileSizes(64, 64, 4, 2),
    "selected_forward": TileSizes(64, 64, 4, 2),
    "selected_backward": TileSizes(32, 64, 4, 2),
    "select": TileSizes(64, 64, 4, 2),
    "decode": TileSizes(64, 32, 4, 3),
}
_BROAD = {
    "range_forward": TileSizes(64, 32, 4, 2),
    "range_dq": TileSizes(32, 32, 4, 2),
    "range_dkv": TileSizes(32, 32, 4, 2),
    "selected_forward": TileSizes(64, 64, 4, 2),
    "selected_backward": TileSizes(32, 64, 8, 3),
    "select": TileSizes(16, 64, 4, 2),
    "decode": TileSizes(64, 32, 4, 3),
}
# Units that multiply 64 rows at a time: fewer rows would be left to the older instructions. They are so fast that 64
# rows wait for the cache, where many rows see the same keys.
_NARROW_OF_64 = {
    **_NARROW,
    "range_forward": TileSizes(128, 64, 8, 3),
    "range_dq": TileSizes(128, 32, 8, 2),
    "selected_backward": TileSizes(64, 64, 8, 2),
}
_BROAD_OF_64 = {
    **_BROAD,
    "range_dq": TileSizes(64, 32, 4, 2),
    "range_dkv": TileSizes(32, 64, 8, 2),
    "selected_backward": TileSizes(32, 64, 8, 2),
}
# 99 KiB of shared memory, and fewer registers to spare.
_BROAD_SMALL = {**_BROAD, "selected_forward": TileSizes(32, 64, 4, 2)}
# 102 scalar registers, where a mask of 64 lanes takes two: fewer keys at a time, hence fewer masks.
_NARROW_AMD = {
    **_NARROW,
    "range_forward": TileSizes(64, 32, 4, 2),
    "range_dkv": TileSizes(32, 64, 4, 2),
}
_BROAD_AMD = {
    **_BROAD,
    "selected_forward": TileSizes(32, 64, 4, 2),
    "selected_backward": TileSizes(16, 64, 4, 2),
}
_BY_GPU = {
    **dict.fromkeys(("sm_86", "sm_89"), (_NARROW, _BROAD_SMALL)),
    # Tiles of the others spill there with Triton 3.7.1: 16 bytes in select, 96 in selected_backward.
    "sm_120": (
        {**_NARROW, "select": TileSizes(32, 64, 4, 2)},
        {
            **_BROAD_SMALL,
            "selected_forward": TileSizes(32, 64, 8, 2),
            "selected_backward": TileSizes(16, 64, 8, 2),
        },
    ),
    "sm_90": (_NARROW_OF_64, _BROAD_OF_64),
    # With 64 rows the selection's newer products wait for their keys: the pipeline is worth more than they are.
    "sm_100": (
        {**_NARROW_OF_64, "select": TileSizes(32, 64, 4, 2), "selected_backward": TileSizes(64, 64, 4, 2)},
        _BROAD_OF_64,
    ),
}
# fp32 rows take twice the room, and without matrix units each lane holds whole rows of its product: small tiles, one
# stage, more warps where lanes would spill. It is for checking, so one table serves every GPU, the smallest included.
_NARROW_FP32 = {
    **dict.fromkeys(_NARROW, TileSizes(32, 32, 8, 1)),
    "selected_backward": TileSizes(16, 32, 4, 1),
    "select": TileSizes(16, 16, 4, 1),
    "decode": TileSizes(16, 32, 4, 1),
}
_BROAD_FP32 = {
    **dict.fromkeys(_NARROW, TileSizes(16, 16, 4, 1)),
    **dict.fromkeys(("range_dq", "selected_backward"), TileSizes(16, 16, 8, 1)),
}

# What timing may choose from, besides the table's own; those that spill on the GPU at hand are refused there.
_FORWARD = (
    TileSizes(64, 64, 4, 2), TileSizes(64, 32, 4, 2), TileSizes(64, 32, 4, 3), TileSizes(128, 64, 8, 3),
    TileSizes(128, 32, 8, 2),
    TileSizes(128, 64, 4, 3), TileSizes(32, 64, 4, 2), TileSizes(32, 32, 4, 2),
)  # fmt: skip
_DQ = (
    TileSizes(64, 64, 4, 2), TileSizes(64, 32, 4, 2), TileSizes(64, 64, 8, 2), TileSizes(128, 32, 8, 2), TileSizes(32,
    64, 4, 2),
    TileSizes(32, 32, 4, 2),
)  # fmt: skip
_DKV = (
    TileSizes(64, 64, 4, 2), TileSizes(32, 64, 4, 2), TileSizes(32, 64, 8, 2), TileSizes(64, 32, 4, 2), TileSizes(64,
    64, 8, 2),
    TileSizes(32, 32, 4, 2),
)  # fmt: skip
_WHOLE_BLOCKS = (  # of 64 keys: a block that is cut takes more slots
    TileSizes(64, 64, 4, 2), TileSizes(64, 64, 4, 3), TileSizes(32, 64, 4, 2), TileSizes(32, 64, 8, 2), TileSizes(32,
    64, 8, 3),
    TileSizes(64, 64, 8, 2), TileSizes(128, 64, 8, 2), TileSizes(16, 64, 4, 2),
)  # fmt: skip
_CANDIDATES = {
    "range_forward": _FORWARD,
    "range_dq": _DQ,
    "range_dkv": _DKV,
    "selected_forward": _WHOLE_BLOCKS,
    "selected_backward": _WHOLE_BLOCKS,
    "select": (
        TileSizes(64, 64, 4, 2), TileSizes(64, 64, 8, 2), TileSizes(32, 64, 4, 2), TileSizes(16, 64, 4, 2),
        TileSizes(64, 64, 4, 1),
    ),
}  # fmt: skip

_SELECTED_INTERPRETED = TileSizes(32, 16)  # small, so that blocks are cut
_INTERPRETED = {
    "decode": TileSizes(16, 16),
    "select": TileSizes(32, 64),
    "selected_forward": _SELECTED_INTERPRETED,
    "selected_backward": _SELECTED_INTERPRETED,
}


def choose(kernel: str, width: int, gpu: str | None = None, *, element_size: int = 2) -> TileSizes:
    """One choice per kernel, width of the widest row, bytes of its elements and GPU (the current one): the same bits
    on every call."""
    if triton.knobs.runtime.interpret:
        return _INTERPRETED.get(kernel, TileSizes(32, 32))
    if element_size > 2:
        return (_NARROW_FP32 if width <= 64 else _BROAD_FP32)[kernel]
    name = gpu_here() if gpu is None else gpu
    narrow, broad = (_NARROW_AMD, _BROAD_AMD) if name.startswith("gfx") else _BY_GPU.get(name, (_NARROW, _BROAD))
    return (narrow if width <= 64 else broad)[kernel]


def gpu_here() -> str:
    """The current GPU's architecture, e.g. sm_80 or gfx942; empty where there is no GPU."""
    return _architecture(torch.cuda.current_device()) if torch.cuda.is_available() else ""


def limits_here() -> GpuArchitecture:
    """Limits of the current GPU: from the table, or from the driver for one that is not in it."""
    if known := ARCHITECTURES.get(gpu_here()):
        return known
    properties: Any = torch.cuda.get_device_properties()
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return GpuArchitecture(gpu_here(), shared, shared)


@cache
def _architecture(index: int) -> str:
    return architecture_of(index).partition(":")[0]  # without an AMD GPU's features


def candidates(kernel: str) -> tuple[TileSizes, ...]:
    return _CANDIDATES[kernel]


class _HeadDim(NamedTuple):
    """A row's length as the sum of a power of two and a second one, which may be absent (0): 192 is 128 + 64, because
    256 spills."""

    n: int
    main: int
    rest: int


def split_width(n: int) -> _HeadDim:
    main = max(16, 1 << (n.bit_length() - 1))
    rest = n - main
    return _HeadDim(n, main, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0)


def widths(k: int, v: int) -> dict[str, int]:
    kw, vw = split_width(k), split_width(v)
    return dict(K=k, K1=kw.main, K2=kw.rest, V=v, V1=vw.main, V2=vw.rest)


def is_wide(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and triton.knobs.runtime.interpret
