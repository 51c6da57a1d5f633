"""Every name in a checkpoint folder, spelled once.

checkpoints/
    step200/                    a whole checkpoint: COMMIT.json lists and hashes every other file in it
        COMMIT.json             written last
        state.json              what the trainer records beside tensors
        model_and_optim/        tensors in `__{rank}_{n}.distcp`, written by DCP; its index `.metadata` is a pickle
        train/rank{N}.pt        the engine's own trainer state, with the random state of each rank
        .metadata.json          the engine's note that it has finished
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

_STEP = re.compile(r"step(0|[1-9]\d{0,17})")
_NUMBER = r"(0|[1-9]\d{0,8})"
# Checkpoints of earlier versions also hold state/rank{N}.json, which nothing reads.
_KNOWN_FILE = re.compile(
    rf"COMMIT\.json|state\.json|\.metadata\.json|state/rank{_NUMBER}\.json|train/rank{_NUMBER}\.pt"
    rf"|(model_and_optim/)?(\.metadata|__{_NUMBER}_{_NUMBER}\.distcp)"
)


def step_name(step: int) -> str:
    return f"step{step}"


def step_of(name: str) -> int | None:
    """The step a folder name stands for; None if it is not a checkpoint's name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def trainer_state(rank: int) -> str:
    return f"train/rank{rank}.pt"


def is_known_file(name: str) -> bool:
    """Whether a file of this name belongs into a checkpoint, ours or one of DCP's alone."""
    return _KNOWN_FILE.fullmatch(name) is not None


def is_leftover(name: str) -> bool:
    """Folders that only a killed process leaves behind, the engine's `-tmp` twins included."""
    return name.startswith((SAVING, DELETING, REPLACED))


def tensors_of(checkpoint: Path) -> Path:
    return checkpoint / TENSORS
