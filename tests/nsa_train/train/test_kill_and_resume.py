"""Under the launcher, killed, asked to leave or halted: the run that goes on ends with the weights of the calm one."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nsa_train import names
from nsa_train.record.heartbeat_record import HeartbeatRecord, read_beats
from tests.nsa_train.train.runs import environment, write_config

STEPS, SAVE_EVERY = 16, 4
SETTINGS = [f"train.steps={STEPS}", f"train.save_every={SAVE_EVERY}", "train.lr_schedule=constant", "train.seq_len=128"]
PATIENCE_S = 240


def start(folder: Path, *more: str, steps: int = STEPS) -> subprocess.Popen:
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = [str(write_config(folder.parent)), *SETTINGS, f"train.steps={steps}", f"train.out_dir={folder}", *more]
    command = [sys.executable, "-m", "nsa_train.cli", "launch", "--nproc", "2", *words]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True)


def finish(process: subprocess.Popen) -> int:
    try:
        return process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def beats(folder: Path, rank: int) -> list[HeartbeatRecord]:
    path = folder / names.heartbeat(rank)
    return [beat for beat in read_beats(path) if beat.msg == names.PROGRESS] if path.exists() else []


def wait_for_step(
    folder: Path, process: subprocess.Popen, step: int, rank: int, after: int = 0
) -> HeartbeatRecord | None:
    """The first beat of a rank at or after a step that was not there before; None if the run ended first."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for beat in beats(folder, rank)[after:]:
            if beat.step >= step:
                return beat
        if process.poll() is not None:
            return None
        time.sleep(0.02)
    raise AssertionError(f"no step {step} within {PATIENCE_S} s")


def logged_losses(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of every step, as the last process that did it told them."""
    return {beat.step: (beat.loss, beat.grad_norm) for beat in beats(folder, 0)}


def same(folder: Path, calm: Path) -> bool:
    ours, theirs = (torch.load(path / names.MODEL, weights_only=True) for path in (folder, calm))
    ours, theirs = ours.get("model", ours), theirs.get("model", theirs)
    tensors = [name for name, value in theirs.items() if isinstance(value, torch.Tensor)]
    assert tensors
    return logged_losses(folder) == logged_losses(calm) and all(
        torch.equal(ours[name], theirs[name]) for name in tensors
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("calm") / "run"
    assert finish(start(folder)) == 0
    assert len(logged_losses(folder)) == STEPS
    return folder


def kill_now_and_then(folder: Path, process: subprocess.Popen, kills: int, steps: int, seed: int) -> int:
    """SIGKILL one rank, again and again, at random moments around background saves; returns how often."""
    chance, done = random.Random(seed), 0
    while done < kills:
        rank = chance.randrange(2)
        told = len(beats(folder, rank))
        last = max((beat.step for beat in beats(folder, rank)), default=0)
        # Past the newest save and a little more, so that each cycle brings a checkpoint the launcher can count.
        target = (last // SAVE_EVERY + 1) * SAVE_EVERY + chance.randrange(SAVE_EVERY)
        if target >= steps - SAVE_EVERY:
            break
        beat = wait_for_step(folder, process, target, rank, after=told)
        if beat is None:
            break
        time.sleep(chance.random() * 0.15)
        try:
            os.kill(beat.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        done += 1
        restarted = len(beats(folder, rank))
        if wait_for_step(folder, process, 0, rank, after=restarted) is None:
            break
    return done


@pytest.mark.nightly  # `python -m proofs.drill` kills a trainer and compares weights in a fast test
def test_a_rank_killed_in_the_middle_of_a_step(tmp_path, calm):
    process = start(tmp_path / "run")
    beat = wait_for_step(tmp_path / "run", process, SAVE_EVERY + 2, rank=1)
    assert beat is not None
    os.kill(beat.pid, signal.SIGKILL)
    assert finish(process) == 0
    assert same(tmp_path / "run", calm)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kills", "steps"), [(3, 40), (20, 240)])
def test_ranks_killed_around_background_saves(tmp_path, kills, steps):
    whole, broken = tmp_path / "whole" / "run", tmp_path / "broken" / "run"
    assert finish(start(whole, steps=steps)) == 0
    process = start(broken, steps=steps)
    assert kill_now_and_then(broken, process, kills=kills, steps=steps, seed=kills) == kills
    assert finish(process) == 0
    assert same(broken, whole)


@pytest.mark.nightly  # test_signal_handlers has both, without the comparison of weights
@pytest.mark.parametrize(("ask", "code"), [("term", 10), ("halt", 11)])
def test_a_run_that_was_asked_to_stop_is_resumed(tmp_path, calm, ask, code):
    folder = tmp_path / "run"
    process = start(folder)
    assert wait_for_step(folder, process, SAVE_EVERY + 1, rank=0) is not None
    if ask == "term":
        process.send_signal(signal.SIGTERM)
    else:
        (folder / names.HALT).write_text("halt: a test\n")
    assert finish(process) == code
    assert len(logged_losses(folder)) < STEPS
    (folder / names.HALT).unlink(missing_ok=True)
    assert finish(start(folder, "--resume")) == 0
    assert same(folder, calm)
