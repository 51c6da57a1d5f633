"""Everything that the rules of preflight may look at, as a record: they judge it, they do not look for themselves."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa import names
from nsa.config.schema import RunConfig, settings
from nsa.observe.run_folder import RunFolder
from nsa.planning.estimate import RunEstimate
from nsa.planning.hardware import HardwareTarget


@dataclass(frozen=True)
class DryRunAttempt:
    """Something that was tried, or the reason why it was not."""

    problem: str | None = None
    not_tried: str | None = None
    seen: str = ""
    """What it showed, if it went well."""


@dataclass(frozen=True)
class DryRun:
    """A batch, the model, a step and a checkpoint, before the run."""

    data: DryRunAttempt
    model: DryRunAttempt
    step: DryRunAttempt
    checkpoint: DryRunAttempt
    step_s: float | None = None
    """One optimizer step on the target; None where it was not there."""

    @classmethod
    def not_tried(cls, why: str) -> "DryRun":
        nothing = DryRunAttempt(not_tried=why)
        return cls(nothing, nothing, nothing, nothing)


@dataclass(frozen=True)
class FolderFacts:
    """What `train.out_dir` holds before the run."""

    path: str
    checkpoints: tuple[int, ...] = ()
    """Steps, oldest first."""
    last_step: int = 0
    """The last one of that other run."""
    other_settings: tuple[str, ...] = ()
    """Settings in which the run that is recorded there differs from this one; steps may."""
    halt: str | None = None
    """What `.HALT` says."""
    disk_free: int | None = None
    problem: str | None = None
    """Why it cannot be written; nothing else is known of it then."""
    in_use_by: str | None = None
    """The process that runs there now."""


@dataclass(frozen=True)
class PreflightFacts:
    config: RunConfig
    target: HardwareTarget
    estimate: RunEstimate | None
    """None where the vocabulary, and so the model's size, is not known."""
    folder: FolderFacts
    dry_run: DryRun
    ranks_problem: str | None = None
    """Why this config cannot be spread over so many ranks, or be computed by the trainer at all."""
    resuming: bool = False
    held_out: DryRunAttempt = DryRunAttempt(not_tried="the held-out split was not looked at")
    """One batch of the held-out split."""


def look_at_folder(config: RunConfig, checkpoints: Sequence[int], in_use_by: str | None = None) -> FolderFacts:
    """Reads only; a folder that is not there yet is empty, on the disk of its nearest parent."""
    folder = RunFolder(config.train.out_dir)
    other = _other_settings(config, folder.path / names.ENV)
    return FolderFacts(
        path=str(folder.path),
        checkpoints=tuple(checkpoints),
        last_step=folder.last_step() if other else 0,
        other_settings=other,
        halt=folder.halt_reason(),
        disk_free=_disk_free(folder.path),
        in_use_by=in_use_by,
    )


def _other_settings(config: RunConfig, env: Path) -> tuple[str, ...]:
    try:
        before = json.loads(env.read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError):  # no run is recorded there
        return ()
    found = []
    for key in settings():
        then, now = _value(before, key), config.value(key)
        if key != "train.steps" and then is not _UNKNOWN and then != now:
            found.append(f"{key} {then} → {now}")
    return tuple(found)


_UNKNOWN = object()


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return _UNKNOWN  # recorded before there was such a setting
        config = config[part]
    return config


def _disk_free(path: Path) -> int | None:
    there = next((parent for parent in (path, *path.absolute().parents) if parent.exists()), None)
    return shutil.disk_usage(there).free if there is not None and os.access(there, os.R_OK) else None
