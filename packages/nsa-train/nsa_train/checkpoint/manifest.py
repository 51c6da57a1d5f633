"""COMMIT.json: the size of every file of a checkpoint and the SHA-256 of its blocks, written last, optionally signed.

A file is hashed in blocks of 8 MiB, so that a rank can verify the bytes it loads without reading the rest of the file.
A file of one block has the hash that `sha256sum` prints. Hashes detect damage but do not authenticate the writer:
whoever can write the tensors can write the hashes. A key (HMAC-SHA256 over this text) does.
"""

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Protocol, Self

from nsa.errors import CheckpointError
from nsa.files import fsync_data, open_regular
from nsa_train.names import COMMIT

_FORMAT = 2
_WHOLE_FILE_FORMAT = 1  # one SHA-256 per file, however large
LARGEST_COMMIT_BYTES = 64 << 20  # enough for the blocks of 8 TB
CHUNK_BYTES = 4 << 20
IRREGULAR = -1
"""Size of a link, pipe, device or anything else that is not a regular file."""
_THREADS = 4
_DEEPEST_NAME = 16
_FREE_CONTAINERS, _FEWEST_BYTES_PER_CONTAINER = 1000, 24
_SHORTEST_KEY_BYTES = 16
BLOCK_BYTES = 8 << 20
_RawBytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ManifestEntry:
    bytes: int
    blocks: tuple[str, ...]
    """SHA-256 of every block; the last one may be short, an empty file has none."""
    sha256: str | None = None
    """SHA-256 of the whole file, for a checkpoint of the first format whose blocks are not known."""


def same_content(listed: ManifestEntry, actual: ManifestEntry) -> bool:
    """Whether a file that was just hashed is the one listed."""
    if listed.sha256 is not None:
        return (listed.bytes, listed.sha256) == (actual.bytes, actual.sha256)
    return (listed.bytes, listed.blocks) == (actual.bytes, actual.blocks)


class _BlockHasher:
    """Size and block hashes of a file given in pieces; with `whole` its own hash too."""

    def __init__(self, *, whole: bool = False) -> None:
        self.bytes = 0
        self._blocks: list[str] = []
        self._block, self._left = hashlib.sha256(), BLOCK_BYTES
        self._entire = hashlib.sha256() if whole else None

    def update(self, chunk: _RawBytes) -> None:
        rest = memoryview(chunk).cast("B")
        self.bytes += len(rest)
        if self._entire is not None:
            self._entire.update(rest)
        while len(rest):
            part, rest = rest[: self._left], rest[self._left :]
            self._block.update(part)
            self._left -= len(part)
            if not self._left:
                self._blocks.append(self._block.hexdigest())
                self._block, self._left = hashlib.sha256(), BLOCK_BYTES

    def entry(self) -> ManifestEntry:
        last = (self._block.hexdigest(),) if self._left < BLOCK_BYTES else ()
        entire = None if self._entire is None else self._entire.hexdigest()
        return ManifestEntry(self.bytes, (*self._blocks, *last), entire)


def hash_blocks(chunks: Iterable[_RawBytes], *, whole: bool = False) -> ManifestEntry:
    hasher = _BlockHasher(whole=whole)
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.entry()


class HashedFile:
    """A new file that is hashed while it is written and is on the disk when the `with` block ends.

    The hashes are of the bytes that the program wrote, so damage on the way to the disk is seen by every later check.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: OSError | None = None
        """Why a write failed: torch.save replaces the reason by one of its own."""
        self._hasher = _BlockHasher()
        self._file = path.open("xb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                fsync_data(self._file)
        finally:
            self._file.close()

    def write(self, content: _RawBytes) -> int:
        try:
            self._file.write(content)
        except OSError as error:
            self.failure = error
            raise
        self._hasher.update(content)
        return memoryview(content).nbytes

    def flush(self) -> None:
        """Do nothing: torch.save flushes after every tensor."""

    def tell(self) -> int:
        return self._hasher.bytes

    def entry(self) -> ManifestEntry:
        """Size and hashes of what has been written so far."""
        return self._hasher.entry()


class _FileStore(Protocol):
    """The files below one place, by name relative to it, with `/` between folders."""

    def files(self) -> dict[str, int]:
        """Name → size in bytes; IRREGULAR for what is not a regular file."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """The content in pieces that fit in memory."""

    def __str__(self) -> str:
        """The place, as a user would write it."""


class LocalFiles:
    """The files below a local folder. Links are listed as IRREGULAR and never followed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def files(self) -> dict[str, int]:
        """Size by name. A file that disappears meanwhile, e.g. the temporary one of another rank, is left out."""
        sizes = {}
        for folder, subfolders, names in os.walk(self.path):
            here = Path(folder)
            links = [name for name in subfolders if (here / name).is_symlink()]  # os.walk does not enter them
            for path in (here / name for name in (*names, *links)):
                try:
                    facts = path.lstat()
                except FileNotFoundError:
                    continue
                regular = stat.S_ISREG(facts.st_mode)
                sizes[path.relative_to(self.path).as_posix()] = facts.st_size if regular else IRREGULAR
        return sizes

    def chunks(self, name: str) -> Iterator[bytes]:
        with open_regular(self.path / name, follow_links=False) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk


_REASONS = INTERVAL, REQUESTED, LAST = "interval", "requested", "last"
"""Why a checkpoint was saved: train.save_every, a request (USR2), or the end of the run."""


@dataclass(frozen=True)
class CheckpointManifest:
    step: int
    saved_at: str
    """UTC, ISO 8601."""
    files: Mapping[str, ManifestEntry]
    reason: str = INTERVAL
    """Why it was saved."""

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


@dataclass(frozen=True)
class CheckpointVerdict:
    """Result of comparing a checkpoint with its manifest. One with problems must not reach anything that unpickles."""

    where: str
    manifest: CheckpointManifest | None
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.problems

    def require_good(self) -> CheckpointManifest:
        if self.problems or self.manifest is None:
            raise CheckpointError(
                f"{self.where} cannot be trusted ({'; '.join(self.problems)}): its weights may be wrong and its "
                f"pickles may run code. Use another checkpoint; `nsa checkpoint ls` shows which are good."
            )
        return self.manifest


def read_key(file: Path | None) -> bytes | None:
    """The signing key in a file, if there is one: its content without the line end. Never printed, never logged."""
    if file is None:
        return None
    try:
        with open_regular(file) as content:
            key = content.read().rstrip(b"\r\n")
    except OSError as error:
        raise CheckpointError(f"the checkpoint key file {file} cannot be read: {error.strerror}.") from error
    if len(key) < _SHORTEST_KEY_BYTES:
        raise CheckpointError(
            f"the checkpoint key in {file} has {len(key)} bytes, at least {_SHORTEST_KEY_BYTES} are needed: a short "
            f"key can be guessed. Make one with: head -c 32 /dev/urandom | base64 > {file}"
        )
    return key


def build_manifest(
    store: _FileStore,
    step: int,
    saved_at: str,
    reason: str = INTERVAL,
    hashed: Mapping[str, ManifestEntry] | None = None,
) -> CheckpointManifest:
    """The manifest of a checkpoint that is about to be committed.

    `hashed` are the files that their writers have hashed already: of these only the size is compared. The others are
    read and hashed here.
    """
    sizes = store.files()
    sizes.pop(COMMIT, None)
    if irregular := sorted(name for name, size in sizes.items() if size == IRREGULAR):
        raise CheckpointError(
            f"{store} holds {irregular[0]}, which is not a regular file: a checkpoint cannot keep it."
        )
    hashed = hashed or {}
    if wrong := sorted(name for name, entry in hashed.items() if sizes.get(name) != entry.bytes):
        actual = f"{sizes[wrong[0]]} bytes" if wrong[0] in sizes else "no such file"
        raise CheckpointError(
            f"{store}/{wrong[0]} was written with {hashed[wrong[0]].bytes} bytes, and there is {actual} now: nothing "
            f"was committed. Check that all nodes see the same folder, and its disk."
        )
    new_hashes = _hash_all(store, sorted(sizes.keys() - hashed.keys()))
    return CheckpointManifest(step, saved_at, {**hashed, **new_hashes}, reason)


def encode(manifest: CheckpointManifest, key: bytes | None = None) -> bytes:
    body = {"format": _FORMAT, "block_bytes": BLOCK_BYTES, **asdict(manifest)}
    assert all(entry.sha256 is None for entry in manifest.files.values()), "the first format is not written"
    body["files"] = {name: {"bytes": e.bytes, "sha256": list(e.blocks)} for name, e in manifest.files.items()}
    text = _canonical(body)
    document: dict[str, Any] = {"commit": body, "sha256": hashlib.sha256(text).hexdigest()}
    if key is not None:
        document["hmac_sha256"] = hmac.new(key, text, hashlib.sha256).hexdigest()
    return _canonical(document)


def decode(raw: bytes, key: bytes | None = None) -> CheckpointManifest:
    """Raises CheckpointError unless the bytes are as written and, with a key, signed with that key."""
    try:
        if raw.count(b"{") + raw.count(b"[") > _FREE_CONTAINERS + len(raw) // _FEWEST_BYTES_PER_CONTAINER:
            raise ValueError("its values would take many times its size in memory")
        document = json.loads(raw)
        # The same value can be spelled in two ways in JSON; only the bytes we wrote count.
        intact = _is_canonical(raw, document)
        body: Any = document["commit"] if intact else None
        text = _canonical(body)
        intact = intact and isinstance(body, dict) and document["sha256"] == hashlib.sha256(text).hexdigest()
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{COMMIT} is damaged or half-written")
    if key is not None:
        if "hmac_sha256" not in document:
            raise CheckpointError(f"{COMMIT} is not signed, but a key is set")
        expected = hmac.new(key, text, hashlib.sha256).hexdigest()
        # As bytes: text that is not ASCII is a TypeError.
        if not hmac.compare_digest(expected.encode(), str(document["hmac_sha256"]).encode("utf-8", "surrogatepass")):
            raise CheckpointError(f"{COMMIT} is signed with another key, or forged")
    if body.get("format") not in (_WHOLE_FILE_FORMAT, _FORMAT):
        raise CheckpointError(f"{COMMIT} has format {body.get('format')!r}, this version reads up to {_FORMAT}")
    try:
        files = {str(name): _entry(entry) for name, entry in body["files"].items()}
        manifest = CheckpointManifest(
            int(body["step"]), str(body["saved_at"]), files, str(body.get("reason", INTERVAL))
        )
        if manifest.reason not in _REASONS or not manifest.saved_at.isprintable():
            raise ValueError("it has no reason or no time")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{COMMIT} is not one of ours ({error!r})") from error
    _require_names_inside(manifest.files)
    return manifest


def _entry(entry: Mapping[str, Any]) -> ManifestEntry:
    size, digest = int(entry["bytes"]), entry["sha256"]
    blocks = -(-size // BLOCK_BYTES)
    if isinstance(digest, str):
        if size < 0 or len(digest) != 64:
            raise ValueError("a file has no SHA-256")
        return ManifestEntry(size, (digest,)) if blocks == 1 else ManifestEntry(size, (), digest if blocks else None)
    if size < 0 or len(digest) != blocks or not all(isinstance(block, str) and len(block) == 64 for block in digest):
        raise ValueError("a file has another number of blocks than its size")
    return ManifestEntry(size, tuple(digest))


def _require_names_inside(names: Mapping[str, ManifestEntry]) -> None:
    for name in names:
        parts = name.split("/")
        if len(parts) > _DEEPEST_NAME:  # the folders of every name are looked up below
            raise CheckpointError(f"{COMMIT} names a file in {len(parts)} folders, which no checkpoint has")
        outside = name != PurePosixPath(name).as_posix() or name.startswith("/") or ".." in parts
        if outside or not name.isprintable():
            raise CheckpointError(f"{COMMIT} names {name!r}, which lies outside the checkpoint")
        if any("/".join(parts[:depth]) in names for depth in range(1, len(parts))) or name == COMMIT:
            raise CheckpointError(f"{COMMIT} names {name!r}, which cannot be beside the other files it names")


def examine(
    store: _FileStore, *, key: bytes | None = None, step: int | None = None, deep: bool = True
) -> CheckpointVerdict:
    """Compare a checkpoint with its COMMIT.json, reading bytes only. `deep=False` compares names and sizes."""
    try:
        sizes = store.files()
        if sizes.get(COMMIT, IRREGULAR) == IRREGULAR:
            why = f"{COMMIT} is missing: the save never finished, or another program wrote this folder"
            return CheckpointVerdict(str(store), None, (why,))
        manifest = _read_commit(store, sizes[COMMIT], key)
        problems = list(_compare(store, manifest, sizes, deep=deep))
    except CheckpointError as error:
        return CheckpointVerdict(str(store), None, (str(error),))
    except OSError as error:
        return CheckpointVerdict(str(store), None, (f"it cannot be read: {error}",))
    if step is not None and manifest.step != step:
        problems.insert(0, f"{COMMIT} is of step {manifest.step}")
    return CheckpointVerdict(str(store), manifest, tuple(problems))


def _read_commit(store: _FileStore, size: int, key: bytes | None) -> CheckpointManifest:
    if size > LARGEST_COMMIT_BYTES:
        raise CheckpointError(f"{COMMIT} has {size} bytes, more than the {LARGEST_COMMIT_BYTES} allowed")
    raw = bytearray()
    for chunk in store.chunks(COMMIT):
        raw += chunk
        if len(raw) > LARGEST_COMMIT_BYTES:
            raise CheckpointError(f"{COMMIT} is longer than its listed size")
    return decode(bytes(raw), key)


def _compare(store: _FileStore, manifest: CheckpointManifest, sizes: Mapping[str, int], *, deep: bool) -> Iterator[str]:
    whole = []
    for name, entry in manifest.files.items():
        size = sizes.get(name)
        if size is None:
            yield f"{name} is missing"
        elif size == IRREGULAR:
            yield f"{name} is not a regular file"
        elif size != entry.bytes:
            yield f"{name} has {size} bytes, not {entry.bytes}"
        else:
            whole.append(name)
    for name in sorted(sizes.keys() - manifest.files.keys() - {COMMIT}):
        yield f"{name if name.isprintable() else repr(name)} is not listed in {COMMIT}"
    if deep:
        yield from wrong_hashes(store, manifest, whole)


def wrong_hashes(store: _FileStore, manifest: CheckpointManifest, names: list[str]) -> Iterator[str]:
    """A message for each of these files that does not match its hash."""
    by_file = {name for name in names if manifest.files[name].sha256 is not None}
    for name, entry in _hash_all(store, names, by_file).items():
        if not same_content(manifest.files[name], entry):
            yield f"{name} does not match its SHA-256"


def _hash_all(store: _FileStore, names: list[str], by_file: Collection[str] = ()) -> dict[str, ManifestEntry]:
    """hashlib releases the GIL, so threads overlap both reading and hashing."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint-hash") as pool:
        hashed = pool.map(lambda name: hash_blocks(store.chunks(name), whole=name in by_file), names)
        return dict(zip(names, hashed, strict=True))


_ENCODER = json.JSONEncoder(sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False)


def _canonical(value: object) -> bytes:
    return _ENCODER.encode(value).encode() + b"\n"


def _is_canonical(raw: bytes, value: object) -> bool:
    """`raw == _canonical(value)` without the whole text: indented, deeply nested values are many times as long."""
    at = 0
    for part in map(str.encode, _ENCODER.iterencode(value)):
        if not raw.startswith(part, at):
            return False
        at += len(part)
    return raw[at:] == b"\n"
