"""Document source for local JSONL (JSON lines) files, plain, gzip or zstd.

A plain file is divided into blocks of bytes, one unit each; a line belongs to the block in which it starts. A
compressed file can only be read from its beginning, so the whole file is one unit, whose size in memory is limited by
`DEFAULT_MAX_UNIT_BYTES` and in proportion to the file (`require_plausible_ratio`). Plain JSONL and zstd without frame
checksums cannot detect damage that leaves valid JSON (gzip can); `ChecksummedSource` does from the second read on.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import BinaryIO

from nsa.errors import DataError
from nsa_train.data.document import (
    DEFAULT_MAX_UNIT_BYTES,
    DOCUMENT_BYTES,
    CorruptUnit,
    Document,
    DocumentColumns,
    NoTextColumn,
    SourceUnit,
    UnitOffsets,
    make_document,
    require_plausible_ratio,
)
from nsa_train.data.source.file import LocalFile
from nsa_train.data.source.read_report import BAD_LINES, ReadReport

_BLOCK_BYTES = 4 * 2**20
_READ_BYTES = 2**20
_ZSTD_READ_BYTES = 2**10  # unpacked at once; at most 32,768 times as long


class JsonlSource:
    """A line that is not a JSON object with text makes its unit corrupt. With a `report` such lines are skipped and
    counted there, unless they are more than half of the unit's lines."""

    def __init__(
        self,
        files: Sequence[LocalFile],
        *,
        columns: DocumentColumns | None = None,
        block_bytes: int = _BLOCK_BYTES,
        report: ReadReport | None = None,
    ) -> None:
        self._files = list(files)
        self._report = report
        self._columns = columns or DocumentColumns()
        self._block_bytes = block_bytes
        self._sizes = [file.size() for file in self._files]
        self._units = UnitOffsets(
            -(-size // block_bytes) if _is_plain(file) else min(size, 1)
            for file, size in zip(self._files, self._sizes, strict=True)
        )
        digest = hashlib.sha256(f"{self._columns.identity} {block_bytes}".encode())
        for file in self._files:
            digest.update(file.signature())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._units)

    def unit(self, index: int) -> SourceUnit:
        file, block = self._units.locate(index)
        part, first = "whole file", block * self._block_bytes
        if _is_plain(self._files[file]):
            part = f"bytes {first}-{min(first + self._block_bytes, self._sizes[file]) - 1}"
        return SourceUnit(index, self._files[file].where, part)

    def read(self, index: int) -> list[Document]:
        file, block = self._units.locate(index)
        try:
            with open(self._files[file].path, "rb") as raw:
                return self._documents(index, self._lines(raw, file, block))
        except NoTextColumn as error:
            raise NoTextColumn(f"{self.unit(index)}: {error}") from error
        except (zlib.error, EOFError, gzip.BadGzipFile, CorruptUnit) as error:
            raise CorruptUnit(f"{self.unit(index)} is corrupt: {error}") from error
        except OSError as error:
            raise DataError(f"{self.unit(index)} could not be read: {error.strerror}. Check the disk.") from error

    def _documents(self, index: int, lines: Iterator[bytes]) -> list[Document]:
        documents: list[Document] = []
        bad: list[CorruptUnit] = []
        file, block = self._units.locate(index)
        after = f" after byte {block * self._block_bytes}" if block else ""
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                documents.append(self._parse(line))
            except CorruptUnit as error:
                bad.append(type(error)(f"line {number}{after} {error}"))
                if self._report is None:
                    raise bad[0] from error
        if len(bad) > len(documents):
            shown = next((problem for problem in bad if isinstance(problem, NoTextColumn)), bad[0])
            raise type(shown)(f"{len(bad)} of {len(bad) + len(documents)} lines are bad, e.g. {shown}")
        for problem in bad:
            assert self._report is not None
            self._report.skip(BAD_LINES, f"{self._files[file].name}, {problem}")
        return documents

    def _lines(self, raw: BinaryIO, file: int, block: int) -> Iterator[bytes]:
        if _is_plain(self._files[file]):
            start = block * self._block_bytes
            # One byte back: if the previous block ends in a newline, the line at `start` belongs to this block.
            raw.seek(max(0, start - 1))
            if start and not raw.readline(self._block_bytes + 1).endswith(b"\n"):
                return  # no line starts in this block; reading on would read a long line once per block
            while raw.tell() < start + self._block_bytes and (line := self._line(raw)):
                yield line
            return
        if self._files[file].name.lower().endswith(".gz"):
            pieces = iter(partial(gzip.GzipFile(fileobj=raw).read, _READ_BYTES), b"")
        else:
            pieces = _zstd_pieces(raw)
        unpacked = 0
        waiting: list[bytes] = []
        for piece in pieces:
            *lines, rest = piece.split(b"\n")
            unpacked += len(piece) + DOCUMENT_BYTES * len(lines)
            require_plausible_ratio(unpacked, self._sizes[file])
            if unpacked > DEFAULT_MAX_UNIT_BYTES:
                raise DataError(
                    f"{self._files[file].where} unpacks to more than {DEFAULT_MAX_UNIT_BYTES} bytes: a "
                    "compressed file is one unit and is held in memory. Split it, or run `nsa data prepare`."
                )
            if lines:
                yield b"".join([*waiting, lines[0]])
                yield from lines[1:]
                waiting = []
            waiting.append(rest)
        yield b"".join(waiting)

    def _line(self, raw: BinaryIO) -> bytes:
        line = raw.readline(DEFAULT_MAX_UNIT_BYTES + 1)
        if len(line) > DEFAULT_MAX_UNIT_BYTES:
            raise CorruptUnit(f"a line is longer than {DEFAULT_MAX_UNIT_BYTES} bytes")
        return line

    def _parse(self, line: bytes) -> Document:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise CorruptUnit(f"is not JSON ({why})") from error
        key = self._columns.text
        if not isinstance(record, dict):
            raise CorruptUnit(f"is {type(record).__name__}, not an object with the text under {key!r}")
        if not isinstance(record.get(key), str):
            other = f" but {type(record[key]).__name__}" if key in record else ""
            raise NoTextColumn(f"has no text under {key!r}{other}: its keys are {sorted(record)[:8]}")
        # JSON can contain half a surrogate pair, which is not a character and has no UTF-8 encoding.
        text = record[key].encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        return make_document(record.get(self._columns.id) if self._columns.id else None, text)


def _is_plain(file: LocalFile) -> bool:
    return file.name.lower().endswith(".jsonl")


def _zstd_pieces(raw: BinaryIO) -> Iterator[bytes]:
    """Frame by frame; the library's own file object does not notice that a file is truncated.

    A few bytes can be a block of 128 KiB, and a file can have a frame in every nine bytes: little is given to the
    library at once, and one decompressor reads all frames.
    """
    import zstandard

    decompressor = zstandard.ZstdDecompressor()
    frame, rest = None, b""
    try:
        while data := rest or raw.read(_ZSTD_READ_BYTES):
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(data)
            rest = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise CorruptUnit(str(error)) from error
    if frame is not None:
        raise EOFError("the file ends inside a zstd frame")
