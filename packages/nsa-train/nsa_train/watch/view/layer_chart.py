"""Bars by sparse layer, as SVG and as characters: what a layer reads of dense attention's mass, and what it costs.

Drawn from the checked results of the task `layers` of `nsa eval` (`ModelEvaluation.layers`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nsa_train.terminal_text import UNKNOWN
from nsa_train.watch.view.formatting import number, share
from nsa_train.watch.view.svg_chart import (
    ACCENT,
    MUTED,
    legend_width,
    svg_box,
    svg_label,
    svg_legend,
    svg_picture,
    svg_turned_label,
)

_MASS_PARTS = ("window_mass", "forced_mass", "scored_mass")
_WINDOW, _FORCED, _HARM = "#4a7fb5", "#6fa287", "#b3424a"
_MASS_LEGEND = (
    ("window", _WINDOW, 1.0),
    ("first and nearest blocks", _FORCED, 1.0),
    ("chosen by score", ACCENT, 1.0),
    ("not read", MUTED, 0.25),
)
_HARM_LEGEND = (("harm of the layer", _HARM, 0.45), ("advised to stay dense", _HARM, 1.0))
_TITLE = "Sparse layers beside the dense model"
_NOTE = "Share of dense attention's mass that a layer reads, and the divergence that it causes alone"
_LEFT, _RIGHT, _TOP, _MASS_HEIGHT, _BETWEEN, _HARM_HEIGHT, _BELOW = 84, 24, 96, 180, 62, 110, 28
_WIDEST_STEP, _NARROWEST_STEP, _PICTURE_WIDTH, _BAR = 72, 9, 640, 0.72
_GLYPHS, _HARM_GLYPH = "█▓▒·", "■"


def mass_parts(row: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Shares read through the window, in forced blocks, in scored blocks, and not read; None for a layer without."""
    if any(name not in row for name in _MASS_PARTS):
        return None
    read = [min(1.0, float(row[name])) for name in _MASS_PARTS]
    return *read, max(0.0, 1.0 - sum(read))


def layer_advice(layers: Mapping[str, Any]) -> str:
    """One sentence: which option of `nsa convert` to use, and what it removes."""
    where = f"on {layers.get('rows', UNKNOWN)} rows of {layers.get('seq_len', UNKNOWN)} tokens"
    n_kept, removed = layers.get("keep_dense"), layers.get("removed")
    if not n_kept or removed is None:
        return (
            f"The models are equal up to rounding {where}: on short rows sparse layers read every key. Evaluate longer "
            f"rows with --seq-len."
        )
    option = ",".join(map(str, n_kept))
    return (
        f"`nsa convert --keep-dense {option}` removes {share(removed)} of the divergence from the dense model "
        f"({number(layers['divergence'])} nats per token {where})."
    )


def layer_svg(layers: Mapping[str, Any]) -> str:
    """A panel with the mass that each layer reads, and below it one with the harm of each."""
    rows: Sequence[Mapping[str, Any]] = layers["layers"]
    step = max(_NARROWEST_STEP, min(_WIDEST_STEP, _PICTURE_WIDTH / max(1, len(rows))))
    legends = [[words for words, *_ in legend] for legend in (_MASS_LEGEND, _HARM_LEGEND)]
    width = _LEFT + _RIGHT + max(step * len(rows), *map(legend_width, legends), 7.2 * len(_NOTE))
    bottom = _TOP + _MASS_HEIGHT
    parts = [svg_label(_LEFT, 24, _TITLE, kind="t"), svg_label(_LEFT, 46, _NOTE)]
    parts += svg_legend(_LEFT, _TOP - 22, _MASS_LEGEND)
    parts += _axis(_TOP, _MASS_HEIGHT, step * len(rows), ("100 %", "50 %", "0"), "attention mass")
    every = max(1, round(28 / step))
    for place, row in enumerate(rows):
        left, size = _LEFT + place * step, step * _BAR
        parts += _mass_bar(left, size, mass_parts(row))
        if place % every == 0:
            for y in (bottom, bottom + _BETWEEN + _HARM_HEIGHT):
                parts.append(svg_label(left + size / 2, y + 17, str(row["layer"]), anchor="middle"))
    top = bottom + _BETWEEN
    most = max((row["harm"] for row in rows), default=0.0) or 1.0
    parts += svg_legend(_LEFT, top - 14, _HARM_LEGEND)
    parts += _axis(top, _HARM_HEIGHT, step * len(rows), (number(most, 2), number(most / 2, 2), "0"), "harm (nats)")
    for place, row in enumerate(rows):
        height = _HARM_HEIGHT * row["harm"] / most
        opacity = 1.0 if row["layer"] in layers.get("advised", ()) else 0.45
        parts.append(svg_box(_LEFT + place * step, top + _HARM_HEIGHT - height, step * _BAR, height, _HARM, opacity))
    parts += [svg_label(_LEFT - 8, y + 17, "layer", anchor="end") for y in (bottom, top + _HARM_HEIGHT)]
    return svg_picture(_TITLE, width, top + _HARM_HEIGHT + _BELOW, parts)


def _axis(top: float, height: float, width: float, labels: Sequence[str], name: str) -> list[str]:
    parts = [svg_turned_label(14, top + height / 2, name)]
    for place, words in enumerate(labels):
        y = top + height * place / (len(labels) - 1)
        parts += [svg_box(_LEFT - 2, y, width, 1, MUTED, 0.3), svg_label(_LEFT - 8, y + 4, words, anchor="end")]
    return parts


def _mass_bar(left: float, size: float, shares: Sequence[float] | None) -> list[str]:
    if shares is None:
        return []
    parts, y = [], float(_TOP + _MASS_HEIGHT)
    for part, (_, colour, opacity) in zip(shares, _MASS_LEGEND, strict=True):
        y -= _MASS_HEIGHT * part
        parts.append(svg_box(left, y, size, _MASS_HEIGHT * part, colour, opacity))
    return parts


def layer_bars(layers: Mapping[str, Any], columns: int) -> Iterator[str]:
    """Draw the layers as lines of characters, at most `columns` wide."""
    rows: Sequence[Mapping[str, Any]] = layers["layers"]
    size = max(8, min(40, (columns - 24) // 2))
    most = max((row["harm"] for row in rows), default=0.0) or 1.0
    key = "  ".join(f"{glyph} {words}" for glyph, (words, *_) in zip(_GLYPHS, _MASS_LEGEND, strict=True))
    yield key
    yield f"layer  {'attention mass'.ljust(size)}  harm"
    for row in rows:
        bar = _character_bar(mass_parts(row), size)
        harm = _HARM_GLYPH * round((size - 8) * row["harm"] / most)
        yield f"{row['layer']:>5}  {bar}  {harm}{' ' * bool(harm)}{number(row['harm'], 3)}"


def _character_bar(shares: Sequence[float] | None, size: int) -> str:
    if shares is None:
        return UNKNOWN.ljust(size)
    ends = [round(size * sum(shares[: place + 1])) for place in range(len(shares))]
    begins = [0, *ends[:-1]]
    bar = "".join(glyph * (end - begin) for glyph, begin, end in zip(_GLYPHS, begins, ends, strict=True))
    return bar[:size].ljust(size)
