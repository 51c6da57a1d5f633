"""Keys and values in pages in any order: as vLLM binds them, or as our own cache keeps them."""

import torch

from nsa.kernels.interface import KeyPages


def scattered(states: int, seed: int = 0, ours: bool = False):
    """[B, T, G, K] and [B, T, G, V] → pages of `states` entries in random order; NaN wherever there is no entry.

    vLLM's are [blocks, heads, states, K + V], strided; ours [heads, blocks, states, K or V].
    """

    def place(k_BTGK, v_BTGV) -> KeyPages:
        generator = torch.Generator().manual_seed(seed)
        B, T, G, K = k_BTGK.shape
        n = -(-T // states)
        blocks = torch.randperm(B * n + 5, generator=generator)
        table_BP = blocks[: B * n].view(B, n)
        if ours:
            shapes = ((G, len(blocks), states, x.shape[-1]) for x in (k_BTGK, v_BTGV))
            k, v = (torch.full(shape, torch.nan, dtype=k_BTGK.dtype).transpose(0, 1) for shape in shapes)
        else:  # a layer's part of a larger allocation: no axis but the last lies next to itself
            data = torch.full((len(blocks), 2, G, states, K + v_BTGV.shape[-1]), torch.nan, dtype=k_BTGK.dtype)[:, 1]
            k, v = data[..., :K], data[..., K:]
        token = torch.arange(T)
        for b in range(B):
            for pages, x in ((k, k_BTGK), (v, v_BTGV)):
                pages[table_BP[b, token // states], :, token % states] = x[b]
        return KeyPages(k, v, table_BP.to(torch.int32))

    return place
