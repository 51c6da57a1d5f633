"""Every name in a checkpoint folder, spelled once.

checkpoints/
    step200/                    a whole checkpoint: COMMIT.json lists and hashes every other file in it
        COMMIT.json             written last
        state.json              what the trainer records beside tensors
        state/rank{N}.json      the random state of each rank
        model_and_optim/        tensors, written by DCP; its `.metadata` is a pickle
        train/rank{N}.pt        the engine's own trainer state
    latest -> step200           replaced atomically after every save
    .saving-step300/            being written, or left by a killed save
    .replaced-step200/          the former step200 while a new one takes its place
    .deleting-step100/          being removed by retention
"""

import re
from pathlib import Path

CHECKPOINTS = "checkpoints"
COMMIT = "COMMIT.json"
LATEST = "latest"
LOCK = ".lock"
STATE = "state.json"
TENSORS = "model_and_optim"
TENSOR_INDEX = ".metadata"

SAVING = ".saving-"
REPLACED = ".replaced-"
DELETING = ".deleting-"
NEW_LINK = ".latest-new"

_STEP = re.compile(r"step(0|[1-9]\d*)")


def step_name(step: int) -> str:
    return f"step{step}"


def step_of(name: str) -> int | None:
    """The step a folder name stands for; None if it is not a checkpoint's name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def rank_state(rank: int) -> str:
    return f"state/rank{rank}.json"


def is_leftover(name: str) -> bool:
    """Folders that only a killed process leaves behind, the engine's `-tmp` twins included."""
    return name.startswith((SAVING, DELETING, REPLACED))


def tensors_of(checkpoint: Path) -> Path:
    return checkpoint / TENSORS
