"""Drill scenarios: runs that must not start: a broken config, a toy config for a long run, a folder in use."""

import signal
import time

from nsa.errors import CheckpointError, ConfigError, PreflightError
from proofs.drill import artifacts
from proofs.drill.harness import SAVE_EVERY, STEPS, DrillHarness, DrillProcess
from proofs.drill.result import DrillResult, finish

_LONG_RUN = ["train.steps=50000", "train.save_every=0"]


def bad_yaml(harness: DrillHarness, result: DrillResult) -> None:
    """A config file that is no YAML, and one with a setting that does not exist."""
    broken, unknown = harness.folder / "broken.yaml", harness.folder / "unknown.yaml"
    broken.write_text("train: {steps: 40\nmodel: [dim", encoding="utf-8")
    unknown.write_text("train: {stepz: 40}\n", encoding="utf-8")
    began = time.time()
    for path, word in ((broken, "line"), (unknown, "train.stepz")):
        process = harness.start("nsa_train.cli", "train", str(path), f"train.out_dir={harness.run_folder}")
        _refused(result, process, ConfigError.exit_code, word)
    result.detected("config: file, line and setting", time.time() - began, within_s=60)
    _nothing_written(harness, result, ConfigError.exit_code)
    finish(harness, result, harness.train(), same_as_undisturbed=True)


def toy_config(harness: DrillHarness, result: DrillResult) -> None:
    """The settings of a toy with 50,000 steps: preflight refuses them before anything is paid for."""
    began = time.time()
    process = harness.train(*_LONG_RUN)
    code = process.wait()
    result.require(code in (PreflightError.exit_code, ConfigError.exit_code), f"exit code is {code}")
    result.require("train.save_every" in process.output(), "the refusal does not name a setting")
    result.detected("preflight, before the first step", time.time() - began, within_s=120)
    _nothing_written(harness, result, code)
    finish(harness, result, harness.train(), same_as_undisturbed=True)


def two_runs(harness: DrillHarness, result: DrillResult) -> None:
    """A second run in the folder of a running one is refused, and the first does not notice.

    The first is stopped meanwhile, so that it cannot be done before the second begins.
    """
    first = harness.train()
    harness.wait_for_step(SAVE_EVERY, first)
    at = time.time()
    first.send(signal.SIGSTOP)
    second = harness.train("--resume")
    code = second.wait()
    first.send(signal.SIGCONT)
    result.require(code in (ConfigError.exit_code, CheckpointError.exit_code), f"exit code of the second is {code}")
    result.require(str(harness.run_folder) in second.output(), "the refusal does not name the folder")
    result.detected("run: lock of the run folder", time.time() - at, within_s=60)
    result.left_behind = f"exit {code} of the second, nothing of it in the folder"
    finish(harness, result, first, same_as_undisturbed=True)
    result.require_equal("steps recorded", len(artifacts.beats(harness.run_folder)), STEPS)
    result.resumed = result.resumed.replace("yes, from the beginning", "the first never stopped")


def _refused(result: DrillResult, process: DrillProcess, code: int, word: str) -> None:
    result.require_equal("exit code", process.wait(), code)
    result.require(word in process.output(), f"the message does not contain {word!r}")
    result.require("Traceback" not in process.output(), "a traceback instead of a message")


def _nothing_written(harness: DrillHarness, result: DrillResult, code: int) -> None:
    result.require(not artifacts.saved_steps(harness.run_folder), "a refused run left checkpoints")
    result.require_equal("steps of a refused run", artifacts.last_step(harness.run_folder), 0)
    result.left_behind = f"exit {code}, no step"
