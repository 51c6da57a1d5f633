"""Sparse attention in a nanoGPT: `make_attention` returns another module, nothing else changes. Losses side by side.

pip install nsa-attention

    python nanogpt.py                     60 steps each on the documentation of Python, a minute of one core
    python nanogpt.py --text book.txt --length 4096 --steps 2000
"""

import argparse
import pathlib
import pydoc_data.topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa import NSAAttention


class CausalSelfAttention(nn.Module):
    """Dense attention as nanoGPT has it."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def make_attention(kind: str, dim: int, n_heads: int) -> nn.Module:
    if kind == "nanogpt":
        return CausalSelfAttention(dim, n_heads)
    blocks = dict(l=16, d=8, l_sel=32, n_sel=4, w=64)  # for rows of 512 bytes; leave out in long rows
    width = dim // n_heads  # of a head. kind: "nsa", or "dense" with the same grouped keys and RoPE
    return NSAAttention(dim=dim, n_heads=n_heads, n_kv_groups=2, d_k=width, d_v=width, kind=kind, **blocks)


class Block(nn.Module):
    def __init__(self, kind: str, dim: int, n_heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = make_attention(kind, dim, n_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, kind: str, length: int, dim: int = 128, n_layers: int = 2, n_heads: int = 4) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, dim), nn.Embedding(length, dim)
        self.h = nn.ModuleList(Block(kind, dim, n_heads) for _ in range(n_layers))
        self.ln_f, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def train(kind: str, batches: list[Tensor], length: int) -> list[float]:
    torch.manual_seed(0)
    model, losses = GPT(kind, length).to(batches[0].device), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    for tokens in batches:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--text", type=pathlib.Path, help="a text file")
    options.add_argument("--length", type=int, default=512, help="bytes of a row")
    options.add_argument("--steps", type=int, default=60)
    arguments = options.parse_args()
    text = arguments.text.read_bytes() if arguments.text else "\n".join(pydoc_data.topics.topics.values()).encode()
    data, length = torch.frombuffer(bytearray(text), dtype=torch.uint8), arguments.length
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = data.unfold(0, length + 1, length)  # the next byte of each is its label
    order = torch.randint(len(rows), (arguments.steps, 4), generator=torch.Generator().manual_seed(1))
    batches = [rows[chosen].long().to(device) for chosen in order]
    losses = {kind: train(kind, batches, length) for kind in ("nanogpt", "dense", "nsa")}
    print(f"mean loss of 10 steps, nats per byte\n  step{''.join(f'{kind:>9}' for kind in losses)}")
    for end in range(10, arguments.steps + 1, 10):
        print(f"{end:6d}" + "".join(f"{sum(each[end - 10 : end]) / 10:9.3f}" for each in losses.values()))
