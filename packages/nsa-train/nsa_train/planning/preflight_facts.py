"""Facts collected for preflight (config, hardware, estimate, dry-run result, run folder) and findings of its rules."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.checkpoint.lock import holder
from nsa_train.config.schema import RunConfig, settings
from nsa_train.config.setting_types import as_json
from nsa_train.planning.hardware import HardwareTarget
from nsa_train.record.run_folder import RunFolder, why_not_writable

if TYPE_CHECKING:  # these import torch, which early checks do without
    from nsa.kernels.registry import BackendChoice
    from nsa_train.planning.estimate import RunEstimate


@dataclass(frozen=True)
class DryRunAttempt:
    """One part of the dry run: its result, its problem, or why it was not tried."""

    problem: str | None = None
    not_tried: str | None = None
    seen: str = ""
    """Result, if it succeeded."""


@dataclass(frozen=True)
class DryRun:
    """Dry run before training: one batch, the model, one step and one checkpoint."""

    data: DryRunAttempt
    model: DryRunAttempt
    step: DryRunAttempt
    checkpoint: DryRunAttempt
    step_s: float | None = None
    """Duration of one optimizer step on the target; None if it was not measured."""

    @classmethod
    def not_tried(cls, why: str) -> "DryRun":
        nothing = DryRunAttempt(not_tried=why)
        return cls(nothing, nothing, nothing, nothing)


@dataclass(frozen=True)
class FolderFacts:
    """Contents of `train.out_dir` before the run."""

    path: str
    checkpoints: tuple[int, ...] = ()
    """Steps, oldest first."""
    last_step: int = 0
    """Last step of a different run in that folder."""
    other_settings: tuple[str, ...] = ()
    """Settings in which the recorded run differs from this one, except train.steps."""
    halt: str | None = None
    """Content of `.HALT`."""
    disk_free: int | None = None
    problem: str | None = None
    """Why it is not writable; the other fields are then unknown."""
    in_use_by: str | None = None
    """The process that holds the run lock."""


@dataclass(frozen=True)
class PreflightFacts:
    config: RunConfig
    target: HardwareTarget
    estimate: "RunEstimate | None"
    """The estimate; None if the vocabulary size, and so the model size, is unknown."""
    folder: FolderFacts
    dry_run: DryRun
    ranks_problem: str | None = None
    """Why this config cannot run on this number of ranks, or at all."""
    resuming: bool = False
    held_out: DryRunAttempt = DryRunAttempt(not_tried="the held-out split was not read")
    """One batch of the held-out split."""
    store: DryRunAttempt = DryRunAttempt(not_tried="the object store was not asked")
    """A request to `train.checkpoint_store` with the credentials of this machine."""
    kernels: "tuple[BackendChoice, ...] | None" = None
    """The backend of each branch; None if that is decided on another machine, or the run is short."""
    kernels_problem: str | None = None
    """Why a requested backend cannot run on this machine."""


def read_folder_facts(config: RunConfig) -> FolderFacts:
    """Read the run folder without changing it; a missing folder is empty, on the disk of its nearest parent."""
    folder = RunFolder(config.train.out_dir)
    if problem := why_not_writable(folder.path):
        return FolderFacts(str(folder.path), problem=problem)
    held_by = holder(folder.path)
    other = _other_settings(config, folder.path / names.ENV)
    return FolderFacts(
        path=str(folder.path),
        checkpoints=tuple(CheckpointFolder(folder.checkpoints).steps()),
        last_step=folder.last_step() if other else 0,
        other_settings=other,
        halt=folder.halt_reason(),
        disk_free=_disk_free(folder.path),
        in_use_by=str(held_by) if held_by else None,
    )


def _other_settings(config: RunConfig, env: Path) -> tuple[str, ...]:
    try:
        before = json.loads(env.read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError):  # no recorded run
        return ()
    differences = []
    for key in settings():
        then, now = _value(before, key), as_json(config.value(key))
        if key != "train.steps" and then is not _UNKNOWN and then != now:
            differences.append(f"{key} {then} → {now}")
    return tuple(differences)


_UNKNOWN = object()


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(config, dict) or part not in config:
            return _UNKNOWN  # recorded before this setting existed
        config = config[part]
    return config


def _disk_free(path: Path) -> int | None:
    there = next((parent for parent in (path, *path.absolute().parents) if parent.exists()), None)
    return shutil.disk_usage(there).free if there is not None and os.access(there, os.R_OK) else None


@dataclass(frozen=True)
class RuleFinding:
    """Finding of a rule. `holds` is None if it could not be checked; `what` then gives the reason."""

    holds: bool | None
    what: str
    fix: str = ""
    offers_override: bool = True
    """Whether a refusal offers `--allow`: not where the run would end all the same."""


def finding(holds: bool, what: str, why: str, fix: str) -> RuleFinding:
    """A finding of a rule that was checked; `why` is the reason of the rule, shown only if it fails."""
    return RuleFinding(holds, what if holds else f"{what}: {why}", fix)
