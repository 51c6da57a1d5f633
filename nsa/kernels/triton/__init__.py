"""Triton backend: GPU kernels for any heads per group and packed documents, without atomics.

`{sliding,compressed,selected,mix}_{forward,backward}`, `select` and `compressed_and_select`, with the signatures of
`nsa.kernels.portable`, and `TritonDecoder`. The kernels, and Triton itself, are imported when one of them is first
called.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # a row is at most a power of two and the next smaller one
MOST_BLOCKS = 64  # chosen blocks that are kept in registers
PIECE = 1024
"""Queries of one window of keys that one program sums over."""
SLOT_BYTES = 2**30
QUERIES_OF_SLOTS = 2
"""Memory for partial results of queries and blocks: SLOT_BYTES, or this many times the bytes of the queries, whichever
is more. Spans of queries share it."""

_HOMES = {
    "sliding_forward": "range_attention",
    "sliding_backward": "range_attention",
    "compressed_forward": "range_attention",
    "compressed_backward": "range_attention",
    "selected_forward": "selected",
    "selected_backward": "selected",
    "select": "selection",
    "compressed_and_select": "selection",
    "TritonDecoder": "decode",
    "mix_forward": "mix",
    "mix_backward": "mix",
}


def why_not(branch: str, device: torch.device, dtype: torch.dtype, shape: Any) -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed (it comes with torch's GPU builds)"
    if device.type != "cuda" and not (device.type == "cpu" and _interpreted()):
        return f"it runs on a GPU, not on {device.type} (there only under TRITON_INTERPRET=1, for checking)"
    if dtype not in DTYPES:
        return f"it computes {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}, not {dtype}"
    if max(shape.d_k, shape.d_v) > WIDEST:
        return f"rows are at most {WIDEST} wide, not {max(shape.d_k, shape.d_v)}"
    if shape.geometry.n_sel > MOST_BLOCKS:
        return f"it chooses at most {MOST_BLOCKS} blocks, not {shape.geometry.n_sel}"
    return None


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(import_module(f"nsa.kernels.triton.{_HOMES[name]}"), name)


@torch.compiler.assume_constant_result
def _interpreted() -> bool:
    return bool(import_module("triton").knobs.runtime.interpret)
