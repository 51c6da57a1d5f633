"""`prepare` on folders of text: the same bytes for any number of workers, duplicates, what was skipped."""

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa.errors import ConfigError, DataError
from nsa_train.data.prepare.plan import make_plan
from nsa_train.data.prepare.run import prepare, read_report
from nsa_train.data.prepare.slurm import submit
from nsa_train.data.prepare.task import _HASH_BYTES, _first_occurrences, _TaskReader, hash_task, write_masks
from nsa_train.data.shards.manifest import first_documents, read_manifest, verify_set
from nsa_train.data.source.read_report import BAD_LINES, BINARY, DUPLICATES, EMPTY, EMPTY_RECORDS
from nsa_train.storage import StorageFolder
from tests.nsa_train.data.corpora import make_records, write_parquet

SETTINGS = {"held_out_fraction": 0.1, "units_per_task": 7, "shard_tokens": 20_000}


def write_texts(folder: Path, files: int = 60) -> Path:
    """Files of several kinds, of which every third text is that of an earlier one."""
    rng = random.Random(3)
    folder.mkdir()
    for number in range(files):
        text = f"text {number // 3 if number % 3 == 0 else number} " * rng.randint(50, 400)
        (folder / f"{number:03d}.{rng.choice(['txt', 'md', 'html'])}").write_text(text)
    (folder / "same").mkdir()
    (folder / "same" / "000.txt").write_text((folder / sorted(p.name for p in folder.iterdir())[0]).read_text())
    (folder / "empty.txt").touch()
    (folder / "binary.txt").write_bytes(b"\0\1\2" * 99)
    (folder / "a.jsonl").write_text("\n".join(json.dumps(r) for r in [*make_records(30), *make_records(30)]))
    write_parquet(folder / "b.parquet", [*make_records(30), {"text": "", "id": "none", "dump": ""}])
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("own") / "texts")


@pytest.fixture(scope="module")
def alone(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "out"
    prepare(make_plan(str(texts), "byte", dedup=True, **SETTINGS), str(out), workers=1)
    return out


def digests(path: Path) -> dict[str, str]:
    files = (p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def documents(out: Path) -> list[tuple[str, str]]:
    """(id, text) in stored order, both splits."""
    folder = StorageFolder(str(out))
    manifest = read_manifest(folder)
    segments = [
        start
        for split in manifest.splits
        for start in first_documents(folder, manifest, split, documents=10**6, max_tokens=10**6)
    ]
    return [(start.doc_id, bytes(start.ids[:-1]).decode()) for start in segments]


def test_two_workers_write_the_same_bytes(texts: Path, alone: Path, tmp_path: Path) -> None:
    prepare(make_plan(str(texts), "byte", dedup=True, **SETTINGS), str(tmp_path / "out"), workers=2)
    assert digests(tmp_path / "out") == digests(alone)
    assert list(verify_set(StorageFolder(str(alone)), read_manifest(StorageFolder(str(alone))))) == []


def test_of_equal_documents_the_first_is_kept(texts: Path, alone: Path) -> None:
    """Compared with a plain set of texts, in the order of the tasks: parquet, JSONL, text files by name."""
    plan = make_plan(str(texts), "byte", **SETTINGS)
    seen: set[str] = set()
    firsts, repeated = [], 0
    for task in plan.tasks():
        for _, document in _TaskReader(plan, task).documents():
            if document.text in seen:
                repeated += 1
            else:
                seen.add(document.text)
                firsts.append((document.id, document.text))
    assert sorted(documents(alone)) == sorted(firsts)
    report = read_report(StorageFolder(str(alone)))
    assert report is not None
    assert report.skipped[DUPLICATES].count == repeated >= 60


def test_the_report_counts_everything(texts: Path, alone: Path) -> None:
    report = read_report(StorageFolder(str(alone)))
    manifest = read_manifest(StorageFolder(str(alone)))
    assert report is not None
    totals = [manifest.totals(split) for split in manifest.splits]
    assert report.total().documents == sum(total["documents"] for total in totals)
    assert report.total().tokens == sum(total["tokens"] for total in totals)
    assert report.total().characters == sum(len(text) for _, text in documents(alone))
    assert report.total().files == 60 + 1 + 2
    assert report.skipped[EMPTY].first == ["empty.txt"]
    assert report.skipped[BINARY].first == ["binary.txt"]
    assert report.skipped[EMPTY_RECORDS].first == ["none"]
    assert (report.kinds["jsonl"].files, report.kinds["parquet"].documents) == (1, 30)


def test_killed_at_any_moment_it_resumes_to_the_same_bytes(texts: Path, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = (
        "import sys\n"
        "from nsa_train.data.prepare.plan import make_plan; from nsa_train.data.prepare.run import prepare\n"
        f"if __name__ == '__main__': prepare(make_plan(sys.argv[1], 'byte', dedup=True, **{SETTINGS!r}), sys.argv[2], "
        "workers=2)\n"
    )
    (tmp_path / "child.py").write_text(program)
    command = [sys.executable, str(tmp_path / "child.py"), str(texts), str(out)]
    for sign in ("_work/hashes/*.bin", "_work/masks/*.bin", "_work/tasks/*.json"):
        child = subprocess.Popen(command, cwd=Path(__file__).parents[4])
        while child.poll() is None and not list(out.glob(sign)):
            time.sleep(0.001)
        child.kill()
        assert child.wait() == -signal.SIGKILL, f"it finished before {sign} was seen: make the corpus larger"
    subprocess.run(command, check=True, timeout=120, cwd=Path(__file__).parents[4])
    assert digests(out) == digests(alone)


def test_a_source_that_changed_between_the_passes_is_refused(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", files=6)
    plan = make_plan(str(texts), "byte", dedup=True, **SETTINGS)
    (tmp_path / "out").mkdir()
    (texts / "a.jsonl").write_text("\n".join(json.dumps(r) for r in make_records(3)))
    out = StorageFolder(str(tmp_path / "out"))
    for rank in range(len(plan.tasks())):
        hash_task(plan, out, rank)
    write_masks(plan, out)
    (texts / "a.jsonl").write_text("\n".join(json.dumps(r) for r in make_records(9)))
    with pytest.raises(DataError, match="source changed"):
        prepare(plan, out.url, workers=1)


@given(st.lists(st.integers(0, 5), max_size=40))
def test_first_occurrences(values: list[int]) -> None:
    hashes = b"".join(hashlib.blake2b(bytes([value]), digest_size=_HASH_BYTES).digest() for value in values)
    assert _first_occurrences(hashes).tolist() == [value not in values[:place] for place, value in enumerate(values)]


def test_a_million_hashes_need_memory_in_proportion() -> None:
    import tracemalloc

    hashes = np.random.default_rng(0).bytes(_HASH_BYTES * 10**6)
    tracemalloc.start()
    assert _first_occurrences(hashes + hashes[: _HASH_BYTES * 10]).sum() == 10**6
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80 * 10**6


def test_small_files_share_a_task(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    assert len(make_plan(str(texts), "byte").text_tasks) == 1
    assert [len(names) for names in make_plan(str(texts), "byte", units_per_task=25).text_tasks] == [25, 25, 13]


def test_one_file_is_prepared_alone(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("A whole book.")
    (tmp_path / "other.txt").write_text("Not this one.")
    prepare(make_plan(str(tmp_path / "book.txt"), "byte"), str(tmp_path / "out"), workers=1)
    assert documents(tmp_path / "out") == [("book.txt", "A whole book.")]


def test_bad_lines_are_skipped_and_a_wrong_key_is_an_error(tmp_path: Path) -> None:
    lines = [json.dumps(r) for r in make_records(5)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{cut"]))
    prepare(make_plan(str(tmp_path), "byte", exclude=tmp_path / "out"), str(tmp_path / "out"), workers=1)
    report = read_report(StorageFolder(str(tmp_path / "out")))
    assert report is not None
    assert (report.skipped[BAD_LINES].count, report.total().documents) == (1, 5)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": "x"}) for _ in range(9)))
    with pytest.raises(DataError, match="body"):
        prepare(make_plan(str(tmp_path), "byte"), str(tmp_path / "out2"), workers=1)


def test_settings_of_text_are_part_of_a_set(texts: Path, alone: Path, tmp_path: Path) -> None:
    for changes in ({"dedup": False}, {"dedup": True, "encoding": "cp1251"}):
        with pytest.raises(ConfigError):
            prepare(make_plan(str(texts), "byte", **SETTINGS, **changes), str(alone), workers=1)
    plan = make_plan(str(texts / "b.parquet"), "byte")
    assert not {"dedup", "encoding", "text_tasks", "left_out"} & plan.made_from().keys(), "sets of earlier versions"


def test_slurm_refuses_dedup(texts: Path, tmp_path: Path) -> None:
    plan = make_plan(str(texts), "byte", dedup=True)
    with pytest.raises(ConfigError, match="dedup"):
        submit(plan, str(tmp_path / "a"), log_folder=tmp_path / "log", partition="cpu", time_limit="01:00:00")
