"""Drill scenarios: kills during saves, a writer that fails, and damaged, hostile or foreign checkpoints."""

import os
import pickle
import resource
import signal
import time
from pathlib import Path

from nsa.errors import CheckpointError, ConfigError, ExitCode
from nsa_train import names
from nsa_train.record.events import EventKind, LauncherAction
from proofs.drill import artifacts
from proofs.drill.damage import flip_bit
from proofs.drill.harness import SAVE_EVERY, STEPS, DrillHarness, DrillProcess, NotObserved
from proofs.drill.result import DrillResult, finish

_KILLS = 5
_MIDDLE = 4 * SAVE_EVERY + 2
_RANK_STATE = "train/rank0.pt"


def killed_saving(harness: DrillHarness, result: DrillResult) -> None:
    """SIGKILL during saves, several times: an unfinished checkpoint never counts, a finished one is never lost."""
    settings, interrupted, best, at = ["train.save_every=2"], 0, 0, time.time()
    process = harness.train(*settings)
    for _ in range(_KILLS):
        at = _kill_in_save(harness, process, after=best)
        interrupted += bool(list((harness.run_folder / names.CHECKPOINTS).glob(f"{names.SAVING}*")))
        step = artifacts.newest_good_step(harness.run_folder) or 0
        result.require(step >= best, f"the newest verified checkpoint went from step {best} back to {step}")
        best = step
        process = harness.train("--resume", *settings)
    result.require(interrupted, "no kill hit a save: nothing was proven")
    result.detected("resume: an unfinished save is not a checkpoint", 0.0, within_s=1)
    result.after_s = None
    result.left_behind = f"{_KILLS} kills, {interrupted} unfinished saves, verified checkpoint {best}"
    finish(harness, result, process, same_as_undisturbed=True, fault_at=at)
    leftovers = list((harness.run_folder / names.CHECKPOINTS).glob(f"{names.SAVING}*"))
    result.require_equal("unfinished saves at the end", leftovers, [])


def _kill_in_save(harness: DrillHarness, process: DrillProcess, after: int) -> float:
    """Kill while the folder of an unfinished save exists, once the run has saved after step `after`."""
    folder = harness.run_folder / names.CHECKPOINTS
    harness.wait_for("another checkpoint", lambda: max(artifacts.saved_steps(harness.run_folder), default=0) > after)
    until = time.monotonic() + 60
    while time.monotonic() < until and process.running:
        if any(name.startswith(names.SAVING) for name in os.listdir(folder)):
            process.send(signal.SIGKILL)
            process.wait()
            return time.time()
    raise NotObserved("no save began within 60 s")


def failed_writer(harness: DrillHarness, result: DrillResult) -> None:
    """The thread that writes a checkpoint in the background fails: the run ends, and the launcher resumes it."""
    settings = ["train.save_async=true"]
    launched = harness.launch(*settings, nproc=1)
    pid = harness.wait_for_step(SAVE_EVERY + 2, launched)
    largest = max(path.stat().st_size for path in (harness.run_folder / names.CHECKPOINTS).rglob("*.distcp"))
    at = time.time()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest // 2, resource.RLIM_INFINITY))
    event = harness.wait_for(
        "the launcher's record", lambda: artifacts.launcher_verdicts(harness.run_folder), launched
    )[0]
    result.detected(f"run: {event.details.get('why')}", event.ts - at, within_s=60)
    result.require_equal("exit code of the run", event.details.get("code"), CheckpointError.exit_code)
    result.require_equal("the launcher's verdict", event.details.get("launcher"), LauncherAction.RESTARTED)
    result.left_behind = f"verified checkpoint {artifacts.newest_good_step(harness.run_folder)}, event"
    finish(harness, result, launched, same_as_undisturbed=True, fault_at=at)
    result.resumed = f"by the launcher: {result.resumed}"


def damaged_checkpoint(harness: DrillHarness, result: DrillResult) -> None:
    """The newest checkpoint lost a file, the one before half of one, the one before that a bit: none is loaded."""
    at = _stopped_run(harness)
    good, *damaged = artifacts.saved_steps(harness.run_folder)[-4:]
    bit, half, gone = (_tensor_file(harness, step) for step in damaged)
    flip_bit(bit)
    os.truncate(half, half.stat().st_size // 2)
    gone.unlink()
    process = harness.train("--resume")
    result.left_behind = f"three damaged checkpoints, verified checkpoint {good}"
    finish(harness, result, process, same_as_undisturbed=True, fault_at=at)
    rejected = artifacts.events(harness.run_folder, EventKind.CHECKPOINT_REJECTED)
    named = [str(event.details.get("problem")).partition(":")[0] for event in rejected]
    result.require_equal("checkpoints rejected", named, [names.step_name(step) for step in reversed(damaged)])
    if rejected:
        result.detected("resume: hashes of every file", rejected[0].ts - at, within_s=60 + harness.slack_s)


class _Canary:
    """Executed by a reader that trusts pickles."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return exec, (f"open({str(self._path)!r}, 'w').close()",)  # type: ignore[return-value]


def malicious_checkpoint(harness: DrillHarness, result: DrillResult) -> None:
    """Code in the two pickles of a checkpoint, with hashes that fit: nothing is executed, older ones are used."""
    from nsa_train.checkpoint.manifest import LocalFiles, build_manifest, encode

    at = _stopped_run(harness)
    canary, planted = harness.folder / "executed", artifacts.saved_steps(harness.run_folder)[-2:]
    index = f"{names.TENSORS}/{names.TENSOR_INDEX}"
    for step, name in zip(planted, (_RANK_STATE, index), strict=True):
        folder = artifacts.checkpoints(harness.run_folder).step_path(step)
        (folder / name).write_bytes(pickle.dumps(_Canary(canary)))
        if name == index:  # as in checkpoints of earlier versions, which have no other
            (folder / names.TENSORS / names.TENSOR_INDEX_JSON).unlink()
        (folder / names.COMMIT).unlink()
        (folder / names.COMMIT).write_bytes(encode(build_manifest(LocalFiles(folder), step, "now")))
    finish(harness, result, harness.train("--resume"), same_as_undisturbed=True, fault_at=at)
    result.require(not canary.exists(), "the code in the checkpoint was executed")
    rejected = artifacts.events(harness.run_folder, EventKind.CHECKPOINT_REJECTED)
    named = [str(event.details.get("problem")).partition(":")[0] for event in rejected]
    result.require_equal("checkpoints rejected", named, [names.step_name(step) for step in reversed(planted)])
    if rejected:
        result.detected("resume: static scan of pickles", rejected[0].ts - at, within_s=120 + harness.slack_s)
    result.left_behind = "nothing executed, both checkpoints rejected"


def other_config(harness: DrillHarness, result: DrillResult) -> None:
    """A resume with another model: refused before anything is written, and the run still resumes as it was."""
    at = _stopped_run(harness)
    before = artifacts.last_step(harness.run_folder)
    began = time.time()
    other = harness.train("--resume", "model.dim=64")
    result.require_equal("exit code with another model", other.wait(), ConfigError.exit_code)
    result.require("model.dim" in other.output(), "the refusal does not name the setting")
    result.detected("run: settings of the checkpoint", time.time() - began, within_s=60)
    result.require_equal("steps after the refusal", artifacts.last_step(harness.run_folder), before)
    result.left_behind = f"exit {ConfigError.exit_code}, the checkpoints as they were"
    finish(harness, result, harness.train("--resume"), same_as_undisturbed=True, fault_at=at)


def other_world_size(harness: DrillHarness, result: DrillResult) -> None:
    """A checkpoint of one rank is resumed by two: the same rows, weights up to rounding."""
    at = _stopped_run(harness)
    launched = harness.launch("--resume", nproc=2)
    finish(harness, result, launched, fault_at=at)
    if result.holds:
        loss, weight = artifacts.largest_differences(harness.run_folder, harness.undisturbed(1))
        result.require(max(loss, weight) < 1e-3, f"loss differs by {loss:.1e}, a weight by {weight:.1e}")
        result.resumed += f" on 2 ranks, losses within {loss:.0e} of an undisturbed run on 1"
    result.detected_by, result.left_behind = "resume: reads any number of ranks", "checkpoints of 1 rank"


def _stopped_run(harness: DrillHarness) -> float:
    """A run that was asked to stop in the middle; when."""
    process = harness.train(f"train.keep_checkpoints={STEPS}")
    harness.wait_for_step(_MIDDLE, process)
    at = time.time()
    process.send(signal.SIGTERM)
    if (code := process.wait()) != ExitCode.PREEMPTED:
        raise NotObserved(f"a run that was asked to stop exited with {code}")
    return at


def _tensor_file(harness: DrillHarness, step: int) -> Path:
    folder = artifacts.checkpoints(harness.run_folder).step_path(step)
    return next(iter(sorted(folder.rglob(f"*{names.TENSOR_FILES}"))))
