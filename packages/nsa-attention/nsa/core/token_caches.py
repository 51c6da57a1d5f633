"""KV caches of other layers than NSA: all tokens in pages (`dense`), a ring of the last w (`window`), all tokens and
compressed keys without values (`merged`).

B batch · S new tokens
"""

from torch import Tensor

from nsa.core.branches import BranchKeys, BranchStreams
from nsa.core.kv_cache import Compress, LayerCache
from nsa.kernels.interface import TokenDecoder

_Keys = tuple[BranchKeys, BranchKeys, BranchKeys]


class DenseCache(LayerCache):
    """Keys and values of all tokens, in pages of l_sel tokens."""

    def _states_per_page(self) -> tuple[int, int]:
        return self.geometry.l_sel, 0

    def _append_new(
        self, new: BranchStreams, pos_BS: Tensor, end_B1: Tensor, compress: Compress, decoder: TokenDecoder | None
    ) -> _Keys:
        self.selected.write(pos_BS, pos_BS < end_B1, (new.k_sel, new.v_sel))
        self.length_B += end_B1[:, 0] - self.length_B
        n_pages, inside_BS = self._pages_read(pos_BS)
        k, v = (slots.content(n_pages) for slots in self.selected.both)
        keys = BranchKeys(k, v, inside_BS, pos_BS.new_zeros(()).expand_as(pos_BS))
        return keys, keys, keys


class WindowCache(LayerCache):
    """Keys and values of the last w tokens of each row; its pages hold nothing."""

    def _states_per_page(self) -> tuple[int, int]:
        return 0, 0

    def _append_new(
        self, new: BranchStreams, pos_BS: Tensor, end_B1: Tensor, compress: Compress, decoder: TokenDecoder | None
    ) -> _Keys:
        keys = self._append_window(new.k_win, new.v_win, pos_BS, end_B1)
        if self.rewind:
            self._append_past(new, pos_BS, end_B1)
        self.length_B += end_B1[:, 0] - self.length_B
        if keys is None:
            k, v = (slots.content() for slots in self.window.both)
            keys = BranchKeys(k, v, self._window_pos_B1, pos_BS.new_zeros(()).expand_as(pos_BS))
        return keys, keys, keys


class MergedCache(LayerCache):
    """Keys and values of all tokens, and compressed keys, which have no values: they only choose blocks."""

    def _compressed_widths(self) -> tuple[int, int]:
        return self.d_k, 0
