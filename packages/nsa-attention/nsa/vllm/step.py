"""A scheduler step as the attention needs it: which requests decode, where entries are written, which blocks end.

Computed once for all layers, on the host but for the tables, without reading anything back from the device.

N tokens of the step · B decoding requests · E compressed entries completed in the step · l tokens of their blocks
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nsa.geometry import Geometry
from nsa.vllm.page_streams import StreamTokens

Slots = tuple[Tensor, Tensor]
"""Blocks and places in them."""


class Chunk(NamedTuple):
    """New tokens of a request that is not decoding one token: a prompt, a part of one, or drafts to verify."""

    request: int
    first: int
    """Its first token among the step's tokens."""
    begin: int
    end: int
    """Positions in the request."""


class StepBuffers:
    """Tables and positions of decoding requests at addresses that stay: decoders keep them."""

    def __init__(self, n_requests: int, first_entry: int, device: torch.device) -> None:
        """first_entry: the place of compressed entry 0, where its block ends."""
        self.pos_B1 = torch.zeros(n_requests, 1, dtype=torch.int64, device=device)
        self.zero_B1 = torch.zeros_like(self.pos_B1)
        self.zero_B = torch.zeros(n_requests, dtype=torch.int64, device=device)
        self.first_entry_B1 = torch.full_like(self.pos_B1, first_entry)
        self.tables: dict[str, Tensor] = {}

    def table(self, name: str, given_BP: Tensor, rows: Tensor | None) -> None:
        """Keep a step's table of the decoding requests."""
        table = self.tables.get(name)
        if table is None or table.shape[1] != given_BP.shape[1]:
            table = self.tables[name] = given_BP.new_zeros(len(self.pos_B1), given_BP.shape[1])
        chosen = given_BP if rows is None else given_BP.index_select(0, rows)
        table[: len(chosen)].copy_(chosen)


class PagedStep:
    """streams: of `selected`, and of `window` and `tail` where they have pages of their own."""

    def __init__(
        self,
        streams: Mapping[str, StreamTokens],
        block_size: int,
        geometry: Geometry,
        buffers: StepBuffers,
        decode: bool,
    ) -> None:
        selected = streams["selected"]
        device = selected.table.device
        begins, lengths = selected.begins.numpy().astype(np.int64), selected.lengths.numpy().astype(np.int64)
        new = np.diff(begins)
        self.streams, self.block_size = streams, block_size
        self.n_tokens = int(begins[-1])
        single = (new == 1) & decode
        rows_B = np.flatnonzero(single)
        self.n_decoding = len(rows_B)
        self.decodes_all = self.n_decoding == len(new)
        """Every request decodes one token: the step's tokens are the rows of the batch."""
        self.chunks = [
            Chunk(int(r), int(begins[r]), int(lengths[r] - new[r]), int(lengths[r]))
            for r in np.flatnonzero((new > 0) & ~single)
        ]
        self.decode_token_B = None if self.decodes_all else torch.from_numpy(begins[rows_B]).to(device)
        if self.n_decoding:
            pos_B = torch.from_numpy(lengths[rows_B] - 1)
            buffers.pos_B1[: self.n_decoding, 0].copy_(pos_B)
            chosen = None if self.decodes_all else torch.from_numpy(rows_B).to(device)
            for name, stream in streams.items():
                buffers.table(name, stream.table, chosen)
        self.token_slots = {
            name: (stream.slots // block_size, stream.slots % block_size) for name, stream in streams.items()
        }
        self._complete_entries(lengths - new, lengths, geometry, device)

    def _complete_entries(self, before: np.ndarray, after: np.ndarray, g: Geometry, device: torch.device) -> None:
        """The compressed entries whose last token is new: the request and number of each, where its tokens lie, and
        where it is written. By the length before the step, so that entries of rejected drafts are written again."""

        def count(length: np.ndarray) -> np.ndarray:
            return np.maximum(0, (length - g.l) // g.d + 1)

        first_R = count(before)
        n_R = count(after) - first_R
        self.n_entries = int(n_R.sum())
        if not self.n_entries:
            return
        request_E = np.repeat(np.arange(len(n_R)), n_R)
        number_E = np.arange(self.n_entries) - np.repeat(np.cumsum(n_R) - n_R, n_R) + np.repeat(first_R, n_R)
        row_E = torch.from_numpy(request_E).to(device)
        self.entry_begin_E = torch.from_numpy(number_E * g.d).to(device)
        token_El = self.entry_begin_E[:, None] + torch.arange(g.l, device=device)
        raw = self.streams.get("tail", self.streams["selected"])
        self.entry_tokens: Slots = self._places(raw.table, row_E[:, None], token_El)
        block_E, place_E = self._places(self.streams["selected"].table, row_E, token_El[:, -1])
        self.entry_slots: Slots = block_E, place_E // g.d

    def _places(self, table_RP: Tensor, row: Tensor, position: Tensor) -> Slots:
        return table_RP[row, position // self.block_size].long(), position % self.block_size

    def blocks(self, name: str, chunk: Chunk, begin: int) -> tuple[Tensor, int]:
        """The blocks of a chunk's request that hold the tokens from `begin` to its end, and the position of the first
        one's first token."""
        first, last = _range_of_blocks(begin, chunk.end, self.block_size)
        return self.streams[name].table[chunk.request, first:last].long(), first * self.block_size


class LongestStep(NamedTuple):
    """Stands for a step of one long request, all of whose blocks are the first one."""

    block_size: int
    device: torch.device

    def blocks(self, name: str, chunk: Chunk, begin: int) -> tuple[Tensor, int]:
        first, last = _range_of_blocks(begin, chunk.end, self.block_size)
        return torch.zeros(last - first, dtype=torch.int64, device=self.device), first * self.block_size


def _range_of_blocks(begin: int, end: int, block_size: int) -> tuple[int, int]:
    return begin // block_size, -(-end // block_size)
