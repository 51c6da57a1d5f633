"""Hostile checkpoint folders: nothing in them is executed, imported or patched, and only verified bytes are loaded."""

import contextlib
import json
import os
import pickle
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from nsa.errors import CheckpointError
from nsa_train.checkpoint.load import export, require_trustworthy
from nsa_train.checkpoint.manifest import LocalFiles, build_manifest, encode, read_key
from tests.nsa_train.train.engine.test_checkpointer import Bomb, Module, assert_same, checkpointer, save

INDEX = "model_and_optim/index.jsonl"
PICKLED_INDEX = "model_and_optim/.metadata"
PIECES = "model_and_optim/__0_0.distcp"
RANK = "train/rank0.pt"


@pytest.fixture(scope="module")
def signed_run(tmp_path_factory):
    """A signed run of two checkpoints, its key file and the module as it was at the second."""
    root = tmp_path_factory.mktemp("attacked")
    (root / "key").write_text("k" * 32)
    module = save(root / "checkpoints", 1, key_file=str(root / "key"))
    save(root / "checkpoints", 2, module, key_file=str(root / "key"))
    return root, module


@pytest.fixture
def root(signed_run, tmp_path):
    return Path(shutil.copytree(signed_run[0], tmp_path / "root", symlinks=True))


def commit(step: Path) -> None:
    """A manifest that fits, as whoever can write the folder can write it."""
    (step / "COMMIT.json").unlink(missing_ok=True)
    (step / "COMMIT.json").write_bytes(encode(build_manifest(LocalFiles(step), 2, "now")))


def refused(step: Path, tmp_path: Path) -> None:
    """Require that every way to use a checkpoint refuses it."""
    for use in (
        lambda: require_trustworthy(step),
        lambda: checkpointer(step.parent, allow_foreign=True).load(step, Module(seed=1)),
        lambda: export(step, tmp_path / "out", allow_foreign=True),
    ):
        with pytest.raises(CheckpointError):
            use()


def engine_index(step: Path):
    with (step / PICKLED_INDEX).open("rb") as file:
        return pickle.load(file)


def write_older_index(step: Path, content: bytes) -> None:
    """Write the index as earlier versions did, which had the pickle alone."""
    (step / INDEX).unlink()
    (step / PICKLED_INDEX).write_bytes(content)


class Hidden(dict):
    """Pickles as an OrderedDict whose BUILD state shadows `values`: the scan sees nothing, a lookup everything."""

    def __reduce__(self):
        from collections import OrderedDict

        return OrderedDict, (), {"values": torch.Size, "items": torch.Size}, None, iter(dict.items(self))


def test_a_container_that_hides_its_pieces_from_the_scan_is_refused(root, tmp_path):
    step, canary = root / "checkpoints/step2", tmp_path / "canary"
    index = engine_index(step)
    (step / PIECES).rename(step / "model_and_optim/pieces.bin")
    for where in index.storage_data.values():
        where.relative_path = "pieces.bin"
    with (step / "model_and_optim/pieces.bin").open("ab") as file:
        where.offset = file.tell()
        torch.save(Bomb(canary), file)
        where.length = file.tell() - where.offset
    index.storage_data = Hidden(index.storage_data)
    write_older_index(step, pickle.dumps(index))
    commit(step)
    refused(step, tmp_path)
    assert not canary.exists()


def patching_pickle() -> bytes:
    """GLOBAL StorageMeta, BUILD (None, {"patched": True}), STOP: BUILD on a class sets attributes of the class."""
    return b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n(N}X\x07\x00\x00\x00patched\x88stb."


def importing_pickle() -> bytes:
    return b"cthis\ns\n."


@pytest.mark.parametrize("content", [patching_pickle(), importing_pickle()])
@pytest.mark.parametrize("name", [PICKLED_INDEX, RANK])
def test_a_refused_pickle_has_changed_nothing(root, tmp_path, content, name):
    step = root / "checkpoints/step2"
    if name == RANK:
        with zipfile.ZipFile(step / RANK, "w") as archive:
            archive.writestr("rank0/data.pkl", content)
            archive.writestr("rank0/byteorder", b"little")
            archive.writestr("rank0/version", b"3\n")
    else:
        write_older_index(step, content)
    commit(step)
    sys.modules.pop("this", None)
    try:
        refused(step, tmp_path)
        assert not hasattr(StorageMeta, "patched")
        assert "this" not in sys.modules
    finally:
        if hasattr(StorageMeta, "patched"):
            del StorageMeta.patched


def change_lines(step: Path, change) -> None:
    head, *lines = map(json.loads, (step / INDEX).read_text().splitlines())
    change(head, lines)
    (step / INDEX).write_text("".join(f"{json.dumps(line)}\n" for line in (head, *lines)))
    commit(step)


def point_outside(head, lines):
    head["files"][0] = "../../step1/" + PIECES


def point_beyond_the_end(head, lines):
    lines[0]["pieces"][0][1] = 10**7


def claim_a_larger_tensor(head, lines):
    lines[0]["size"][0] = 1 << 40


def claim_a_larger_piece(head, lines):
    lines[0]["size"][0] = lines[0]["pieces"][0][-len(lines[0]["size"])] = 1 << 40


def claim_the_same_bytes_twice(head, lines):
    for line in lines:
        for piece in line["pieces"]:
            piece[1], piece[2] = 0, 600_000


def list_a_piece_twice(head, lines):
    lines[0]["pieces"] *= 2


def leave_out_a_tensor_with_a_file(head, lines):
    lines.clear()


def name_a_tensor_twice(head, lines):
    lines.append(lines[0])


def empty_path(head, lines):
    lines[0]["path"] = []


def unknown_type(head, lines):
    lines[0]["dtype"] = "object"


def negative_numbers(head, lines):
    lines[0]["pieces"][0][1] = -1


def nothing_but_brackets(head, lines):
    lines[0]["pieces"] = [[], {}, None]


def another_format(head, lines):
    head["format"] = 2


CHANGES = (
    *(point_outside, point_beyond_the_end, claim_a_larger_tensor, claim_a_larger_piece, claim_the_same_bytes_twice),
    *(list_a_piece_twice, leave_out_a_tensor_with_a_file, name_a_tensor_twice, empty_path, unknown_type),
    *(negative_numbers, nothing_but_brackets, another_format),
)


@pytest.mark.parametrize("change", CHANGES)
def test_an_index_that_contradicts_the_files_is_refused(root, tmp_path, change):
    change_lines(root / "checkpoints/step2", change)
    refused(root / "checkpoints/step2", tmp_path)


def test_only_a_full_check_reads_the_pickle_beside_the_index(root, tmp_path):
    """The pickle stays for other readers of DCP, which execute it."""
    step, canary = root / "checkpoints/step2", tmp_path / "canary"
    (step / PICKLED_INDEX).write_bytes(pickle.dumps(Bomb(canary)))
    commit(step)
    with pytest.raises(CheckpointError, match="metadata"):
        require_trustworthy(step)
    checkpointer(root / "checkpoints").load(step, Module(seed=1))
    assert not canary.exists()


def test_a_file_that_no_checkpoint_has_is_refused(root, tmp_path):
    step = root / "checkpoints/step2"
    (step / "model_and_optim/hook.py").write_text("print('hello')")
    commit(step)
    refused(step, tmp_path)


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(root, tmp_path):
    """torch.load unpacks compressed archives: 256 MiB of zeros in a file of 256 KiB."""
    step = root / "checkpoints/step2"
    torch.save({"global_step": torch.zeros(4, dtype=torch.uint8)}, tmp_path / "small.pt")
    with (
        zipfile.ZipFile(tmp_path / "small.pt") as small,
        zipfile.ZipFile(step / RANK, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for info in small.infolist():
            if info.filename.endswith("data/0"):
                with archive.open(info.filename, "w") as stream:
                    for _ in range(256):
                        stream.write(bytes(1 << 20))
            else:  # BININT1 4 becomes BININT 2**28, in the storage and in the shape
                content = small.read(info).replace(b"K\x04", b"J\x00\x00\x00\x10")
                archive.writestr(zipfile.ZipInfo(info.filename), content)
    assert (step / RANK).stat().st_size < 1 << 20
    commit(step)
    refused(step, tmp_path)


def replace(file: Path, content: bytes) -> None:
    file.with_name("other").write_bytes(content)
    os.replace(file.with_name("other"), file)


def overwrite(file: Path, content: bytes) -> None:
    with file.open("r+b") as stream:
        stream.write(content)
        stream.truncate()


def hostile_index(step: Path, bomb: Bomb) -> bytes:
    return pickle.dumps(bomb)


def hostile_pieces(step: Path, bomb: Bomb) -> bytes:
    """Replace every piece by the bomb, in a file of the same length."""
    content = bytearray((step / PIECES).read_bytes())
    torch.save(bomb, step.parent / "bomb.pt")
    planted = (step.parent / "bomb.pt").read_bytes()
    for where in engine_index(step).storage_data.values():
        if where.length >= len(planted):
            content[where.offset : where.offset + where.length] = planted.ljust(where.length, b"\0")
    return bytes(content)


@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
@pytest.mark.parametrize("swap", [replace, overwrite])
@pytest.mark.parametrize(
    ("name", "hostile"), [(INDEX, hostile_index), (PICKLED_INDEX, hostile_index), (PIECES, hostile_pieces)]
)
def test_a_file_swapped_after_the_verification_is_not_loaded(signed_run, root, tmp_path, name, hostile, swap, signed):
    """The swap happens after the checkpoint was verified and its index read, before its tensors are."""
    step, canary = root / "checkpoints/step2", tmp_path / "canary"
    content = hostile(step, Bomb(canary))

    class Attacked(Module):
        def state_dict_to_load(self, metadata, *, optim=None):
            swap(step / name, content)
            return super().state_dict_to_load(metadata, optim=optim)

    key = {"key_file": str(root / "key")} if signed else {}
    maker, module = checkpointer(root / "checkpoints", **key), Attacked(seed=1)
    maker.find_resumable(root / "checkpoints")
    with contextlib.suppress(CheckpointError):
        maker.load(step, module)
        assert_same(module.whole(), signed_run[1].whole())
    assert not canary.exists()


@pytest.mark.parametrize("swap", [replace, overwrite])
@pytest.mark.parametrize("name", [INDEX, PIECES, RANK, "state.json"])
def test_bytes_changed_after_the_verification_are_refused(root, name, swap):
    """Changes data without any code: other weights, another step, another record."""
    step = root / "checkpoints/step2"
    maker = checkpointer(root / "checkpoints", key_file=str(root / "key"))
    assert maker.find_resumable(root / "checkpoints").path == step
    content = bytearray((step / name).read_bytes())
    content[len(content) // 2] ^= 1
    swap(step / name, bytes(content))
    with pytest.raises(CheckpointError):
        maker.load(step, Module(seed=1))


def test_a_signature_covers_what_is_loaded(root):
    """A manifest without signature, swapped in after the verification, is refused too."""
    step = root / "checkpoints/step2"
    maker = checkpointer(root / "checkpoints", key_file=str(root / "key"))
    assert maker.find_resumable(root / "checkpoints").path == step
    content = bytearray((step / PIECES).read_bytes())
    content[len(content) // 2] ^= 1
    (step / PIECES).write_bytes(content)
    commit(step)
    with pytest.raises(CheckpointError):
        maker.load(step, Module(seed=1))
    assert read_key(root / "key") == b"k" * 32
