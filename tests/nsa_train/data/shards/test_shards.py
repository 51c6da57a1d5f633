"""Prepared shards: what is written is what is read, and nothing damaged is ever handed out."""

import errno
import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nsa.errors import ConfigError, DataError
from nsa_train.data.rows.batch import rows_of_rank
from nsa_train.data.rows.prepared import PreparedRows
from nsa_train.data.rows.row_stream import IndexedRowStream
from nsa_train.data.shards.manifest import MANIFEST_NAME, ShardManifest, read_manifest
from nsa_train.data.shards.reader import ShardCache, ShardReader
from nsa_train.data.shards.writer import BLOCK_BYTES, ShardInfo, ShardWriter
from nsa_train.storage import StorageFolder
from tests.nsa_train.data.shard_sets import documents, write_set


def _read_everything(path: Path) -> np.ndarray:
    rows = PreparedRows(ShardReader(StorageFolder(str(path))), 512, shuffle_seed=1, with_provenance=True)
    return rows.rows(np.arange(rows.rows_per_epoch)).tokens


def test_a_flipped_byte_is_found_100_of_100(tmp_path: Path) -> None:
    """Flips any bit of any file, the manifest included."""
    write_set(tmp_path, documents(120, longest=4000), docs_per_shard=60)
    _read_everything(tmp_path)
    files = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    assert max(p.stat().st_size for p in files) > 2 * BLOCK_BYTES
    rng = np.random.default_rng(0)
    n_detected = 0
    for trial in range(100):
        path = files[trial % len(files)]
        raw = path.read_bytes()
        at = int(rng.integers(len(raw)))
        flipped = raw[at] ^ (1 << int(rng.integers(8)))
        path.write_bytes(raw[:at] + bytes([flipped]) + raw[at + 1 :])
        try:
            _read_everything(tmp_path)
        except DataError:
            n_detected += 1
        path.write_bytes(raw)
    assert n_detected == 100
    _read_everything(tmp_path)


def test_only_touched_blocks_are_hashed(tmp_path: Path) -> None:
    """Damage far from a row does not stop it: verification costs what is read, not the size of the set."""
    write_set(tmp_path, documents(60, longest=8000), docs_per_shard=60)
    tokens = next(tmp_path.rglob("*.tok"))
    raw = bytearray(tokens.read_bytes())
    raw[-1] ^= 1
    tokens.write_bytes(raw)
    rows = PreparedRows(ShardReader(StorageFolder(str(tmp_path))), 512, shuffle_seed=None)
    rows.rows(np.arange(1))
    with pytest.raises(DataError, match="SHA-256"):
        rows.rows(np.asarray([rows.rows_per_epoch - 1]))


@pytest.mark.parametrize("suffix", ["tok", "idx", "ids"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_cut_off_and_missing_files_are_named(tmp_path: Path, suffix: str, damage: str) -> None:
    write_set(tmp_path, documents(40))
    victim = next(tmp_path.rglob(f"*.{suffix}"))
    raw = victim.read_bytes()
    victim.write_bytes(raw[: len(raw) // 2])
    if damage == "gone":
        victim.unlink()
    with pytest.raises(DataError, match=victim.name):
        _read_everything(tmp_path)


def test_a_folder_without_manifest_is_unfinished(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=MANIFEST_NAME):
        read_manifest(StorageFolder(str(tmp_path)))


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path, documents(4))
    content = json.loads((tmp_path / MANIFEST_NAME).read_bytes())
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content | {"version": 99}))
    with pytest.raises(DataError, match="99"):
        read_manifest(StorageFolder(str(tmp_path)))


def test_a_full_disk_is_named_with_a_way_on(tmp_path: Path) -> None:
    writer = ShardWriter("train/000000-000", np.dtype(np.uint16), tmp_path)
    writer._file = open("/dev/full", "wb")  # noqa: SIM115
    writer.add("a", np.zeros(10, dtype=np.uint16), 0)
    with pytest.raises(DataError, match=os.strerror(errno.ENOSPC)):
        writer.finish(StorageFolder(str(tmp_path)))
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_addresses_never_carry_secrets() -> None:
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID"):
        StorageFolder("s3://user:secret@bucket/x")


class RemoteFolder(StorageFolder):
    """A local folder that a reader must treat as a remote one; counts what is fetched."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.is_local = False
        self.fetched: list[str] = []

    def open_input(self, name: str):
        self.fetched.append(name)
        return super().open_input(name)


def test_a_cached_read_equals_a_local_read_within_the_limit(tmp_path: Path) -> None:
    source, cache_path = tmp_path / "set", tmp_path / "cache"
    write_set(source, documents(200, longest=300), docs_per_shard=20)
    expected = PreparedRows(ShardReader(StorageFolder(str(source))), 128, shuffle_seed=None)
    sizes = [p.stat().st_size for p in source.rglob("*") if p.is_file()]
    limit = sum(sizes) // 4
    folder = RemoteFolder(str(source))
    rows = PreparedRows(
        ShardReader(folder, cache=ShardCache(cache_path, limit)), 128, shuffle_seed=None, with_provenance=True
    )
    for i in range(0, rows.rows_per_epoch, 4):
        ids = np.arange(i, min(i + 4, rows.rows_per_epoch))
        assert np.array_equal(rows.rows(ids).tokens, expected.rows(ids).tokens)
        assert sum(p.stat().st_size for p in cache_path.iterdir()) <= limit
    assert len(folder.fetched) == len(set(folder.fetched))  # in order, each file is fetched once
    assert not list(cache_path.glob("*.tmp"))


def test_the_least_recently_used_file_leaves_first(tmp_path: Path) -> None:
    source = tmp_path / "set"
    manifest = write_set(source, documents(60), docs_per_shard=20)
    folder, cache = RemoteFolder(str(source)), ShardCache(tmp_path / "cache", 10**9)
    files = [shard.files()[0] for shard in manifest.splits["train"]]
    paths = [cache.fetch(folder, *file) for file in files]
    for age, path in ((30, paths[0]), (20, paths[1]), (10, paths[2])):
        os.utime(path, (time.time() - age, time.time() - age))
    cache.fetch(folder, *files[0])  # used again: now the youngest
    cache.limit_bytes = sum(f[1] for f in files)
    cache.fetch(folder, *manifest.splits["train"][0].files()[1])
    assert [p.exists() for p in paths] == [True, False, True]


def test_a_damaged_download_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "set"
    manifest = write_set(source, documents(10))
    name, size, sha256 = manifest.splits["train"][0].files()[0]
    raw = bytearray((source / name).read_bytes())
    raw[3] ^= 4
    (source / name).write_bytes(raw)
    cache = ShardCache(tmp_path / "cache", 10**9)
    with pytest.raises(DataError):
        cache.fetch(RemoteFolder(str(source)), name, size, sha256)
    assert [p for p in (tmp_path / "cache").iterdir() if not p.name.startswith(".lock")] == []


def test_a_full_shuffle_of_more_than_the_cache_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "set"
    write_set(source, documents(60))
    reader = ShardReader(RemoteFolder(str(source)), cache=ShardCache(tmp_path / "cache", 1000))
    with pytest.raises(ConfigError, match="cache_gib"):
        PreparedRows(reader, 16, shuffle_seed=0)


def test_ranks_can_share_a_small_cache(tmp_path: Path) -> None:
    """Four processes, one cache that holds a fraction: files vanish under each other, every row is still right."""
    source = tmp_path / "set"
    write_set(source, documents(120, longest=300), docs_per_shard=10)
    program = textwrap.dedent(
        """
        import hashlib, sys
        import numpy as np
        from nsa_train.data.rows.prepared import PreparedRows
        from nsa_train.data.shards.reader import ShardCache
        from nsa_train.data.shards.reader import ShardReader
        from tests.nsa_train.data.shards.test_shards import RemoteFolder

        source, cache, seed = sys.argv[1:]
        reader = ShardReader(RemoteFolder(source), cache=ShardCache(cache, 12_000), max_open_shards=1)
        rows = PreparedRows(reader, 64, shuffle_seed=None)
        order = np.random.default_rng(int(seed)).permutation(rows.rows_per_epoch)
        tokens = rows.rows(order).tokens[np.argsort(order)]
        print(hashlib.sha256(tokens.tobytes()).hexdigest())
        """
    )
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "cache")]
    children = [subprocess.Popen([*command, str(s)], stdout=subprocess.PIPE, text=True) for s in range(4)]
    digests = {child.communicate(timeout=120)[0] for child in children}
    assert all(child.returncode == 0 for child in children)
    assert len(digests) == 1


def test_a_set_of_fifteen_trillion_tokens_opens_with_a_small_cursor(tmp_path):
    """Reads its manifest alone: no shard is opened, and opening the set again parses nothing again."""
    digest = "0" * 64
    shards = [
        ShardInfo(f"train/{number:06d}-000", 2**30, 10**6, 2**31, 10**7, 10**7, digest, digest, digest)
        for number in range(13_970)
    ]
    manifest = ShardManifest(32_768, "any", 0, "uint16", {"source": "any"}, [], {"train": shards, "validation": []})
    folder = StorageFolder(str(tmp_path))
    folder.write_bytes(MANIFEST_NAME, manifest.to_bytes())
    rows = PreparedRows(ShardReader(folder), 8192, shuffle_seed=7)
    assert rows.reader.total_tokens > 15 * 10**12
    stream = IndexedRowStream(rows)
    assert len(json.dumps(stream.state_dict())) < 300
    share = [rows_of_rank(4096, rank, 1024) for rank in (0, 1023)]
    assert [len(range(part.start, part.stop)) for part in share] == [4, 4]
    assert len(set(rows.stored_rows(np.arange(4096)).tolist())) == 4096
    assert read_manifest(folder) is rows.reader.manifest
    folder.write_bytes(MANIFEST_NAME, replace(manifest, eos_id=1).to_bytes())
    assert read_manifest(folder).eos_id == 1
