"""Distributed data loading: each of N ranks reads and tokenizes every N-th unit and shares the tokens through files.

Rows are packed from all documents in one global order, so a rank needs the lengths of everyone's documents to build its
own rows. The expensive work (fetching, decompressing, tokenizing) is done once per unit; the tokens, a few bytes per
word, reach all ranks through a shared folder. A unit's file is a pure function of the source, so the sequence of rows
does not depend on which rank read it or how many ranks there are.

A folder serves one set of readers once; start each with a new one. All readers start at the same unit: each writes its
first unit into the folder, and every other compares. Files are data only, carry their SHA-256 and are written
atomically.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nsa import errors
from nsa.errors import CheckpointError, DataError, DataTimeout, NSAError
from nsa.files import storage_errors, write_atomic
from nsa_train.data.document import CorruptUnit

_LOOKAHEAD = 2  # units per reader: one is read while the one before it is used
_POLL_S = 0.01
_POLL_MAX_S = 0.2
_LENGTH_BYTES, _HASH_BYTES = 8, 32


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """`folder` is shared by all `readers`, of which this is number `reader`. `timeout_s` limits the wait for a unit of
    another reader; None if the consumer of the rows has its own timeout."""

    folder: str
    reader: int
    readers: int
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenUnit:
    """The rows of a unit, in file order: tokens, or None where the document is empty or in the other split."""

    ids: list[str]
    tokens: list[np.ndarray | None]


class UnitExchange:
    """`read(number)` reads and tokenizes a unit; numbers count units in stream order over all epochs."""

    def __init__(self, settings: ExchangeSettings, read: Callable[[int], TokenUnit | None]) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._read = read
        self._first: int | None = None
        self._compared = {settings.reader}
        """Readers that are known to have started at the same unit."""
        self._position = 0
        self._advanced = threading.Condition()
        self._stopped = threading.Event()
        self._published: list[int] = []
        self._thread: threading.Thread | None = None
        self._crash: BaseException | None = None

    def start(self, first: int, stop: int | None) -> None:
        """Read this reader's share of the units in [first, stop) in a background thread."""
        self.close()
        if self._first is None:
            self._first = first
            with self._storage_errors():
                self._write(_reader_name("start", self._settings.reader), str(first).encode())
        self._position, self._stopped = first, threading.Event()
        arguments = (first, stop, self._stopped)
        self._thread = threading.Thread(target=self._produce, args=arguments, name="unit-exchange", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._stopped.set()
            with self._advanced:
                self._advanced.notify()
            self._thread.join()
            self._thread = None

    def take(self, number: int) -> TokenUnit:
        """Wait for unit `number` (increasing from call to call) of any rank. Re-raises the error of its reader."""
        with self._advanced:
            self._position = number
            self._advanced.notify()
        with self._storage_errors():
            self._write(_reader_name("progress", self._settings.reader), str(number).encode())
        started, pause_s = time.monotonic(), _POLL_S
        while True:
            if self._crash is not None:
                raise self._crash
            with self._storage_errors():
                # Listed rather than opened: network file systems cache the absence of a file.
                names = set(os.listdir(self._folder))
                reader = number % self._settings.readers
                self._compare_start(reader, names)
                if (name := _unit_name(number)) in names:
                    return _decode((self._folder / name).read_bytes(), self._folder / name)
                if (name := _reader_name("failure", reader)) in names:
                    failure = json.loads((self._folder / name).read_bytes())
                    raise getattr(errors, failure["kind"])(f"rank {reader}: {failure['message']}")
            waited_s, limit_s = time.monotonic() - started, self._settings.timeout_s
            if limit_s is not None and waited_s > limit_s:
                raise DataTimeout(
                    f"unit {number} of the data, read by rank {reader}, did not come within {limit_s:g} s. "
                    f"Check that rank, or raise data.loader_timeout_s."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)

    def _compare_start(self, reader: int, names: set[str]) -> None:
        """Raise if another reader started at another unit: it may never publish the unit that this one waits for."""
        if reader in self._compared or (name := _reader_name("start", reader)) not in names:
            return
        if (start := int((self._folder / name).read_text())) != self._first:
            raise DataError(
                f"rank {reader} starts at unit {start} of the data, this rank at unit {self._first}: ranks that divide "
                "the reading must start at the same unit. Resume all ranks from the same checkpoint."
            )
        self._compared.add(reader)

    def _produce(self, first: int, stop: int | None, stopped: threading.Event) -> None:
        settings = self._settings
        number = first + (settings.reader - first) % settings.readers
        try:
            while stop is None or number < stop:
                with self._advanced:
                    while number >= self._position + _LOOKAHEAD * settings.readers and not stopped.is_set():
                        self._advanced.wait()
                if stopped.is_set():
                    return
                self._publish(number)
                self._remove_used()
                number += settings.readers
        except NSAError as error:
            kind = next(each.__name__ for each in type(error).__mro__ if hasattr(errors, each.__name__))
            failure = {"kind": kind, "message": str(error)}
            try:
                self._write(_reader_name("failure", settings.reader), json.dumps(failure).encode())
            except OSError:
                self._crash = error  # other ranks then time out waiting for this one
        except BaseException as error:
            self._crash = error  # a bug: raised again in `take`, with its traceback
            raise

    def _publish(self, number: int) -> None:
        try:
            unit = self._read(number)
            content = _encode(unit) if unit is not None else None
        except CorruptUnit as error:
            content = _with_checksum({"corrupt": str(error)}, b"")
        if content is not None:
            with self._storage_errors():
                self._write(_unit_name(number), content)
            self._published.append(number)

    def _remove_used(self) -> None:
        """Delete this reader's units that every reader has consumed."""
        with self._storage_errors():
            names = set(os.listdir(self._folder))
            if any(_reader_name("progress", reader) not in names for reader in range(self._settings.readers)):
                return
            progress = [self._folder / _reader_name("progress", r) for r in range(self._settings.readers)]
            oldest = min(int(path.read_text()) for path in progress)
            for number in [number for number in self._published if number < oldest]:
                (self._folder / _unit_name(number)).unlink(missing_ok=True)
                self._published.remove(number)

    def _write(self, name: str, content: bytes) -> None:
        write_atomic(self._folder / name, content, many_writers=True)

    def _storage_errors(self) -> AbstractContextManager[None]:
        return storage_errors(
            f"ranks cannot exchange tokens in {self._folder}",
            fix="Check that every rank can read and write the run folder.",
            if_full=(CheckpointError, "Free disk space and add --resume."),
        )


def _unit_name(number: int) -> str:
    return f"unit-{number:012d}"


def _reader_name(kind: str, reader: int) -> str:
    """A file that each reader writes: its `start`, its `progress` or its `failure`."""
    return f"{kind}-{reader:05d}"


def _encode(unit: TokenUnit) -> bytes:
    present = [tokens for tokens in unit.tokens if tokens is not None]
    header = {
        "ids": unit.ids,
        "lengths": [-1 if tokens is None else len(tokens) for tokens in unit.tokens],
        "dtype": present[0].dtype.name if present else "uint16",
    }
    return _with_checksum(header, b"".join(tokens.tobytes() for tokens in present))


def _with_checksum(header: dict[str, Any], body: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    content = len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded + body
    return content + hashlib.sha256(content).digest()


def _decode(raw: bytes, path: Path) -> TokenUnit:
    content, digest = raw[:-_HASH_BYTES], raw[-_HASH_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise DataError(f"{path} does not match its SHA-256: the disk of the run folder is failing. Add --resume.")
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    header = json.loads(content[_LENGTH_BYTES:start])
    if "corrupt" in header:
        raise CorruptUnit(header["corrupt"])
    joined = np.frombuffer(content, dtype=header["dtype"], offset=start)
    tokens: list[np.ndarray | None] = []
    at = 0
    for length in header["lengths"]:
        tokens.append(None if length < 0 else joined[at : at + length])
        at += max(0, length)
    return TokenUnit(header["ids"], tokens)
