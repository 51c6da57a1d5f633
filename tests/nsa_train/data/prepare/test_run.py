"""`prepare`: the same bytes whatever happens on the way, the same documents as the direct stream."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nsa.errors import ConfigError, DataError
from nsa.files import SHARED_MEMORY
from nsa_train.data.document import is_held_out
from nsa_train.data.document_stream import DocumentStream
from nsa_train.data.prepare.plan import make_plan, record_plan
from nsa_train.data.prepare.run import prepare, read_report
from nsa_train.data.prepare.slurm import submit
from nsa_train.data.prepare.task import run_task
from nsa_train.data.shards.manifest import read_manifest
from nsa_train.data.shards.reader import ShardReader
from nsa_train.data.source.read_report import DAMAGED_PARTS
from nsa_train.data.source.resolve import open_source
from nsa_train.data.tokenizer import ByteTokenizer
from nsa_train.storage import StorageFolder
from tests.nsa_train.data.faulty_server import Faults, FaultyServer
from tests.nsa_train.data.prepare_child import SETTINGS

WORDS = ["the", "of", "a", "in", "attention", "sparse", "window", "block", "key", "value", "query", "gate", "token"]


def _write_corpus(path: Path, files: int = 6, groups: int = 5, rows: int = 60) -> Path:
    rng = random.Random(0)
    path.mkdir()
    for f in range(files):
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 300))) for _ in range(groups * rows)]
        texts[7] = ""  # empty documents exist in the wild
        ids = [f"<urn:{f}-{i}>" for i in range(groups * rows)]
        table = pa.table({"text": texts, "id": ids})
        pq.write_table(table, path / f"{f:03d}.parquet", row_group_size=rows, write_page_checksum=True)
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write_corpus(tmp_path_factory.mktemp("corpus") / "src")


@pytest.fixture(scope="module")
def calm(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calm") / "out"
    prepare(make_plan(str(corpus), "byte", **SETTINGS), str(out), workers=1)
    return out


def _digests(path: Path) -> dict[str, str]:
    files = (p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _documents(out: Path, split: str) -> dict[str, list[int]]:
    reader = ShardReader(StorageFolder(str(out)), split)
    tokens = np.empty(reader.total_tokens, dtype=np.uint16)
    reader.copy_window(0, reader.total_tokens, tokens)
    ids, at = {}, 0
    for segment in reader.segments(0, reader.total_tokens):
        assert segment.doc_id not in ids
        ids[segment.doc_id] = tokens[at : at + segment.length].tolist()
        at += segment.length
    return ids


@pytest.mark.parametrize("split", ["train", "validation"])
def test_prepared_documents_are_those_of_the_direct_stream(corpus: Path, calm: Path, split: str) -> None:
    source = open_source(str(corpus))
    stream = DocumentStream(
        source, ByteTokenizer(), seed=0, split=split, held_out_fraction=SETTINGS["held_out_fraction"], at_end="stop"
    )
    expected = {doc.doc_id: [*doc.tokens.tolist(), ByteTokenizer.eos_id] for doc in stream}
    assert _documents(calm, split) == expected
    assert len(expected) > 20


def test_no_held_out_document_is_in_a_training_shard(calm: Path) -> None:
    assert not any(is_held_out(doc, 0.1) for doc in _documents(calm, "train"))
    assert all(is_held_out(doc, 0.1) for doc in _documents(calm, "validation"))


def test_the_manifest_tells_tokenizer_totals_and_sizes(calm: Path) -> None:
    manifest = read_manifest(StorageFolder(str(calm)))
    assert (manifest.vocab_size, manifest.tokenizer_fingerprint) == (257, ByteTokenizer.fingerprint)
    assert manifest.totals("train")["documents"] + manifest.totals("validation")["documents"] == 6 * (300 - 1)
    for split in manifest.splits.values():
        for shard in split:
            for name, size, sha256 in shard.files():
                raw = (calm / name).read_bytes()
                assert (len(raw), hashlib.sha256(raw).hexdigest()) == (size, sha256)


def _mapped_files(pid: int) -> str:
    """Memory maps of a process and its children, a semaphore's file among them."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    maps = [Path(f"/proc/{each}/maps") for each in (pid, *children)]
    return "".join(path.read_text() for path in maps if path.exists())


def test_five_random_kills_leave_the_same_bytes(corpus: Path, calm: Path, tmp_path: Path) -> None:
    """Whole process groups and single parents, killed after some progress; then one run is left alone. What they had in
    shared memory is gone, although nobody was left to clean up."""
    out = tmp_path / "out"
    rng = random.Random(7)
    command = [sys.executable, "-m", "tests.nsa_train.data.prepare_child", str(corpus), str(out), "2"]
    kills, seen, mapped = 0, 0, ""
    while kills < 5:
        child = subprocess.Popen(command, start_new_session=True)
        while child.poll() is None and len(list(out.glob("_work/tasks/*.json"))) <= seen:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.03)
        if kills % 2:
            child.kill()
        else:
            mapped += _mapped_files(child.pid)
            os.killpg(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, "it finished before five kills: make the corpus larger"
        seen = len(list(out.glob("_work/tasks/*.json")))
        kills += 1
    assert 0 < seen < 30
    assert "python" in mapped
    assert not [name for name in os.listdir(SHARED_MEMORY) if f"{SHARED_MEMORY}/{name}" in mapped]
    assert not (out / "manifest.json").exists()
    subprocess.run(command, check=True, timeout=120)
    assert _digests(out) == _digests(calm)


def test_unfinished_files_never_lie_beside_the_shards(
    corpus: Path, calm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before every single rename in turn, as a kill would: what is outside `_work` is whole, and the end is the
    same. The manifest's own unfinished file is removed by the next run."""
    out = tmp_path / "out"
    plan = make_plan(str(corpus), "byte", **SETTINGS)
    record_plan(plan, StorageFolder(str(out)))
    real = os.replace
    for stop_at in range(1, 8):
        calls = 0

        def replace(source: object, target: object) -> None:
            nonlocal calls
            calls += 1
            if calls == stop_at:  # noqa: B023
                raise KeyboardInterrupt
            real(source, target)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            run_task(plan, StorageFolder(str(out)), 0)
        monkeypatch.setattr(os, "replace", real)
        loose = [p for p in out.rglob("*.tmp") if "_work" not in p.parts]
        assert loose == []
    (out / ".manifest.json.0.tmp").write_text("{")
    prepare(plan, str(out), workers=1)
    assert _digests(out) == _digests(calm)


def test_a_killed_worker_is_an_error_and_not_a_wait(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(str(corpus), "byte", **SETTINGS)
    victims: list[int] = []

    def kill_one(progress: object) -> None:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        workers = [c for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
        if workers and not victims:
            victims.append(int(workers[-1]))
            os.kill(victims[0], signal.SIGKILL)

    with pytest.raises(DataError, match="exit code -9"):
        prepare(plan, str(tmp_path / "out"), workers=1, on_progress=kill_one)


def test_a_finished_set_is_left_alone(corpus: Path, calm: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in calm.rglob("*")}
    prepare(make_plan(str(corpus), "byte", **SETTINGS), str(calm), workers=1)
    assert {p: p.stat().st_mtime_ns for p in calm.rglob("*")} == before


def test_other_settings_never_mix_into_a_set(corpus: Path, calm: Path) -> None:
    plan = make_plan(str(corpus), "byte", **(SETTINGS | {"held_out_fraction": 0.2}))
    with pytest.raises(ConfigError, match="held_out_fraction"):
        prepare(plan, str(calm), workers=1)


def test_two_writers_of_one_folder_are_refused(corpus: Path, tmp_path: Path) -> None:
    plan = make_plan(str(corpus), "byte", **SETTINGS)
    errors: list[BaseException | None] = []

    def second(progress: object) -> None:
        if not errors:
            with pytest.raises(DataError) as caught:
                prepare(plan, str(tmp_path / "out"), workers=1)
            errors.append(caught.value.__cause__)

    prepare(plan, str(tmp_path / "out"), workers=1, on_progress=second)
    assert isinstance(errors[0], BlockingIOError)


def test_a_corrupt_unit_stops_or_is_left_out_by_name(tmp_path: Path) -> None:
    corpus = _write_corpus(tmp_path / "src", files=1)
    victim = corpus / "000.parquet"
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    victim.write_bytes(raw)
    with pytest.raises(DataError, match=r"000\.parquet"):
        prepare(make_plan(str(corpus), "byte"), str(tmp_path / "strict"), workers=1)
    manifest = prepare(make_plan(str(corpus), "byte", max_bad_units=1), str(tmp_path / "lenient"), workers=1)
    assert len(manifest.quarantined) == 1
    assert "row group" in manifest.quarantined[0]
    report = read_report(StorageFolder(str(tmp_path / "lenient")))
    assert report.skipped[DAMAGED_PARTS].first == manifest.quarantined
    assert manifest.totals("train")["documents"] in (240, 239)


def test_addresses_behind_a_bad_network_give_the_same_shards(corpus: Path, tmp_path: Path) -> None:
    files = {f"/{path.name}": path.read_bytes() for path in sorted(corpus.glob("00[0-1].parquet"))}
    with FaultyServer(files, Faults(error_500=0.2, cut_body=0.2)) as server:
        manifest = prepare(make_plan(server.url("/000.parquet"), "byte", **SETTINGS), str(tmp_path / "out"), workers=1)
    local = prepare(make_plan(str(corpus / "000.parquet"), "byte", **SETTINGS), str(tmp_path / "local"), workers=1)
    assert manifest.splits == local.splits


def test_compressed_json_lines_are_prepared_too(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "src").mkdir()
    lines = [json.dumps({"text": f"line {i} " * 5}) for i in range(50)]
    (tmp_path / "src" / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    manifest = prepare(make_plan(str(tmp_path / "src"), "byte"), str(tmp_path / "out"), workers=1)
    assert manifest.totals("train")["documents"] == 50


_SBATCH = """#!/bin/bash
# Runs the elements of an array one after another, at once; a job whose dependency failed is not run.
while [[ $1 == --* ]]; do
  echo "$1" >>"$0.options"
  case $1 in --array=0-*) last=${1#--array=0-}; last=${last%%%*} ;; esac
  shift
done
script=$(cat)
job=$(date +%s%N)
for element in $(seq 0 "${last:-0}"); do SLURM_ARRAY_TASK_ID=$element bash -c "$script" >&2 || true; done
echo "$job;cluster"
"""


def test_slurm_jobs_run_every_task_and_write_the_manifest(
    corpus: Path, calm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses an sbatch that runs its command; tests/ops/test_slurm.py has a real one. 30 tasks in 7 elements."""
    (tmp_path / "sbatch").write_text(_SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("nsa_train.data.prepare.slurm._MOST_ELEMENTS", 7)
    plan, out = make_plan(str(corpus), "byte", **SETTINGS), tmp_path / "out"
    options = {"log_folder": tmp_path / "log", "partition": "cpu", "time_limit": "02:00:00", "workers": 16}
    jobs = submit(plan, str(out), **options)
    assert len(jobs) == 2
    assert all(job.isdigit() for job in jobs)
    words = (tmp_path / "sbatch.options").read_text().split()
    for word in (
        "--array=0-6%16",
        "--partition=cpu",
        "--time=02:00:00",
        "--requeue",
        f"--dependency=afterok:{jobs[0]}",
    ):
        assert word in words
    assert _digests(out) == _digests(calm)
    assert submit(plan, str(out), **options) == []


def test_slurm_submits_only_what_is_not_done(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An sbatch that takes jobs and runs none; a second one that refuses; a machine without one."""
    plan, out = make_plan(str(corpus), "byte", **SETTINGS), tmp_path / "out"
    record_plan(plan, StorageFolder(str(out)))
    for rank in (0, 3):
        run_task(plan, StorageFolder(str(out)), rank)
    options = {"log_folder": tmp_path / "log", "partition": "cpu", "time_limit": "02:00:00"}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="login node"):
        submit(plan, str(out), **options)
    (tmp_path / "sbatch").write_text("#!/bin/sh\nread -r line\necho 12\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert submit(plan, str(out), **options) == ["12", "12"]
    written = [json.loads(path.read_text()) for path in (tmp_path / "log").glob("job-*.json")]
    assert written[0]["tasks"] == [rank for rank in range(30) if rank not in (0, 3)]
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "invalid partition" >&2\nexit 1\n')
    with pytest.raises(ConfigError, match="invalid partition"):
        submit(plan, str(out), **options)
