"""`nsa monitor`: watch a run in a terminal."""

import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SMALLEST = (80, 24)
_LOOKS_SHARE = 4
"""A look is followed by a pause of so many times its length: watching takes a fifth of a core at most."""


def monitor(
    run: Path = typer.Argument(..., metavar="RUN", help="A run folder (train.out_dir), of a live or a finished run."),
    once: bool = typer.Option(False, "--once", help="Print one frame and leave; so it does without a terminal."),
    interval: float = typer.Option(1.0, min=1.0, help="Seconds between looks, at least 1."),
    width: int = typer.Option(None, min=40, help="Columns; the terminal's, or 80 without one."),
    height: int = typer.Option(None, min=12, help="Lines; the terminal's, or 24 without one."),
) -> None:
    """Show loss, speed, gates, selection, memory, findings and events of a run, live; q leaves. Complete at 80 × 24.

    **Examples:** `nsa monitor artifacts/run`, and for a log or `watch`: `nsa monitor artifacts/run --once`
    """
    from rich.console import Console

    from nsa.observe.view.snapshot import SnapshotReader

    console = Console(highlight=False, markup=False)
    looker = SnapshotReader(run)
    try:
        if once or not console.is_terminal:
            for line in _frame(looker, console, width, height):
                console.print(line, overflow="ignore", no_wrap=True, crop=False)
        else:
            _watch(looker, console, interval, width, height)
    finally:
        looker.close()


def _watch(looker, console: "Console", interval: float, width: int | None, height: int | None) -> None:  # type: ignore[no-untyped-def]
    screen = _MonitorScreen(console)
    with console.screen(hide_cursor=True), _keys() as pressed:
        while True:
            began = time.monotonic()
            screen.show(_frame(looker, console, width, height))
            took = time.monotonic() - began
            if pressed(max(interval - took, _LOOKS_SHARE * took)):
                screen.clear()
                return


def _frame(looker, console: "Console", width: int | None, height: int | None) -> list["Text"]:  # type: ignore[no-untyped-def]
    from nsa.observe.view.monitor.frame import frame
    from nsa.observe.view.monitor.text_layout import plain_ascii

    there = console.size if console.is_terminal else SMALLEST
    lines = frame(looker.look(), width or there[0], height or there[1])
    return lines if console.encoding.startswith("utf") else [plain_ascii(line) for line in lines]


class _MonitorScreen:
    """Sends the lines that changed, and nothing else: a quiet second over ssh is some tens of bytes."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._shown: list[str] = []
        self._size: tuple[int, int] | None = None

    def show(self, lines: list["Text"]) -> None:
        console, size = self._console, self._console.size
        if self._size != size:
            self._size, self._shown = size, []
        blank = [""] * max(0, size.height - len(lines))
        rendered = [*(self._rendered(line) for line in lines[: size.height]), *blank]
        for row, text in enumerate(rendered):
            if row >= len(self._shown) or self._shown[row] != text:
                # Emptied first: behind a full line the cursor still stands on its last cell.
                console.file.write(f"\x1b[{row + 1};1H\x1b[2K{text}")
        console.file.flush()
        self._shown = rendered

    def clear(self) -> None:
        """Before leaving: a multiplexer that was resized meanwhile would keep some lines."""
        self._console.file.write("\x1b[H\x1b[J")

    def _rendered(self, line: "Text") -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="", no_wrap=True, overflow="crop")
        return captured.get()


@contextmanager
def _keys() -> Iterator["_PressedKeys"]:
    """Keys one by one instead of by the line, as long as it lasts."""
    if not sys.stdin.isatty():
        yield _PressedKeys(None)
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _PressedKeys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _PressedKeys:
    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, wait_s: float) -> bool:
        """Whether somebody wants to leave; asks for so long."""
        if self._descriptor is None:
            time.sleep(wait_s)
            return False
        end = time.monotonic() + wait_s
        try:
            while (left := end - time.monotonic()) > 0:
                if select.select([self._descriptor], [], [], left)[0]:
                    key = sys.stdin.read(1)
                    if key in ("q", "Q", "\x03", "\x04", ""):
                        return True
        except KeyboardInterrupt:
            return True
        return False
