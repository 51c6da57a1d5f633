"""Heat map of block selection: which blocks of earlier tokens the queries of a text choose to read.

pip install nsa-attention

    python selection_heat_map.py                      a picture in the terminal, and selection.svg: seconds

A passage of the text occurs twice. Queries and keys are made from the bytes themselves, so that similar passages have
similar keys; with them NSA finds the first occurrence, far behind the window, although nothing was trained.
For a trained model, `with nsa.core.probe.probing(model, SelectionProbe)` records the choices of each layer.
"""

import pathlib
import pydoc_data.topics

import torch
from torch import Tensor

from nsa import Geometry, compress_blocks, select_blocks

GEOMETRY = Geometry(l=16, d=8, l_sel=32, n_sel=5, w=64)
LENGTH, PASSAGE, FIRST, SECOND = 2048, 256, 320, 1536


def example_text() -> bytes:
    """Text in which the bytes from FIRST on are repeated from SECOND on."""
    text = bytearray("\n".join(pydoc_data.topics.topics.values()).encode()[:LENGTH])
    text[SECOND : SECOND + PASSAGE] = text[FIRST : FIRST + PASSAGE]
    return bytes(text)


def features(text: bytes, width: int = 64) -> Tensor:
    """What the last 16 bytes are about, as a unit vector for each token: [1, tokens, 1, width]."""
    pairs = torch.tensor([a * 256 + b for a, b in zip(text, text[1:] + b" ", strict=True)])
    random = torch.randn(65536, width, generator=torch.Generator().manual_seed(0))
    sums = random[pairs].cumsum(0)
    near = sums - torch.cat([torch.zeros(16, width), sums[:-16]])
    near = near - near.mean(0)
    return torch.nn.functional.normalize(near, dim=-1)[None, :, None]


def heat(blocks: Tensor) -> Tensor:
    """Share of the queries of each block of tokens (rows) that read each block (columns)."""
    n = LENGTH // GEOMETRY.l_sel
    read = torch.zeros(LENGTH, n + 1).scatter_(1, torch.where(blocks < 0, n, blocks).long(), 1.0)
    return read[:, :n].view(n, GEOMETRY.l_sel, n).mean(1)


def in_terminal(shares: Tensor) -> str:
    return "\n".join(
        "".join(" ·░▒▓█"[round(share * 5)] for share in row[: i + 1]) for i, row in enumerate(shares.tolist())
    )


def as_svg(shares: Tensor, cell: int = 8) -> str:
    side = len(shares) * cell
    boxes = [
        f'<rect x="{column * cell}" y="{row * cell}" width="{cell}" height="{cell}" fill="#16b" opacity="{share:.2f}"/>'
        for row, line in enumerate(shares.tolist())
        for column, share in enumerate(line)
        if share > 0
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}" width="{side}" height="{side}">'
    ground = f'<rect width="{side}" height="{side}" fill="#fff"/><path d="M0 0V{side}H{side}Z" fill="#eee"/>'
    return "\n".join([head, ground, *boxes, "</svg>\n"])


if __name__ == "__main__":
    x = features(example_text())
    blocks = select_blocks(x, compress_blocks(x, geometry=GEOMETRY), geometry=GEOMETRY, scale=30.0)[0, :, 0]
    shares = heat(blocks)
    print(
        f"rows: {len(shares)} blocks of {GEOMETRY.l_sel} queries; columns: the blocks they read, {GEOMETRY.n_sel} each"
    )
    print(in_terminal(shares))
    pathlib.Path("selection.svg").write_text(as_svg(shares))

    queries = torch.arange(SECOND + 32, SECOND + PASSAGE)
    sources = (queries - SECOND + FIRST) // GEOMETRY.l_sel
    hits = (blocks[queries] == sources[:, None]).any(1).float().mean()
    free = (SECOND // GEOMETRY.l_sel) - 2
    print(f"queries of the second occurrence that read the block of the same words in the first: {hits:.0%}")
    print(
        f"by chance: {(GEOMETRY.n_sel - 3) / free:.0%}; the last query reads {GEOMETRY.reads(LENGTH)} of {LENGTH} keys"
    )
