"""Bytes are verified as they are read, in blocks, for manifests of both formats."""

import hashlib
import json
import os
import random
from pathlib import Path

import pytest

from nsa.errors import CheckpointError
from nsa_train.checkpoint.load import VerifiedFiles
from nsa_train.checkpoint.manifest import BLOCK_BYTES, LocalFiles, build_manifest, decode, encode, examine

NAME = "model_and_optim/__0_0.distcp"
SIZE = 2 * BLOCK_BYTES + 12345


@pytest.fixture(scope="module")
def content():
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def checkpoint(tmp_path, content):
    step = tmp_path / "step7"
    (step / "model_and_optim").mkdir(parents=True)
    (step / NAME).write_bytes(content)
    (step / "state.json").write_text("{}")
    (step / "model_and_optim/__1_0.distcp").touch()
    return step


def commit_now(checkpoint: Path) -> None:
    (checkpoint / "COMMIT.json").write_bytes(encode(build_manifest(LocalFiles(checkpoint), 7, "now")))


def commit_as_the_first_format(checkpoint: Path) -> None:
    """Write a manifest as 0.x did: one hash per file."""
    names = ["model_and_optim/__0_0.distcp", "model_and_optim/__1_0.distcp", "state.json"]
    files = {
        name: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        for name in names
        if (raw := (checkpoint / name).read_bytes()) is not None
    }
    body = {"files": files, "format": 1, "saved_at": "then", "step": 7}
    text = json.dumps(body, sort_keys=True, indent=1).encode() + b"\n"
    document = {"commit": body, "sha256": hashlib.sha256(text).hexdigest()}
    (checkpoint / "COMMIT.json").write_bytes(json.dumps(document, sort_keys=True, indent=1).encode() + b"\n")


COMMITS = [commit_now, commit_as_the_first_format]


def opened(checkpoint: Path) -> VerifiedFiles:
    return VerifiedFiles(checkpoint, decode((checkpoint / "COMMIT.json").read_bytes()))


def write_at(checkpoint: Path, offset: int) -> None:
    with (checkpoint / NAME).open("r+b") as file:
        old = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([old[0] ^ 1]), offset)


@pytest.mark.parametrize("commit", COMMITS)
def test_any_part_of_a_file_comes_back(checkpoint, content, commit):
    commit(checkpoint)
    assert examine(LocalFiles(checkpoint), step=7).good
    files = opened(checkpoint)
    dice = random.Random(1)
    parts = [(0, SIZE), (0, 0), (BLOCK_BYTES, 0), (BLOCK_BYTES - 1, 2), (SIZE - 1, 1)]
    parts += [(start := dice.randrange(SIZE), dice.randrange(SIZE - start)) for _ in range(10)]
    for start, length in parts:
        assert files.read_range(NAME, start, length) == content[start : start + length]
    for start, length in ((SIZE, 1), (-1, 2), (0, SIZE + 1)):
        with pytest.raises(CheckpointError):
            files.read_range(NAME, start, length)
    with pytest.raises(CheckpointError):
        files.read_range("state/rank9.json", 0, 1)


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("offset", [0, BLOCK_BYTES + 5, SIZE - 1])
def test_a_changed_byte_is_refused_before_and_after_opening(checkpoint, commit, offset):
    commit(checkpoint)
    before = opened(checkpoint)
    assert len(before.read_range(NAME, 0, 1 if offset else 0)) == (1 if offset else 0)
    write_at(checkpoint, offset)
    assert not examine(LocalFiles(checkpoint), step=7).good
    for files in (before, opened(checkpoint)):
        with pytest.raises(CheckpointError):
            files.read_range(NAME, 0, SIZE)


def test_only_the_blocks_of_a_part_are_read(checkpoint, content):
    commit_now(checkpoint)
    write_at(checkpoint, SIZE - 1)
    files = opened(checkpoint)
    assert files.read_range(NAME, 100, BLOCK_BYTES) == content[100 : 100 + BLOCK_BYTES]


def test_links_pipes_and_short_files_are_refused(checkpoint):
    commit_now(checkpoint)
    target = checkpoint / NAME
    target.rename(checkpoint / "elsewhere")
    target.symlink_to(checkpoint / "elsewhere")
    with pytest.raises(CheckpointError):
        opened(checkpoint).read_range(NAME, 0, 1)
    target.unlink()
    os.mkfifo(target)
    with pytest.raises(CheckpointError):
        opened(checkpoint).read_range(NAME, 0, 1)
    target.unlink()
    target.write_bytes(b"short")
    with pytest.raises(CheckpointError):
        opened(checkpoint).read_range(NAME, 0, 1)


def test_a_small_file_that_is_large_is_refused(checkpoint):
    commit_now(checkpoint)
    with pytest.raises(CheckpointError):
        opened(checkpoint).read(NAME, limit=1000)


def test_a_manifest_whose_blocks_do_not_fit_is_refused(checkpoint):
    commit_now(checkpoint)
    manifest = decode((checkpoint / "COMMIT.json").read_bytes())
    entry = manifest.files[NAME]
    for blocks in (entry.blocks[:-1], (*entry.blocks, entry.blocks[0]), ("x",) * len(entry.blocks)):
        other = {**manifest.files, NAME: type(entry)(entry.bytes, blocks)}
        with pytest.raises(CheckpointError):
            decode(encode(type(manifest)(7, "now", other)))


def test_a_temporary_file_that_disappears_during_the_listing_is_left_out(tmp_path, monkeypatch):
    """While a rank lists the folder of a checkpoint, another one replaces state.json.new by state.json."""
    listed = os.walk

    def walk(path):
        for folder, subfolders, files in listed(path):
            yield folder, subfolders, [*files, "state.json.new"]

    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setattr(os, "walk", walk)
    assert VerifiedFiles(tmp_path, None).sizes == {"state.json": 2}
