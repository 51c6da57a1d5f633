"""Screenshots of monitor and reports for the docs: python -m tools.docs.draw_views RUN OTHER_RUN docs/pictures

Terminal output is drawn as SVG shapes, so that it does not depend on fonts; pages are rendered by
headless Chromium (apt-get install chromium), which nothing else here needs.
"""

import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from nsa_train.watch.run_reader import load
from nsa_train.watch.view.monitor_frame import frame
from nsa_train.watch.view.run_report import render, render_comparison
from nsa_train.watch.view.summary import take_snapshot

CELL_W, CELL_H, MARGIN = 8.4, 18.0, 12.0
PAPER, INK = "#14181c", "#d5dce2"
THEME = TerminalTheme(
    (20, 24, 28), (213, 220, 226),
    [(20, 24, 28), (242, 133, 124), (98, 196, 141), (224, 176, 80), (111, 168, 224), (214, 143, 192), (95, 190, 205),
     (213, 220, 226)],
)  # fmt: skip
_DOTS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
_BLOCKS = " ▁▂▃▄▅▆▇█"


def terminal_svg(lines: list[Text], width: int) -> str:
    body = "".join(svg_line(line, row, width) for row, line in enumerate(lines))
    return svg_document(body, *screen_size(width, len(lines)))


def screen_size(columns: int, rows: int) -> tuple[float, float]:
    """Width and height of the picture of a terminal."""
    return columns * CELL_W + 2 * MARGIN, rows * CELL_H + 2 * MARGIN


def svg_document(body: str, wide: float, tall: float, css: str = "") -> str:
    css = "text{font:13.5px 'DejaVu Sans Mono',Menlo,Consolas,monospace;white-space:pre}" + css
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" viewBox="0 0 {wide:.0f} {tall:.0f}" '
        f'width="{wide:.0f}">'
        f'<style>{css}</style><rect width="100%" height="100%" rx="8" fill="{PAPER}"/>{body}</svg>\n'
    )


def svg_line(line: Text, row: int, width: int) -> str:
    console = Console(width=width, force_terminal=True, color_system="truecolor")
    parts, column = [], 0
    for segment in console.render(line, console.options.update(no_wrap=True)):
        text = segment.text.rstrip("\n")
        parts += _run(text, segment.style or Style(), column, row)
        column += len(text)
    return "".join(parts)


def _run(text: str, style: Style, column: int, row: int) -> list[str]:
    """Characters of one style: dots and blocks as shapes, the rest as text held to its cells."""
    colour = (style.color or Color.default()).get_truecolor(THEME).hex if style.color else INK
    dim = ' opacity=".6"' if style.dim else ""
    look = f'fill="{colour}"' + dim + (' font-weight="700"' if style.bold else "")
    parts, words, begin, dots, blocks = [], "", column, "", ""
    for place, letter in enumerate([*text, ""], start=column):
        if letter and not _is_shape(letter):
            words += letter
            continue
        if words.strip():
            left = len(words) - len(words.lstrip())
            x, y = MARGIN + (begin + left) * CELL_W, MARGIN + row * CELL_H + 13.5
            shown = words.strip()
            parts.append(
                f'<text x="{x:.1f}" y="{y:.1f}" textLength="{len(shown) * CELL_W:.1f}" lengthAdjust="spacing" {look}>'
                f"{escape(shown)}</text>"
            )
        words, begin = "", place + 1
        if letter and _is_braille(letter):
            dots += _dots(letter, place, row)
        elif letter:
            blocks += _shape(letter, place, row)
    if dots:
        ink = f'stroke="{colour}" stroke-width="3.2" stroke-linecap="round"'
        parts.append(f'<path d="{dots}" {ink}{dim}/>')
    if blocks:
        parts.append(f'<path d="{blocks}" fill="{colour}"{dim}/>')
    return parts


def _is_braille(letter: str) -> bool:
    return 0x2800 <= ord(letter) < 0x2900


def _is_shape(letter: str) -> bool:
    return _is_braille(letter) or letter in _BLOCKS[1:] or letter in "─│┤┊"


def _dots(letter: str, column: int, row: int) -> str:
    """Dots of a braille character, as lines of no length with round ends."""
    x, y, bits = MARGIN + column * CELL_W, MARGIN + row * CELL_H, ord(letter) - 0x2800
    return "".join(
        f"M{x + CELL_W * (across + 0.5) / 2:.1f} {y + CELL_H * (down + 0.5) / 4:.1f}h0"
        for bit, (across, down) in enumerate(_DOTS)
        if bits >> bit & 1
    )


def _shape(letter: str, column: int, row: int) -> str:
    """Rectangles of a block or line character."""
    x, y = MARGIN + column * CELL_W, MARGIN + row * CELL_H
    middle_x, middle_y = x + CELL_W / 2, y + CELL_H / 2
    if letter in _BLOCKS:
        tall = CELL_H * _BLOCKS.index(letter) / 8
        return _rectangle(x, y + CELL_H - tall, CELL_W - 1, tall)
    if letter == "─":
        return _rectangle(x, middle_y, CELL_W, 1)
    if letter == "┊":
        return "".join(_rectangle(middle_x, y + CELL_H * i / 3, 1.2, 3) for i in range(3))
    upright = _rectangle(middle_x, y, 1, CELL_H)
    return upright + _rectangle(x, middle_y, CELL_W / 2, 1) if letter == "┤" else upright


def _rectangle(x: float, y: float, wide: float, tall: float) -> str:
    return f"M{x:.1f} {y:.1f}h{wide:.1f}v{tall:.1f}h-{wide:.1f}z"


def screenshot(html: str, out: Path, height: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(html, encoding="utf-8")
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--window-size=1180,{height}", f"--screenshot={out}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    run, other, out = (Path(word) for word in sys.argv[1:4])
    out.mkdir(parents=True, exist_ok=True)
    look = take_snapshot(run)
    for width, height, name in ((80, 24, "monitor.svg"), (120, 40, "monitor_large.svg")):
        (out / name).write_text(terminal_svg(frame(look, width, height), width), encoding="utf-8")
    screenshot(render(look), out / "report.png", 1480)
    screenshot(render_comparison([load(run), load(other)]), out / "compare.png", 1318)
    for path in sorted(out.iterdir()):
        print(f"wrote {path} ({path.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main()
