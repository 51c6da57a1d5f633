"""Layout of packed documents: each token's position, and where its document and its blocks begin on the key axes.

B batch · S tokens · C compressed blocks
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.errors import ConfigError
from nsa.geometry import Geometry


class DocumentLayout(NamedTuple):
    pos_BS: Tensor
    """Position of each token in its own document."""
    start_BS: Tensor
    """Index of that document's position 0 on the axis of raw keys. Where all tokens of a row have one, it is repeated
    by a stride of 0: a kernel knows it then without reading values."""
    first_BS: Tensor
    """Index of that document's compressed block 0 on the axis of compressed keys."""
    begin_BC: Tensor
    """Index on the raw axis of each compressed block's first token."""
    block_pos_BC: Tensor
    """Position of that token in its own document."""


def plain_layout(batch: int, length: int, geometry: Geometry, device: torch.device) -> DocumentLayout:
    """Every row is one document."""
    pos_BS = torch.arange(length, device=device).expand(batch, -1)
    zero_BS = torch.zeros(1, 1, dtype=torch.int64, device=device).expand(batch, length)  # one start, stored once
    begin_BC = torch.arange(geometry.n_compressed(length), device=device).mul(geometry.d).expand(batch, -1)
    return DocumentLayout(pos_BS, zero_BS, zero_BS, begin_BC, begin_BC)


def packed_layout(cu_doc_lens: Tensor, length: int, geometry: Geometry, name: str = "cu_doc_lens") -> DocumentLayout:
    """One row holding documents end to end, each with block grids of its own.

    The number of compressed slots depends on the length alone, so that shapes stay static whatever is packed; slots
    that no document fills come last and no query sees them. `name`: the argument, as the caller spells it.
    """
    _check_documents(cu_doc_lens, length, name)
    cu = cu_doc_lens.long()
    cu_blocks = torch.nn.functional.pad(((cu.diff() - geometry.l) // geometry.d + 1).clamp(min=0).cumsum(0), (1, 0))
    token_S = torch.arange(length, device=cu.device)
    doc_S = torch.searchsorted(cu[1:], token_S, right=True)
    block_C = torch.arange(geometry.n_compressed(length), device=cu.device)
    doc_C = torch.searchsorted(cu_blocks[1:], block_C, right=True).clamp(max=cu.numel() - 2)
    block_pos_C = (block_C - cu_blocks[doc_C]) * geometry.d
    begin_C = (cu[doc_C] + block_pos_C).clamp(0, max(0, length - geometry.l))
    start_S = cu[doc_S]
    rows = (token_S - start_S, start_S, cu_blocks[doc_S], begin_C, block_pos_C)
    return DocumentLayout(*(row[None] for row in rows))


def _check_documents(cu_doc_lens: Tensor, length: int, name: str) -> None:
    if cu_doc_lens.dim() != 1 or cu_doc_lens.numel() < 2 or cu_doc_lens.dtype not in (torch.int32, torch.int64):
        raise ConfigError(
            f"{name} must be a 1-d int32 tensor of cumulative document lengths, 0 first; it is "
            f"{cu_doc_lens.dtype} of shape {tuple(cu_doc_lens.shape)}. For documents of 3 and 5 tokens pass [0, 3, 8]."
        )
    # On an accelerator reading the values would stall it at every step; in a compiled graph it would break the graph.
    if cu_doc_lens.device.type == "cpu" and not torch.compiler.is_compiling():
        values = cu_doc_lens.tolist()
        if values[0] != 0 or values[-1] != length or any(b < a for a, b in pairwise(values)):
            raise ConfigError(
                f"{name} must rise from 0 to the number of tokens ({length}), and is {values[:4]} … {values[-1]}. "
                f"Pass the cumulative lengths of the documents packed into the batch, rows end to end."
            )
