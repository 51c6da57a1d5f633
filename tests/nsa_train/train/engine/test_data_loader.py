"""The loader hands every rank its share, and its state knows no ranks."""

import ctypes
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nsa.errors import ConfigError
from nsa.model.loss import IGNORE
from nsa_train import names
from nsa_train.data.prefetcher import PrefetchSettings
from nsa_train.data.rows.batch import Batch
from nsa_train.data.rows.specs import DirectData, SyntheticData
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.data_loader import RowLoader, _divide_reading, to_engine
from tests import fork_server
from tests.nsa_train.train.runs import ROOT, environment

DATA = SyntheticData("uniform", vocab_size=50, seq_len=16, seed=3)


def loader(tmp_path, rank=0, world=1, prefetch=None, ranks_per_row=1) -> RowLoader:
    ranks = RankInfo(rank=rank, world=world, distributed=world > 1, ranks_per_row=ranks_per_row)
    return RowLoader(DATA, global_rows=4, ranks=ranks, work_dir=tmp_path, prefetch=prefetch)


def take(of: RowLoader, count: int, after_each: Callable[[], object] = lambda: None) -> list[torch.Tensor]:
    of.reshuffle(1)
    batches, taken = iter(of), []
    for _ in range(count):
        taken.append(next(batches)["input_ids"])
        after_each()
    of.close()
    return taken


def test_ranks_share_one_sequence(tmp_path):
    whole = take(loader(tmp_path), 3)
    shares = [take(loader(tmp_path, rank, 2), 3) for rank in (0, 1)]
    assert all(torch.equal(torch.cat(parts), batch) for *parts, batch in zip(*shares, whole, strict=True))


@pytest.mark.parametrize("prefetch", [None, PrefetchSettings()])
def test_ranks_that_divide_a_row_get_the_same_rows(tmp_path, prefetch):
    shares = [take(loader(tmp_path, rank, 2), 2) for rank in (0, 1)]
    for rank in range(4):
        of_rank = loader(tmp_path, rank, 4, prefetch, ranks_per_row=2)
        assert len(of_rank.get_mock_batch()["input_ids"]) == 2
        taken = take(of_rank, 2)
        assert all(torch.equal(a, b) for a, b in zip(taken, shares[rank // 2], strict=True))


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (4, 2)])
def test_a_cursor_of_one_world_goes_on_in_another(tmp_path, before, after):
    whole = take(loader(tmp_path), 5)
    first = loader(tmp_path, 0, before)
    take(first, 2)
    state = first.state_dict()
    assert not {"rank", "world", "world_size"} & set(str(state).replace("'", " ").split())
    parts = []
    for rank in range(after):
        second = loader(tmp_path, rank, after)
        second.load_state_dict(state)
        parts.append(take(second, 3))
    assert all(torch.equal(torch.cat(rows), batch) for *rows, batch in zip(*parts, whole[2:], strict=True))


def test_batches_made_ahead_do_not_move_the_cursor(tmp_path):
    ahead, direct = loader(tmp_path, prefetch=PrefetchSettings(queue_depth=4)), loader(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(take(ahead, 3), take(direct, 3), strict=True))
    assert ahead.state_dict() == direct.state_dict()


def test_documents_padding_and_labels_reach_the_engine():
    batch = Batch(
        tokens=np.arange(12, dtype=np.uint16).reshape(2, 6),
        cu_doc_lens=(np.array([0, 2, 6], np.int32), np.array([0, 6], np.int32)),
        loss_mask=np.array([[True] * 6, [True] * 4 + [False] * 2]),
        row_ids=np.arange(2),
        epoch=0,
        documents=2,
    )
    tensors = to_engine(batch)
    assert tensors["doc_lens"].tolist() == [[2, 4], [6, 0]]
    assert tensors["max_doc_lens"] == [4, 6]
    assert tensors["labels"].tolist() == [[1, IGNORE, 3, 4, 5, IGNORE], [7, 8, 9, IGNORE, IGNORE, IGNORE]]
    before = to_engine(replace(batch, mask_document_ends=False))
    assert before["labels"].tolist() == [[1, 2, 3, 4, 5, IGNORE], [7, 8, 9, IGNORE, IGNORE, IGNORE]]


def test_token_ids_of_every_width_become_int64():
    batch = Batch(
        tokens=np.asarray([[1, 2, 65535], [4, 5, 6]], dtype=np.uint16),
        cu_doc_lens=(np.asarray([0, 1, 3], np.int32), np.asarray([0, 3], np.int32)),
        loss_mask=np.asarray([[1, 1, 0], [1, 1, 1]], dtype=bool),
        row_ids=np.arange(2),
        epoch=0,
        documents=1,
    )
    tensors = to_engine(batch)
    assert tensors["input_ids"].tolist() == [[1, 2, 65535], [4, 5, 6]]
    assert tensors["input_ids"].dtype == torch.int64
    assert (tensors["doc_lens"].tolist(), tensors["doc_lens"].dtype) == ([[1, 2], [3, 0]], torch.int32)
    assert tensors["labels"].tolist() == [[IGNORE, IGNORE, IGNORE], [5, 6, IGNORE]]


def test_rows_that_are_whole_documents_need_no_boundaries():
    assert set(to_engine(DATA.open().next_batch(2))) == {"input_ids", "labels"}


def test_a_batch_that_ranks_cannot_share_is_refused(tmp_path):
    with pytest.raises(ConfigError):
        loader(tmp_path, 0, 3)


def read_share(rank, world, folder, source, steps):
    """Run one rank of a process group, in step with the others as in training; report what it read in a file."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    data = DirectData(source, "byte", 32, seed=1, checksum_path=f"{folder}/sums")
    ranks = RankInfo(rank=rank, world=world, distributed=True)
    for name, prefetch in (("in between", None), ("ahead", PrefetchSettings(queue_depth=2))):
        row_loader = RowLoader(data, global_rows=4, ranks=ranks, work_dir=Path(folder) / "run", prefetch=prefetch)
        first = take(row_loader, steps, dist.barrier)
        row_loader.load_state_dict(state := row_loader.state_dict())  # as at a rollback
        again = take(row_loader, 2, dist.barrier)
        row_loader.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(again, take(row_loader, 2, dist.barrier), strict=True))
        torch.save(first + again, f"{folder}/{name}{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(function: Callable[..., None], *arguments: object) -> None:
    """Call it on two ranks, with the rank, their number and these arguments."""
    call = f"from {__name__} import {function.__name__} as act; act(int(sys.argv[1]), 2, *{arguments!r})"
    ranks = [
        fork_server.start(["-c", f"import sys; {call}", str(rank)], cwd=ROOT, env=environment(), stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    said = [rank.stderr.read() for rank in ranks]
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0], said


def test_ranks_of_a_run_divide_the_reading_and_share_one_sequence(tmp_path):
    lines = [json.dumps({"id": str(i), "text": f"document {i} " * (i % 17)}) for i in range(300)]
    for part in range(6):
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines[part::6]))
    source = str(tmp_path / "*.jsonl")
    alone = RowLoader(DirectData(source, "byte", 32, seed=1), global_rows=4, ranks=RankInfo(), work_dir=tmp_path)
    whole = take(alone, 42)
    run_ranks(read_share, str(tmp_path), source, 40)
    for name in ("in between", "ahead"):
        shares = [torch.load(tmp_path / f"{name}{rank}.pt", weights_only=True) for rank in (0, 1)]
        assert all(torch.equal(torch.cat(parts), batch) for *parts, batch in zip(*shares, whole, strict=True))
    assert not (tmp_path / "run" / names.DATA_EXCHANGE).exists(), "removed at the end"


def read_without_shared_folder(rank, world, folder, source):
    """Rank 1 sees an empty run folder, as on another node whose disk is its own."""
    if rank == 1:
        new_mount_namespace = 0x00020000
        assert ctypes.CDLL(None, use_errno=True).unshare(new_mount_namespace) == 0, "needs root"
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", f"{folder}/run"], check=True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    ranks = RankInfo(rank=rank, world=world, distributed=True)
    divided = _divide_reading(DirectData(source, "byte", 32, seed=1), ranks, Path(folder) / "run")
    assert divided.exchange is None
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_without_a_shared_run_folder_read_everything_themselves(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "0", "text": "document"}))
    (tmp_path / "run").mkdir()
    run_ranks(read_without_shared_folder, str(tmp_path), str(tmp_path / "a.jsonl"))
