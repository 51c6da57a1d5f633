"""Commit, fallback, retention and cleanup: the newest complete checkpoint is found, a bad one reported and kept."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from nsa.errors import CheckpointError
from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFinding, CheckpointFolder, RetentionPolicy
from nsa_train.checkpoint.manifest import LocalFiles, decode, examine, read_key

ROOT = Path(__file__).parents[3]
KEY = b"k" * 32


def save(folder: CheckpointFolder, step: int, reason: str = "interval") -> Path:
    staging = folder.begin(step)
    tensors = names.tensors_of(staging)
    tensors.mkdir(parents=True)
    (tensors / "__0_0.distcp").write_bytes(random.Random(step).randbytes(3000))
    (tensors / ".metadata").write_bytes(b"index" * 20)
    (staging / "state.json").write_text(json.dumps({"step": step}))
    return folder.commit(step, reason)


@pytest.fixture
def folder(tmp_path):
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    save(checkpoints, 100)
    save(checkpoints, 200)
    return checkpoints


def test_a_save_can_be_found_again(folder):
    resumable = folder.find_resumable()
    assert (resumable.step, resumable.path, resumable.passed_over) == (200, folder.path / "step200", ())
    assert os.readlink(folder.path / "latest") == "step200"
    assert sorted(path.name for path in folder.path.iterdir()) == ["latest", "step100", "step200"]


def test_an_empty_run_has_nothing_to_resume(tmp_path):
    resumable = CheckpointFolder(tmp_path / "nowhere").find_resumable()
    assert (resumable.step, resumable.passed_over) == (None, ())


def truncate(path):
    os.truncate(path / "model_and_optim/__0_0.distcp", 2999)


def flip(path):
    file = path / "model_and_optim/__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[1234] ^= 4
    file.write_bytes(content)


def half_write(path):
    commit = path / "COMMIT.json"
    os.truncate(commit, commit.stat().st_size // 2)


def take_another_step(path):
    shutil.copy(path.parent / "step100/COMMIT.json", path / "COMMIT.json")
    shutil.copytree(path.parent / "step100", path, dirs_exist_ok=True)


def link(path):
    file = path / "model_and_optim/.metadata"
    file.rename(path.parent / "elsewhere")
    file.symlink_to(path.parent / "elsewhere")


FAULTS = {
    truncate: "model_and_optim/__0_0.distcp has 2999 bytes, not 3000",
    flip: "model_and_optim/__0_0.distcp does not match its SHA-256",
    lambda path: (path / "model_and_optim/.metadata").unlink(): "model_and_optim/.metadata is missing",
    lambda path: (path / "state.json").unlink(): "state.json is missing",
    half_write: "COMMIT.json is damaged or half-written",
    lambda path: (path / "COMMIT.json").write_bytes(b""): "COMMIT.json is damaged or half-written",
    lambda path: (path / "COMMIT.json").write_text("[]"): "COMMIT.json is damaged or half-written",
    lambda path: (path / "COMMIT.json").unlink(): "COMMIT.json is missing: the save never finished, or another program",
    lambda path: (path / "evil.pt").write_bytes(b"x"): "evil.pt is not listed in COMMIT.json",
    take_another_step: "COMMIT.json is of step 100",
    link: "model_and_optim/.metadata is not a regular file",
    lambda path: shutil.rmtree(path / "model_and_optim"): "model_and_optim/.metadata is missing",
}


@pytest.mark.parametrize("fault", FAULTS, ids=range(len(FAULTS)))
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_taken(folder, fault):
    fault(folder.path / "step200")
    resumable = folder.find_resumable()
    assert resumable.step == 100
    assert [finding.name for finding in resumable.passed_over] == ["step200"]
    assert FAULTS[fault] in str(resumable.passed_over[0])
    assert (folder.path / "step200").is_dir()
    with pytest.raises(CheckpointError, match="step200"):
        folder.examine(200).require_good()


def test_nothing_is_resumed_if_all_checkpoints_are_damaged(folder):
    flip(folder.path / "step200")
    flip(folder.path / "step100")
    resumable = folder.find_resumable()
    assert resumable.step is None
    assert [finding.name for finding in resumable.passed_over] == ["step200", "step100"]


def flipped(whole: bytes, bit: int) -> bytes:
    broken = bytearray(whole)
    broken[bit // 8] ^= 1 << bit % 8
    return bytes(broken)


def test_every_flip_of_every_file_is_seen(folder):
    """Random bits of every file, COMMIT.json included."""
    dice = random.Random(0)
    for file in sorted(file for file in (folder.path / "step200").rglob("*") if file.is_file()):
        whole = file.read_bytes()
        for bit in dice.sample(range(len(whole) * 8), min(200, len(whole) * 8)):
            file.write_bytes(flipped(whole, bit))
            assert not folder.examine(200).good, (file, bit)
        file.write_bytes(whole)
    assert folder.examine(200).good


def test_every_single_bit_of_the_commit_document_counts(folder):
    raw = (folder.path / "step200/COMMIT.json").read_bytes()
    for bit in range(len(raw) * 8):
        with pytest.raises(CheckpointError):
            decode(flipped(raw, bit))


def test_the_same_document_spelled_otherwise_is_not_the_one_written(tmp_path):
    folder = CheckpointFolder(tmp_path)
    staging = folder.begin(1)
    staging.mkdir()
    (staging / "é.json").write_text("{}")
    raw = (folder.commit(1) / "COMMIT.json").read_bytes()
    assert b"\\u00e9" in raw
    for other in (raw.replace(b"\\u00e9", b"\\u00E9"), json.dumps(json.loads(raw)).encode(), raw + b" "):
        assert json.loads(other) == json.loads(raw)
        with pytest.raises(CheckpointError):
            decode(other)


def test_a_key_refuses_what_it_did_not_sign(tmp_path):
    signed = CheckpointFolder(tmp_path, key=KEY)
    save(signed, 1)
    assert signed.find_resumable().step == 1
    assert CheckpointFolder(tmp_path).find_resumable().step == 1  # hashes alone can be checked by anyone
    other = CheckpointFolder(tmp_path, key=b"x" * 32)
    assert "signed with another key" in str(other.find_resumable().passed_over[0])
    save(CheckpointFolder(tmp_path), 2)
    resumable = signed.find_resumable()
    assert resumable.step == 1
    assert "COMMIT.json is not signed, but a key is set" in str(resumable.passed_over[0])
    assert KEY.decode() not in (tmp_path / "step1/COMMIT.json").read_text()


def test_a_short_or_missing_key_is_refused_without_being_shown(tmp_path):
    (tmp_path / "key").write_text("sesame\n")
    with pytest.raises(CheckpointError, match="has 6 bytes") as caught:
        read_key(tmp_path / "key")
    assert "sesame" not in str(caught.value)
    with pytest.raises(CheckpointError):
        read_key(tmp_path / "no-key")
    (tmp_path / "key").write_bytes(KEY + b"\n")
    assert read_key(tmp_path / "key") == KEY


def test_retention_keeps_the_last_and_every_mth(tmp_path):
    folder = CheckpointFolder(tmp_path, retention=RetentionPolicy(keep_last=2, keep_every=300))
    for step in range(100, 1000, 100):
        save(folder, step)
    assert folder.steps() == [300, 600, 800, 900]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_retention_keeps_what_was_asked_for_and_says_why(tmp_path):
    folder = CheckpointFolder(tmp_path, key=KEY, retention=RetentionPolicy(keep_last=1, keep_every=400))
    for step in range(100, 700, 100):
        save(folder, step, "requested" if step == 200 else "interval")
        if step == 300:
            folder.set_reason(300, "requested")  # asked for when it was saved anyway
    assert folder.steps() == [200, 300, 400, 600]
    saved = {step: manifest.reason for step, manifest in folder.committed().items()}
    why = RetentionPolicy(1, 400).why_kept(saved)
    assert why == {200: ("requested",), 300: ("requested",), 400: ("every 400",), 600: ("newest 1",)}
    assert all(folder.examine(step).good for step in folder.steps())
    assert CheckpointFolder(tmp_path, key=KEY).find_resumable().step == 600


def test_retention_neither_counts_nor_removes_suspects(tmp_path):
    folder = CheckpointFolder(tmp_path, retention=RetentionPolicy(keep_last=2))
    for step in (100, 200, 300):
        save(folder, step)
    flip(tmp_path / "step300")
    assert folder.find_resumable().step == 200
    save(folder, 250)
    assert folder.steps() == [200, 250, 300]
    assert folder.latest() == 250


def test_retention_that_keeps_nothing_is_refused():
    with pytest.raises(CheckpointError, match="keep_last=0"):
        RetentionPolicy(keep_last=0)


def test_the_same_step_can_be_saved_again(folder):
    flip(folder.path / "step200")
    save(folder, 200)
    assert folder.find_resumable().step == 200
    assert sorted(path.name for path in folder.path.iterdir()) == ["latest", "step100", "step200"]


def test_leftovers_are_removed_and_a_missing_link_is_set(folder):
    for name in (".saving-step300", ".saving-step300-tmp", ".deleting-step50"):
        (folder.path / name).mkdir()
        (folder.path / name / "x").write_text("x")
    (folder.path / "latest").unlink()
    (folder.path / "latest").symlink_to("step100")
    (folder.path / "notes").mkdir()  # a user's own folder
    done = folder.clean_up()
    assert len(done) == 4
    assert "pointed latest at step200" in done
    assert sorted(path.name for path in folder.path.iterdir()) == ["latest", "notes", "step100", "step200"]
    assert folder.clean_up() == []


def test_a_kill_between_removal_and_replacement_loses_nothing(folder):
    (folder.path / "step200").rename(folder.path / ".replaced-step200")
    assert "restored step200" in folder.clean_up()[0]
    assert folder.find_resumable().step == 200


def test_nothing_to_commit_is_refused(folder):
    with pytest.raises(CheckpointError):
        folder.commit(300)
    folder.begin(300).mkdir()
    with pytest.raises(CheckpointError):
        folder.commit(300)
    folder.abandon(300)
    assert folder.find_resumable().step == 200


def test_an_asynchronous_save_commits_when_it_is_written_and_not_before(folder):
    staging = folder.begin(300)
    staging.mkdir()
    (staging / "state.json").write_text("{}")
    written: Future[None] = Future()
    committed = folder.commit_after(written, 300)
    assert not committed.done()
    assert folder.find_resumable().step == 200
    written.set_result(None)
    assert committed.result(timeout=120) == folder.path / "step300"
    assert folder.find_resumable().step == 300


class NotAnException(BaseException):
    """Error that is no `Exception`, as DCP's CheckpointException."""


def test_an_asynchronous_save_that_failed_is_not_committed(folder):
    folder.begin(300).mkdir()
    written: Future[None] = Future()
    committed = folder.commit_after(written, 300)
    written.set_exception(NotAnException("rank 3: disk full"))
    with pytest.raises(CheckpointError, match="rank 3: disk full"):
        committed.result(timeout=120)
    assert folder.find_resumable().step == 200


def test_a_full_disk_leaves_the_previous_one(folder):
    """Files may not grow beyond 1 KiB: the commit document of a hundred files cannot be written."""
    staging = folder.begin(300)
    staging.mkdir()
    for number in range(100):
        (staging / f"part{number}").write_bytes(b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        with pytest.raises(CheckpointError, match=os.strerror(errno.EFBIG)):
            folder.commit(300)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert folder.find_resumable().step == 200
    folder.clean_up()
    save(folder, 300)
    assert folder.find_resumable() == type(folder.find_resumable())(300, folder.path / "step300", ())


SAVER = """
import sys
from pathlib import Path
from nsa_train.checkpoint.folder import CheckpointFolder, RetentionPolicy
folder = CheckpointFolder(Path(sys.argv[1]), retention=RetentionPolicy(keep_last=2))
folder.clean_up()
step = (folder.find_resumable().step or 0)
print("ready", flush=True)
while True:
    step += 1
    staging = folder.begin(step)
    (staging / "model_and_optim").mkdir(parents=True)
    for part in range(4):
        (staging / f"model_and_optim/__{part}_0.distcp").write_bytes(bytes([step % 256]) * 50_000)
    (staging / "state.json").write_text(str(step))
    folder.commit(step)
    if step % 5 == 0:  # the same step once more, as after a fallback
        staging = folder.begin(step)
        staging.mkdir()
        (staging / "state.json").write_text(str(step))
        folder.commit(step)
    print(step, flush=True)
"""


def test_sigkill_at_any_moment_leaves_the_newest_complete_one(tmp_path):
    dice = random.Random(os.getpid())
    newest = 0
    for _ in range(24):
        process = subprocess.Popen([sys.executable, "-c", SAVER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        told = [int(process.stdout.readline()) for _ in range(dice.randrange(3))]  # a slow disk makes progress too
        time.sleep(dice.uniform(0.0, 0.12))
        process.send_signal(signal.SIGKILL)
        told += [int(line) for line in process.stdout.read().split()]
        process.wait()
        newest = max([newest, *told])
        folder = CheckpointFolder(tmp_path)
        folder.clean_up()
        resumable = folder.find_resumable()
        assert not resumable.passed_over, resumable
        assert resumable.step is None or resumable.step >= newest, "a save that was reported done is gone"
        assert folder.latest() == resumable.step
        if resumable.path is not None:
            assert (resumable.path / "state.json").read_text() == str(resumable.step)
    assert newest > 10


def test_names_are_spelled_strictly():
    assert names.step_of("step0") == 0
    assert [names.step_of(name) for name in ("step", "step01", "step1-tmp", "xstep1", "step-1", "step1\n")] == [
        None
    ] * 6


def test_a_document_of_another_format_is_refused(folder):
    raw = (folder.path / "step200/COMMIT.json").read_bytes()
    assert decode(raw).step == 200
    assert not examine(LocalFiles(folder.path / "step100"), step=200).good
    assert CheckpointFinding("step1", ("a", "b")).__str__() == "step1: a; b"
