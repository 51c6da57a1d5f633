"""Pictures of docs/HOW_NSA_WORKS.md, each from the code that it explains.

one_query.svg       what one query reads in the three branches
block_scores.svg    how probabilities of compressed entries become scores of blocks
keys_read.svg       keys read by position up to 64k, per branch, beside dense attention
gates.svg           weights of the branches before the first step
"""

from typing import NamedTuple

import torch

from nsa.core.attention_config import Gate, GateConfig
from nsa.core.branches import BRANCH_ORDER, BranchGates
from nsa.core.functional import compress_blocks
from nsa.geometry import Geometry
from nsa.kernels import reference
from tools.docs.draw_attention_map import COLOURS

GREY = "#888"
STYLE = (
    "<style>text{font:13px sans-serif;fill:#888}.t{font:600 14px sans-serif}.s{font:11.5px sans-serif}"
    ".axis{stroke:#888;stroke-opacity:.5;fill:none}</style>"
)
SMALL = Geometry(l=8, d=4, l_sel=8, n_sel=5, w=12)
"""Small enough to draw every token."""
N, QUERY = 96, 93
RELEVANT = (29, 58)
"""Tokens whose keys point where the query points."""
SEED = 11


class OneQuery(NamedTuple):
    """Results of the reference for the query at position QUERY."""

    mass: list[float]
    """Probability of each compressed entry that the query sees."""
    scores: list[float]
    """Score of each selection block, before blocks are forced."""
    chosen: list[int]


def one_query() -> OneQuery:
    torch.manual_seed(SEED)
    k = torch.randn(1, N, 1, 8, dtype=torch.float64)
    q = torch.ones(1, 1, 1, 1, 8, dtype=torch.float64)
    for token in RELEVANT:
        k[0, token] = 4.0
    k_cmp = compress_blocks(k, geometry=SMALL)
    pos, zero = torch.tensor([[QUERY]]), torch.tensor([[0]])
    options: reference.ScoreOptions = {"geometry": SMALL, "scale": 0.7}
    chosen = reference.select_blocks(q, k_cmp, pos, zero, **options)[0, 0, 0].tolist()
    n_entries, n_blocks = SMALL.n_compressed(QUERY + 1), SMALL.n_blocks(QUERY + 1)
    mass = ((k_cmp[0, :n_entries, 0] @ q[0, 0, 0, 0]) * options["scale"]).softmax(0)
    scores = mass @ reference.overlap(n_entries, n_blocks, SMALL).to(mass)
    return OneQuery(mass.tolist(), scores.tolist(), chosen)


def picture(width: float, height: float, title: str, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}">{STYLE}<title>{title}</title>'
        f"{''.join(parts)}</svg>\n"
    )


def label(x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="1.5" fill="{fill}" '
        f'fill-opacity="{opacity:g}"/>'
    )


LEFT, CELL = 150, 8.6


def draw_one_query() -> str:
    """Four strips of the same tokens: all of them, and what each branch reads."""
    g, scores = SMALL, one_query()
    sizes = f"l={g.l} d={g.d} l_sel={g.l_sel} n_sel={g.n_sel} w={g.w}"
    parts = [label(LEFT, 18, f"The query at position {QUERY} · {sizes}")]

    def strip(y: float, fills: dict[int, str]) -> list[str]:
        return [
            box(LEFT + token * CELL, y, CELL - 1.4, 22, fills.get(token, GREY), 1.0 if token in fills else 0.16)
            for token in range(N)
        ]

    y = 34.0
    query = {QUERY: "#b0413e", **dict.fromkeys(RELEVANT, "#b0413e")}
    parts += [label(LEFT - 14, y + 16, "tokens", kind="t", anchor="end"), *strip(y, query)]
    parts.append(label(LEFT + (QUERY + 0.5) * CELL, y + 36, "query", kind="s", anchor="middle"))
    for token in RELEVANT:
        parts.append(label(LEFT + (token + 0.5) * CELL, y + 36, "key like the query", kind="s", anchor="middle"))
    y += 56
    n_entries = g.n_compressed(QUERY + 1)
    parts.append(label(LEFT - 14, y + 20, "compressed", kind="t", anchor="end"))
    parts.append(label(LEFT - 14, y + 36, f"{n_entries} entries", kind="s", anchor="end"))
    for entry in range(n_entries):  # neighbours overlap: two rows
        x, width = LEFT + entry * g.d * CELL, g.l * CELL - 3
        parts.append(box(x, y + entry % 2 * 20, width, 16, COLOURS["compressed"], 0.85))
    y += 58
    chosen = [t for t in range(QUERY + 1) if t // g.l_sel in scores.chosen]
    parts.append(label(LEFT - 14, y + 10, "selected", kind="t", anchor="end"))
    parts.append(label(LEFT - 14, y + 26, f"{g.n_sel} blocks, {len(chosen)} keys", kind="s", anchor="end"))
    parts += strip(y, dict.fromkeys(chosen, COLOURS["selected"]))
    own = QUERY // g.l_sel
    for block in scores.chosen:
        reason = {0: "first", own: "own", own - 1: "before"}.get(block, "best")
        parts.append(label(LEFT + (block + 0.5) * g.l_sel * CELL, y + 36, reason, kind="s", anchor="middle"))
    y += 56
    window = range(QUERY - g.w + 1, QUERY + 1)
    parts.append(label(LEFT - 14, y + 10, "sliding", kind="t", anchor="end"))
    parts.append(label(LEFT - 14, y + 26, f"{g.w} keys", kind="s", anchor="end"))
    parts += strip(y, dict.fromkeys(window, COLOURS["sliding"]))
    return picture(LEFT + N * CELL + 8, y + 34, "What one query reads in the three branches", parts)


def draw_block_scores() -> str:
    """Bars of the entries' probabilities, and below them the bars of the blocks' scores."""
    g, scores = SMALL, one_query()
    width, base, height = LEFT + N * CELL + 8, 130.0, 96.0
    parts = [label(LEFT, 18, f"Query {QUERY}: what the compressed branch attends to also ranks the blocks")]
    parts.append(label(LEFT - 14, base - 40, "probability", kind="t", anchor="end"))
    parts.append(label(LEFT - 14, base - 24, "of each entry", kind="s", anchor="end"))
    parts.append(f'<path class="axis" d="M{LEFT} {base}H{width - 8:.0f}"/>')
    for entry, mass in enumerate(scores.mass):
        bar = mass / max(scores.mass) * height
        centre = LEFT + (entry * g.d + g.l / 2) * CELL
        parts.append(box(centre - g.d * CELL / 2 + 3, base - bar, g.d * CELL - 6, bar, COLOURS["compressed"]))
    below = 306.0
    weights = reference.overlap(len(scores.mass), len(scores.scores), g)
    for entry in range(len(scores.mass)):
        for block in range(len(scores.scores)):
            if strides := int(weights[entry, block]):
                x_from = LEFT + (entry * g.d + g.l / 2) * CELL
                x_to = LEFT + (block + 0.5) * g.l_sel * CELL
                parts.append(
                    f'<path d="M{x_from:.1f} {base + 4} L{x_to:.1f} {base + 56}" stroke="{GREY}" '
                    f'stroke-opacity=".55" stroke-width="{strides * 1.3:.1f}"/>'
                )
    parts.append(label(LEFT - 14, base + 24, "overlap in strides", kind="s", anchor="end"))
    parts.append(label(LEFT - 14, base + 40, "thin 1 · thick 2", kind="s", anchor="end"))
    parts.append(label(LEFT - 14, below - 40, "score", kind="t", anchor="end"))
    parts.append(label(LEFT - 14, below - 24, "of each block", kind="s", anchor="end"))
    parts.append(f'<path class="axis" d="M{LEFT} {below}H{width - 8:.0f}"/>')
    own = QUERY // g.l_sel
    for block, score in enumerate(scores.scores):
        bar = max(1.0, score / max(scores.scores) * height)
        taken = block in scores.chosen
        x, fill = LEFT + block * g.l_sel * CELL + 4, COLOURS["selected"] if taken else GREY
        parts.append(box(x, below - bar, g.l_sel * CELL - 8, bar, fill, 1.0 if taken else 0.45))
        centre = x + g.l_sel * CELL / 2 - 4
        parts.append(label(centre, below + 17, f"{block}", anchor="middle"))
        if taken:
            word = "always" if block in (0, own, own - 1) else "chosen"
            parts.append(label(centre, below + 33, word, kind="s", anchor="middle"))
    return picture(width, below + 42, "From probabilities of compressed entries to scores of blocks", parts)


def draw_keys_read() -> str:
    """Stacked areas of the keys that a token reads by its position, and the line of dense attention."""
    g = Geometry()
    width, left, right, top, bottom, longest, most = 900.0, 74.0, 150.0, 40.0, 330.0, 65_536, 8_000

    def at(position: float, keys: float) -> str:
        x = left + position / longest * (width - left - right)
        return f"{x:.1f},{bottom - keys / most * (bottom - top):.1f}"

    positions = [1, *range(256, longest + 1, 256)]
    layers = {
        "sliding": [min(g.w, n) for n in positions],
        "selected": [g.n_selected_tokens(n) for n in positions],
        "compressed": [g.n_compressed(n) for n in positions],
    }
    total = [0] * len(positions)
    parts = [label(left, 20, "Keys that a token reads, by its position (default sizes, one group of heads)")]
    for keys in range(0, most + 1, 2_000):
        y = bottom - keys / most * (bottom - top)
        parts.append(f'<path class="axis" stroke-dasharray="2 4" d="M{left} {y:.1f}H{width - right:.0f}"/>')
        parts.append(label(left - 8, y + 4, f"{keys:,}", anchor="end"))
    for name, keys_of_branch in layers.items():
        lower, total = total, [a + b for a, b in zip(total, keys_of_branch, strict=True)]
        up = [at(n, keys) for n, keys in zip(positions, total, strict=True)]
        down = [at(n, keys) for n, keys in zip(positions, lower, strict=True)]
        outline = " ".join([*up, *reversed(down)])
        parts.append(f'<polygon points="{outline}" fill="{COLOURS[name]}" fill-opacity=".85"/>')
        middle = bottom - (lower[-1] + total[-1]) / 2 / most * (bottom - top)
        parts.append(label(width - right + 10, middle + 4, f"{name} {keys_of_branch[-1]:,}"))
    last = bottom - total[-1] / most * (bottom - top)
    parts.append(label(width - right + 10, last - 12, f"all three {total[-1]:,}", kind="t"))
    parts.append(f'<polyline points="{at(0, 0)} {at(most, most)}" fill="none" stroke="#b0413e" stroke-width="2"/>')
    x_end = left + most / longest * (width - left - right)
    parts.append(label(x_end + 8, top + 12, f"dense attention: {longest:,} keys at position {longest:,}"))
    for position in (0, 16_384, 32_768, 49_152, 65_536):
        x = left + position / longest * (width - left - right)
        parts.append(label(x, bottom + 20, f"{position // 1024}k" if position else "0", anchor="middle"))
    return picture(width, bottom + 32, "Keys read by position", parts)


def draw_gates() -> str:
    """Stacked bars: weights of the branches at the start, by the module that computes them."""
    cases: tuple[tuple[str, str, Gate, float], ...] = (
        ("softmax, sliding_gate_init -3", "our defaults", "softmax", -3.0),
        ("softmax, sliding_gate_init 0", "equal branches", "softmax", 0.0),
        ("sigmoid, sliding_gate_init 0", "nsa.preset: paper", "sigmoid", 0.0),
    )
    left, unit, y = 230.0, 420.0, 44.0
    parts = [label(left, 20, "Weights of the branches before the first step (they depend on the token after it)")]
    for name, note, kind, sliding_init in cases:
        gates = BranchGates(8, 1, 1, GateConfig(kind=kind, sliding_init=sliding_init))
        gates.proj.init_weights()
        with torch.no_grad():
            shares = gates(torch.zeros(1, 1, 8)).flatten().tolist()
        parts += [label(left - 14, y + 16, name, anchor="end"), label(left - 14, y + 32, note, kind="s", anchor="end")]
        x = left
        for branch, share in zip(BRANCH_ORDER, shares, strict=True):
            parts.append(box(x, y, share * unit - 1, 36, COLOURS[branch], 0.9))
            if share > 0.1:
                white = f'<text x="{x + share * unit / 2:.1f}" y="{y + 23:.1f}" style="fill:#fff" text-anchor="middle">'
                parts.append(f"{white}{branch} {share:.2f}</text>")
            else:
                parts.append(label(x + share * unit + 8, y + 23, f"{branch} {share:.2f}"))
            x += share * unit
        y += 54
    return picture(left + 1.5 * unit + 10, y, "Weights of the branches before the first step", parts)


PICTURES = {
    "docs/pictures/one_query.svg": draw_one_query,
    "docs/pictures/block_scores.svg": draw_block_scores,
    "docs/pictures/keys_read.svg": draw_keys_read,
    "docs/pictures/gates.svg": draw_gates,
}
