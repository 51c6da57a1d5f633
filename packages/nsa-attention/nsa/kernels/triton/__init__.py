"""Triton backend: GPU kernels for any heads per group and packed documents, without atomics.

The functions of `nsa.kernels.interface.BackendKernels`, the optional ones included, and `TritonDecoder`. The kernels,
and Triton itself, are imported when one of them is first called.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels.interface import BranchInputs, Gradients, constant_when_traced
from nsa.kernels.triton_environment import package_fault, triton_faults

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
    "compressed_and_select": "selection",
    "TritonDecoder": "decode",
    "mix_forward": "mix",
    "mix_backward": "mix",
    "layer_forward": "layer",
    "layer_backward": "layer",
    "index_length": "layer",
}


def why_not(branch: str, device: torch.device, dtype: torch.dtype, shape: Any) -> str | None:
    if find_spec("triton") is None:
        return str(package_fault())
    if device.type != "cuda" and not (device.type == "cpu" and _interpreted()):
        return f"it runs on a GPU, not on {device.type} (there only under TRITON_INTERPRET=1, for checking)"
    if dtype not in DTYPES:
        return f"it computes {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}, not {dtype}"
    if max(shape.d_k, shape.d_v) > WIDEST:
        return f"rows are at most {WIDEST} wide, not {max(shape.d_k, shape.d_v)}"
    if shape.geometry.n_sel > MOST_BLOCKS:
        return f"it chooses at most {MOST_BLOCKS} blocks, not {shape.geometry.n_sel}"
    if device.type == "cuda" and torch.cuda.is_available() and (faults := triton_faults("cuda")):
        return f"Triton cannot run on this machine: {'; '.join(map(str, faults))}"
    return None


def attend_forward(x: BranchInputs) -> tuple[Tensor, Tensor]:
    if x.branch == "selected":
        from nsa.kernels.triton.selected import selected_forward

        return selected_forward(x)
    from nsa.kernels.triton.range_attention import range_forward

    return range_forward(x)


def attend_backward(
    x: BranchInputs, out_BSGRV: Tensor, lse_BSGR: Tensor, dout_BSGRV: Tensor, dlse_BSGR: Tensor | None
) -> Gradients:
    if x.branch == "selected":
        from nsa.kernels.triton.selected_backward import selected_backward

        return selected_backward(x, out_BSGRV, lse_BSGR, dout_BSGRV, dlse_BSGR)
    from nsa.kernels.triton.range_attention import range_gradients

    return range_gradients(x, out_BSGRV, lse_BSGR, dout_BSGRV, dlse_BSGR)


def select(
    q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, scale: float
) -> Tensor:
    from nsa.kernels.triton.selection import select_blocks

    return select_blocks(q_BSGRK, k_BCGK, pos_BS, first_BS, geometry, scale)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(import_module(f"nsa.kernels.triton.{_HOMES[name]}"), name)


@constant_when_traced
def _interpreted() -> bool:
    try:
        return bool(import_module("triton").knobs.runtime.interpret)
    except (ImportError, OSError):
        return False
