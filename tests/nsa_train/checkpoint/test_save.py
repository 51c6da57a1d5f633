"""The storage writer: files are hashed by who wrote them, and are as DCP's own reader expects them."""

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dist_cp

from nsa.errors import CheckpointError
from nsa_train.checkpoint import save as saving
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.checkpoint.load import open_checkpoint, read_model
from nsa_train.checkpoint.manifest import LocalFiles, ManifestEntry, build_manifest
from nsa_train.checkpoint.save import HashingWriter
from nsa_train.checkpoint.save_plan import SharedSavePlanner
from nsa_train.checkpoint.tensor_index import largest_index


def state() -> dict[str, object]:
    whole = torch.arange(300.0).reshape(30, 10)
    return {
        "model": {
            "a": whole,
            "view": whole[3:7],
            "column": whole[:, 2],
            "scalar": torch.tensor(3.5),
            "none": whole[:0],
        },
        "optim": {"lr": 0.25, "names": ["x", "y"]},
    }


def write(folder: CheckpointFolder, step: int = 1, **settings: int) -> HashingWriter:
    writer = HashingWriter(folder.begin(step), **settings)
    dist_cp.save(state(), storage_writer=writer, planner=SharedSavePlanner(), no_dist=True)
    return writer


def test_hashes_of_the_writer_are_those_of_the_files(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    writer = write(folder)
    rehashed = build_manifest(LocalFiles(folder.staging(1)), 1, "now").files
    assert writer.hashes == rehashed
    assert sorted(rehashed) == [
        "model_and_optim/.metadata",
        "model_and_optim/__0_0.distcp",
        "model_and_optim/index.jsonl",
    ]


def test_what_was_written_is_read_by_us_and_by_dcp(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    writer = write(folder)
    path = folder.commit(1, hashed=writer.hashes)
    model = state()["model"]
    assert isinstance(model, dict)
    read = read_model(open_checkpoint(path, deep=True))
    assert read.keys() == model.keys()
    assert all(torch.equal(read[name], model[name]) for name in read)
    loaded = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.items()}}
    dist_cp.load(loaded, checkpoint_id=path / "model_and_optim", no_dist=True)
    assert all(torch.equal(loaded["model"][name], model[name]) for name in model)


def test_a_view_is_written_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    whole = torch.zeros(1 << 20)
    writer = HashingWriter(tmp_path)
    dist_cp.save({"part": whole[5:10]}, storage_writer=writer, planner=SharedSavePlanner(), no_dist=True)
    assert writer.hashes["model_and_optim/__0_0.distcp"].bytes < 10_000


def test_large_ranks_write_several_files_of_like_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_SMALLEST_FILE_BYTES", 4096)
    tensors = {f"t{number}": torch.full((64, 16), float(number)) for number in range(9)}
    writer = HashingWriter(tmp_path, thread_count=3)
    dist_cp.save({"model": tensors}, storage_writer=writer, planner=SharedSavePlanner(), no_dist=True)
    sizes = [entry.bytes for name, entry in writer.hashes.items() if name.endswith(".distcp")]
    assert len(sizes) == 3
    assert max(sizes) < 1.1 * min(sizes)


def test_commit_reads_no_file_that_was_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CheckpointFolder(tmp_path)
    writer = write(folder)
    (folder.staging(1) / "state.json").write_text("{}")
    read: list[str] = []
    chunks = LocalFiles.chunks
    monkeypatch.setattr(LocalFiles, "chunks", lambda self, name: read.append(name) or chunks(self, name))
    folder.commit(1, hashed=writer.hashes)
    assert set(read) <= {"state.json", "COMMIT.json"}
    assert folder.examine(1).good


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_file_that_is_not_as_long_as_written_is_not_committed(tmp_path: Path, damage: str) -> None:
    folder = CheckpointFolder(tmp_path)
    writer = write(folder)
    file = folder.staging(1) / "model_and_optim/__0_0.distcp"
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match="__0_0"):
        folder.commit(1, hashed=writer.hashes)
    assert folder.find_resumable().step is None


def test_damage_between_writing_and_commit_is_found_before_a_resume(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    writer = write(folder)
    file = folder.staging(1) / "model_and_optim/__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    folder.commit(1, hashed=writer.hashes)
    resumable = folder.find_resumable()
    assert resumable.step is None
    assert "__0_0.distcp does not match its SHA-256" in str(resumable.passed_over[0])


def test_hashes_of_a_background_save_are_asked_for_when_it_has_written(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    hashes: dict[str, ManifestEntry] = {}
    written: Future[None] = Future()
    folder.begin(1)
    committed = folder.commit_after(written, 1, hashed=lambda: hashes)
    hashes.update(write(folder).hashes)
    written.set_result(None)
    assert committed.result(timeout=120) == tmp_path / "step1"
    assert folder.examine(1).good


def test_an_index_of_thousands_of_small_shards_may_be_as_large_as_it_is() -> None:
    """A 7B model on 4,096 ranks: 3.4 million pieces of 114 bytes each in the index, 80 GB of tensors."""
    assert largest_index(80 * 10**9, 4096) > 3_400_000 * 114 * 2
    assert largest_index(80 * 10**9, 8) < 200 << 20
