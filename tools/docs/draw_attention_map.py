"""docs/attention_map.svg: the keys that each query attends to in the three branches, from a real selection."""

import torch

from nsa.geometry import Geometry
from nsa.kernels import reference

N, CELL, GAP, TOP = 96, 2.6, 26, 40
GEOMETRY = Geometry(l=8, d=4, l_sel=8, n_sel=5, w=12)
COLOURS = {"compressed": "#3b6ea8", "selected": "#d98032", "sliding": "#3f9a5c"}


def seen() -> dict[str, torch.Tensor]:
    """[query, raw token] per branch: which tokens reach the query."""
    g = GEOMETRY
    torch.manual_seed(3)
    q, kc = torch.randn(1, N, 1, 2, 8), torch.randn(1, g.n_compressed(N), 1, 8)
    pos = torch.arange(N)[None]
    zero, token = torch.zeros_like(pos), torch.arange(N)
    idx = reference.select_blocks(q, kc, pos, zero, geometry=g, scale=1.0)[0, :, 0]
    age = token[:, None] - token[None, :]
    last_compressed = ((token + 1 - g.l) // g.d * g.d + g.l - 1)[:, None]
    return {
        "compressed": (token[None, :] <= last_compressed) & (age >= 0),
        "selected": ((token // g.l_sel)[None, :, None] == idx[:, None, :]).any(-1) & (age >= 0),
        "sliding": (age >= 0) & (age < g.w),
    }


def panel(name: str, visible: torch.Tensor, left: float) -> list[str]:
    side = N * CELL
    out = [f'<text x="{left + side / 2:.0f}" y="20" text-anchor="middle" class="t">{name}</text>',
           f'<path d="M{left} {TOP} v{side:.1f} h{side:.1f} Z" fill="#888" fill-opacity="0.2"/>']  # fmt: skip
    for row in range(N):
        start = None
        for col in range(N + 1):
            on = col < N and bool(visible[row, col])
            if on and start is None:
                start = col
            elif not on and start is not None:
                x, y, w = left + start * CELL, TOP + row * CELL, (col - start) * CELL
                out.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{CELL}" fill="{COLOURS[name]}"/>')
                start = None
    return out


def text() -> str:
    side, parts = N * CELL, []
    for i, (name, visible) in enumerate(seen().items()):
        parts += panel(name, visible, GAP + i * (side + GAP))
    width, height = GAP + 3 * (side + GAP), TOP + side + 34
    parts.append(f'<text x="{width / 2:.0f}" y="{height - 10:.0f}" text-anchor="middle" class="s">'
                 f"keys → · queries ↓ · {N} tokens, l={GEOMETRY.l} d={GEOMETRY.d} l_sel={GEOMETRY.l_sel} "
                 f"n_sel={GEOMETRY.n_sel} w={GEOMETRY.w} · compressed blocks are one key each</text>")  # fmt: skip
    style = "<style>.t{font:600 15px sans-serif;fill:#888}.s{font:13px sans-serif;fill:#888}</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}">{style}{"".join(parts)}</svg>'
    )
