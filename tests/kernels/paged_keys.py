"""Keys and values in pages as vLLM binds them: [blocks, heads, states, K + V], strided, blocks in any order."""

import torch

from nsa.kernels.interface import KeyPages


def scattered(states: int, seed: int = 0):
    """[B, T, G, K] and [B, T, G, V] → pages of `states` entries in random order; NaN wherever there is no entry."""

    def place(k_BTGK, v_BTGV) -> KeyPages:
        generator = torch.Generator().manual_seed(seed)
        B, T, G, K = k_BTGK.shape
        n = -(-T // states)
        blocks = torch.randperm(B * n + 5, generator=generator)
        table_BP = blocks[: B * n].view(B, n)
        # A layer's part of a larger allocation: no axis but the last lies next to itself.
        data = torch.full((len(blocks), 2, G, states, K + v_BTGV.shape[-1]), torch.nan, dtype=k_BTGK.dtype)[:, 1]
        token = torch.arange(T)
        for b in range(B):
            data[table_BP[b, token // states], :, token % states] = torch.cat((k_BTGK[b], v_BTGV[b]), -1)
        return KeyPages(data[..., :K], data[..., K:], table_BP.to(torch.int32))

    return place
