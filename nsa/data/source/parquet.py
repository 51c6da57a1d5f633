"""Parquet files, local or over HTTP, one unit per row group."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from nsa.data.document import Document
from nsa.data.source.file import SourceFile
from nsa.data.source.http import MAX_PARALLEL, HttpClient, ServerUnreachable
from nsa.data.source.listing_cache import ListedFile, ListingCache
from nsa.data.source.retry_policy import ReadDeadline, RetryPolicy
from nsa.data.source.row_group import (
    DocumentColumns,
    RangeFile,
    check_footer,
    footer_length,
    parse_footer,
    parse_row_group,
)
from nsa.data.source.unit import DEFAULT_MAX_UNIT_BYTES, CorruptUnit, SourceUnit
from nsa.errors import DataError, DataTimeout

_TAIL_BYTES = 256 * 1024
_FOOTER_MAX_BYTES = 64 * 2**20  # some sixty times that of a FineWeb-Edu file
_FOOTER_CACHE_BYTES = 256 * 2**20


class ParquetSource:
    """`files` in the order that defines the units; see `open_source` for how a specification becomes files."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        patience: RetryPolicy,
        *,
        client: HttpClient | None = None,
        columns: DocumentColumns | None = None,
        max_unit_bytes: int = DEFAULT_MAX_UNIT_BYTES,
        cache_dir: Path | None = None,
    ) -> None:
        self._files = list(files)
        self._patience = patience
        self._client = client
        self._columns = columns or DocumentColumns()
        self._max_unit_bytes = max_unit_bytes
        self._footers: OrderedDict[int, tuple[int, Any]] = OrderedDict()
        self._cached_bytes = 0
        self.bytes_read = 0
        cache = ListingCache(cache_dir, [f.name for f in self._files], repr(self._columns)) if cache_dir else None
        self._listed = (cache.load() if cache else None) or self._list_files()
        if cache:
            cache.save(self._listed)
        self._first_unit = np.concatenate([[0], np.cumsum([listed.row_groups for listed in self._listed])]).astype(int)
        digest = hashlib.sha256(repr(self._columns).encode())
        for file, listed in zip(self._files, self._listed, strict=True):
            digest.update(f"\n{file.name}\t{listed.size}\t{listed.row_groups}\t{listed.footer_sha256}".encode())
        self.fingerprint = digest.hexdigest()

    @property
    def retries(self) -> int:
        return self._client.retries if self._client else 0

    def __len__(self) -> int:
        return int(self._first_unit[-1])

    def unit(self, index: int) -> SourceUnit:
        file, row_group = self._locate(index)
        return SourceUnit(index, self._files[file].where, f"row group {row_group}")

    def read(self, index: int) -> list[Document]:
        deadline = ReadDeadline(self._patience)
        unit = self.unit(index)
        try:
            try:
                return self._read_once(index, deadline)
            except CorruptUnit:
                # Once more from the start: without TLS, bytes can be damaged on the way and not where they lie.
                self._forget(self._locate(index)[0])
                return self._read_once(index, deadline)
        except CorruptUnit as error:
            raise CorruptUnit(f"{unit} is corrupt: {error}") from error
        except DataTimeout as error:
            raise DataTimeout(f"{unit} could not be read: {error}") from error
        except DataError as error:
            raise DataError(f"{unit} could not be read: {error}") from error

    def _read_once(self, index: int, deadline: ReadDeadline) -> list[Document]:
        file, row_group = self._locate(index)
        metadata = self._metadata(file, deadline)
        if (size := metadata.row_group(row_group).total_byte_size) > self._max_unit_bytes:
            raise DataError(
                f"it holds {size} bytes, more than max_unit_bytes={self._max_unit_bytes}: a unit is held in memory. "
                "Write the file with smaller row groups (FineWeb-Edu has 1000 rows), or raise the limit."
            )

        def fetch(start: int, length: int) -> bytes:
            self.bytes_read += length
            return self._files[file].range(start, length, deadline)

        return parse_row_group(RangeFile(fetch, self._listed[file].size), metadata, row_group, self._columns)

    def _locate(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._first_unit, index, side="right")) - 1
        return file, index - int(self._first_unit[file])

    def _list_files(self) -> list[ListedFile]:
        all_listed: list[ListedFile] = []
        with ThreadPoolExecutor(MAX_PARALLEL) as pool:
            for index, (listed, metadata) in enumerate(pool.map(self._list_file, self._files)):
                all_listed.append(listed)
                self._remember(index, metadata, listed.footer_bytes)
        return all_listed

    def _list_file(self, file: SourceFile) -> tuple[ListedFile, Any]:
        deadline = ReadDeadline(self._patience)
        try:
            tail = file.tail(_TAIL_BYTES, deadline)
            length = footer_length(tail.data)
            if length > tail.size:
                raise CorruptUnit(f"its footer claims {length} bytes, the file has {tail.size}")
            if length > _FOOTER_MAX_BYTES:
                raise CorruptUnit(f"its footer claims {length} bytes, more than {_FOOTER_MAX_BYTES}")
            footer = tail.data[-length:]
            if length > len(tail.data):
                footer = file.range(tail.size - length, length, deadline)
            metadata = parse_footer(footer)
            check_footer(metadata, self._columns)
        except ServerUnreachable as error:
            kind = DataTimeout if isinstance(error, DataTimeout) else DataError
            raise kind(f"{file.where} could not be listed: {error}") from error
        except CorruptUnit as error:
            raise DataError(
                f"{file.where} is not a usable parquet file: {error}. Without its footer the number of units is "
                "unknown, and so is the order of all others. Fetch the file again or leave it out."
            ) from error
        return ListedFile(tail.size, length, hashlib.sha256(footer).hexdigest(), metadata.num_row_groups), metadata

    def _metadata(self, file: int, deadline: ReadDeadline) -> Any:
        if file in self._footers:
            self._footers.move_to_end(file)
            return self._footers[file][1]
        listed = self._listed[file]
        footer = self._files[file].range(listed.size - listed.footer_bytes, listed.footer_bytes, deadline)
        if hashlib.sha256(footer).hexdigest() != listed.footer_sha256:
            raise CorruptUnit("its footer is not the one that was listed at the start: the file has changed")
        metadata = parse_footer(footer)
        self._remember(file, metadata, listed.footer_bytes)
        return metadata

    def _remember(self, file: int, metadata: Any, footer_bytes: int) -> None:
        self._footers[file] = (footer_bytes, metadata)
        self._cached_bytes += footer_bytes
        while self._cached_bytes > _FOOTER_CACHE_BYTES and len(self._footers) > 1:
            _, (dropped_bytes, _) = self._footers.popitem(last=False)
            self._cached_bytes -= dropped_bytes

    def _forget(self, file: int) -> None:
        if file in self._footers:
            self._cached_bytes -= self._footers.pop(file)[0]
