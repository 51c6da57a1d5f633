"""Layers by time as a picture of one cell per pixel: a PNG in the page is smaller than a rectangle per cell."""

import base64
import math
import struct
import zlib
from collections.abc import Sequence

_INK = (59, 110, 168)
_NOT_FINITE = (200, 30, 30, 255)
_FAINTEST = 20
"""Of 255: even the least share is seen as ink, so that a hole is a hole."""


def png_uri(cells: Sequence[Sequence[float]], low: float, high: float) -> str:
    """Rows of values as a data URI; the ink is denser for more, and transparent where there is no value."""
    rows = b"".join(b"\0" + b"".join(bytes(_pixel(value, low, high)) for value in row) for row in cells)
    width, height = len(cells[0]), len(cells)
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    body = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def _pixel(value: float, low: float, high: float) -> tuple[int, int, int, int]:
    if math.isnan(value):
        return (0, 0, 0, 0)
    if math.isinf(value):
        return _NOT_FINITE
    density = (min(high, max(low, value)) - low) / (high - low) if high > low else 0.5
    return (*_INK, _FAINTEST + round(density * (255 - _FAINTEST)))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
