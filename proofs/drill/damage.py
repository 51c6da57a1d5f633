"""Damages files on purpose for drills."""

from pathlib import Path


def flip_bit(path: Path, offset: int | None = None) -> None:
    """Flip the lowest bit of a byte, in the middle of the file unless an offset is given; twice restores it."""
    offset = path.stat().st_size // 2 if offset is None else offset
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
