"""Tile sizes of every kernel, by width of the rows and kind of GPU. Checked ahead of time by the kernel passport."""

from typing import NamedTuple

import triton


class Tiles(NamedTuple):
    m: int
    """Rows: queries × heads."""
    n: int
    """Keys."""
    warps: int = 4
    stages: int = 2

    @property
    def options(self) -> dict[str, int]:
        return dict(num_warps=self.warps, num_stages=self.stages)


_NARROW = {
    "runs_forward": Tiles(64, 64, 4, 3),
    "runs_dq": Tiles(64, 32, 4, 2),
    "runs_dkv": Tiles(64, 64, 4, 2),
    "selected_forward": Tiles(64, 64, 4, 3),
    "selected_dq": Tiles(64, 64, 4, 2),
    "selected_dkv": Tiles(64, 32, 4, 2),
    "select": Tiles(64, 64, 4, 2),
}
_BROAD = {
    "runs_forward": Tiles(64, 32, 4, 2),
    "runs_dq": Tiles(32, 32, 4, 2),
    "runs_dkv": Tiles(32, 32, 4, 2),
    "selected_forward": Tiles(32, 64, 4, 2),
    "selected_dq": Tiles(32, 64, 4, 2),
    "selected_dkv": Tiles(32, 32, 4, 2),
    "select": Tiles(16, 64, 4, 2),
}
_INTERPRETED = {"select": Tiles(32, 64)}


def choose(kernel: str, width: int) -> Tiles:
    """One choice per kernel and width of the widest row: the same bits on every call."""
    if triton.knobs.runtime.interpret:
        return _INTERPRETED.get(kernel, Tiles(32, 32))
    return (_NARROW if width <= 128 else _BROAD)[kernel]
