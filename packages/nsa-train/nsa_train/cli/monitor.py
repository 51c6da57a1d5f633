"""`nsa monitor`: live view of a run in a terminal."""

import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nsa_train.cli.early_checks import find_run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_SMALLEST = (80, 24)
_PAUSE_FACTOR = 4
"""The pause after an update is at least this many times its duration: at most a fifth of a core is used."""


def monitor(
    run: Path = typer.Argument(
        ..., metavar="RUN", callback=find_run, help="Run folder (train.out_dir) of a running or finished run."
    ),
    once: bool = typer.Option(False, "--once", help="Print one frame and exit (the default without a terminal)."),
    interval: float = typer.Option(1.0, min=1.0, help="Seconds between updates."),
    width: int = typer.Option(None, min=40, help="Columns; default: the terminal's, or 80 without a terminal."),
    height: int = typer.Option(None, min=12, help="Lines; default: the terminal's, or 24 without a terminal."),
) -> None:
    """Show loss, throughput, gates, memory, findings and events of a run, updated live. Press q to quit.

    **Examples:** `nsa monitor artifacts/run`, once for a log file: `nsa monitor artifacts/run --once`
    """
    from rich.console import Console

    from nsa_train.watch.view.monitor_frame import frame
    from nsa_train.watch.view.summary import SnapshotReader
    from nsa_train.watch.view.terminal_plot import plain_ascii

    console = Console(highlight=False, markup=False)
    with closing(SnapshotReader(run)) as reader:
        live = console.is_terminal and not once

        def draw() -> list["Text"]:
            size = console.size if console.is_terminal else _SMALLEST
            lines = frame(reader.read(), width or size[0], height or size[1], live=live)
            return lines if console.encoding.startswith("utf") else [plain_ascii(line) for line in lines]

        if live:
            _show_live(draw, console, interval)
        else:
            for line in draw():
                console.print(line, overflow="ignore", no_wrap=True, crop=False)


def _show_live(draw: Callable[[], list["Text"]], console: "Console", interval: float) -> None:
    screen = _MonitorScreen(console)
    with console.screen(hide_cursor=True), _keys() as pressed:
        while True:
            began = time.monotonic()
            screen.show(draw())
            took = time.monotonic() - began
            if pressed(max(interval - took, _PAUSE_FACTOR * took)):
                screen.clear()
                return


class _MonitorScreen:
    """Writes only the lines that changed: an update without news costs some tens of bytes over ssh."""

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
                # Clear the line first: after a full line the cursor is still on its last cell.
                console.file.write(f"\x1b[{row + 1};1H\x1b[2K{text}")
        console.file.flush()
        self._shown = rendered

    def clear(self) -> None:
        """Clear the screen before exiting: a terminal multiplexer that was resized would keep some lines."""
        self._console.file.write("\x1b[H\x1b[J")

    def _rendered(self, line: "Text") -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="", no_wrap=True, overflow="crop")
        return captured.get()


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Unbuffered keyboard input (cbreak mode) while active: a function that waits and returns whether to quit."""
    if not sys.stdin.isatty():
        yield threading.Event().wait  # for a key that never comes
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _quit_pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _quit_pressed(wait_s: float) -> bool:
    """Wait up to this long for a key that quits."""
    end = time.monotonic() + wait_s
    try:
        while (left := end - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", "\x03", "\x04", ""):
                return True
    except KeyboardInterrupt:
        return True
    return False
