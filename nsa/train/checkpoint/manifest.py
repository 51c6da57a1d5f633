"""COMMIT.json: the size and SHA-256 of every file of a checkpoint, written last, optionally signed.

Hashes tell damage from health. They do not tell who wrote a folder: whoever can write the tensors can write the hashes.
A key (HMAC-SHA256 over the same text) does.
"""

import hashlib
import hmac
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from nsa.errors import CheckpointError
from nsa.train.checkpoint.layout import COMMIT
from nsa.train.checkpoint.store import IRREGULAR, Store

FORMAT = 1
_THREADS = 4
_SHORTEST_KEY_BYTES = 16


@dataclass(frozen=True)
class Entry:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int
    saved_at: str
    """UTC, ISO 8601."""
    files: Mapping[str, Entry]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())


@dataclass(frozen=True)
class Verdict:
    """What an examination found. Nothing of a checkpoint with problems may be read by anything that unpickles."""

    where: str
    manifest: Manifest | None
    problems: tuple[str, ...]
    signed: bool = False

    @property
    def good(self) -> bool:
        return not self.problems

    def demand_good(self) -> Manifest:
        if self.problems or self.manifest is None:
            raise CheckpointError(
                f"{self.where} cannot be trusted ({'; '.join(self.problems)}): its weights may be wrong and its "
                f"pickles may run code. Use another checkpoint; `nsa checkpoint ls` shows which are good."
            )
        return self.manifest


def read_key(file: Path) -> bytes:
    """The signing key in a file: its content without the line end. Never printed, never logged."""
    try:
        key = file.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise CheckpointError(f"the checkpoint key file {file} cannot be read: {error.strerror}.") from error
    if len(key) < _SHORTEST_KEY_BYTES:
        raise CheckpointError(
            f"the checkpoint key in {file} has {len(key)} bytes, at least {_SHORTEST_KEY_BYTES} are needed: a short "
            f"key can be guessed. Make one with: head -c 32 /dev/urandom | base64 > {file}"
        )
    return key


def take_stock(store: Store, step: int, saved_at: str) -> Manifest:
    """Hash every file that is there now."""
    sizes = store.files()
    sizes.pop(COMMIT, None)
    if irregular := sorted(name for name, size in sizes.items() if size == IRREGULAR):
        raise CheckpointError(f"{store} holds {irregular[0]}, which is no plain file: a checkpoint cannot keep it.")
    return Manifest(step, saved_at, _hash_all(store, sorted(sizes)))


def encode(manifest: Manifest, key: bytes | None = None) -> bytes:
    body = {"format": FORMAT, **asdict(manifest)}
    text = _canonical(body)
    document: dict[str, Any] = {"commit": body, "sha256": hashlib.sha256(text).hexdigest()}
    if key is not None:
        document["hmac_sha256"] = hmac.new(key, text, hashlib.sha256).hexdigest()
    return _canonical(document)


def decode(raw: bytes, key: bytes | None = None) -> Manifest:
    """Raises CheckpointError unless every bit is as it was written and, with a key, signed with that key."""
    try:
        document = json.loads(raw)
        body = document["commit"]
        text = _canonical(body)
        # The same value can be spelled in two ways in JSON; only the bytes we wrote count.
        intact = raw == _canonical(document) and document["sha256"] == hashlib.sha256(text).hexdigest()
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{COMMIT} is damaged or half-written")
    if key is not None:
        if "hmac_sha256" not in document:
            raise CheckpointError(f"{COMMIT} is not signed, but a key is set")
        expected = hmac.new(key, text, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(expected, str(document["hmac_sha256"])):
            raise CheckpointError(f"{COMMIT} is signed with another key, or forged")
    if body.get("format") != FORMAT:
        raise CheckpointError(f"{COMMIT} has format {body.get('format')!r}, this version reads {FORMAT}")
    try:
        files = {str(name): Entry(int(entry["bytes"]), str(entry["sha256"])) for name, entry in body["files"].items()}
        manifest = Manifest(int(body["step"]), str(body["saved_at"]), files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{COMMIT} is not one of ours ({error!r})") from error
    for name in manifest.files:
        if name != PurePosixPath(name).as_posix() or name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise CheckpointError(f"{COMMIT} names {name!r}, which lies outside the checkpoint")
    return manifest


def examine(store: Store, *, key: bytes | None = None, step: int | None = None, deep: bool = True) -> Verdict:
    """Compare a checkpoint with its COMMIT.json, reading bytes only. `deep=False` looks at names and sizes."""
    try:
        sizes = store.files()
        if sizes.get(COMMIT, IRREGULAR) == IRREGULAR:
            why = f"{COMMIT} is missing: the save never finished, or another program wrote this folder"
            return Verdict(str(store), None, (why,))
        raw = b"".join(store.chunks(COMMIT))
        manifest = decode(raw, key)
        problems = list(_compare(store, manifest, sizes, deep=deep))
    except CheckpointError as error:
        return Verdict(str(store), None, (str(error),))
    except OSError as error:
        return Verdict(str(store), None, (f"it cannot be read: {error}",))
    if step is not None and manifest.step != step:
        problems.insert(0, f"{COMMIT} speaks of step {manifest.step}")
    return Verdict(str(store), manifest, tuple(problems), signed=key is not None)


def _compare(store: Store, manifest: Manifest, sizes: Mapping[str, int], *, deep: bool) -> Iterator[str]:
    whole = []
    for name, entry in manifest.files.items():
        found = sizes.get(name)
        if found is None:
            yield f"{name} is missing"
        elif found == IRREGULAR:
            yield f"{name} is no plain file"
        elif found != entry.bytes:
            yield f"{name} has {found} bytes, not {entry.bytes}"
        else:
            whole.append(name)
    yield from (f"{name} is not listed in {COMMIT}" for name in sorted(sizes.keys() - manifest.files.keys() - {COMMIT}))
    if deep:
        for name, entry in _hash_all(store, whole).items():
            if entry.sha256 != manifest.files[name].sha256:
                yield f"{name} does not match its SHA-256"


def _hash_all(store: Store, names: list[str]) -> dict[str, Entry]:
    """hashlib lets go of the interpreter lock, so threads overlap both reading and hashing."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint-hash") as pool:
        return dict(zip(names, pool.map(lambda name: _hash(store, name), names), strict=True))


def _hash(store: Store, name: str) -> Entry:
    digest = hashlib.sha256()
    size = 0
    for chunk in store.chunks(name):
        digest.update(chunk)
        size += len(chunk)
    return Entry(size, digest.hexdigest())


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False).encode() + b"\n"
