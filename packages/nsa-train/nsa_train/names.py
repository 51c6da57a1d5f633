"""Names of files and folders in a run folder and its checkpoints, and of the fields of its records, with units.

RUN/                                train.out_dir
    env.json, events.jsonl, metrics.json, training.csv, val.csv, trackers.json, tb/
    heartbeat_rank{N}.jsonl         one per rank; also stackdump_rank{N}_{pid}.txt, collectives_rank{N}_{pid}.json
    .lock                           held by the process that writes the run
    .HALT, .anomaly_type, gate_collapse_details.json, health_check.log
    model.pt, model.safetensors     the final weights
    tokenizer.json                  the tokenizer of the data, if it has one; also in every checkpoint and prepared set
    evaluations/step{N}.json        results of `nsa eval` for the checkpoint of that step
    checkpoints/
        step200/                    a complete checkpoint: COMMIT.json lists and hashes every other file in it
            COMMIT.json             written last
            state.json              step, data cursor and settings
            tokenizer.json          absent in checkpoints of earlier versions
            model_and_optim/        tensors in `__{rank}_{n}.distcp`; their index as JSON in `index.jsonl` (absent in
                                    earlier versions), and as DCP's pickle in `.metadata`
            train/rank{N}.pt        the engine's own trainer state, with the random state of each rank
            .metadata.json          the engine's note that it has finished
        latest -> step200           replaced atomically after every save
        .saving-step300/            being written, or left by a killed save
        .replaced-step200/          the former step200 while a new one takes its place
        .deleting-step100/          being removed by retention

On-disk names are a contract: runs of earlier versions resume and reports read them.
"""

import re
from pathlib import Path

ENV = "env.json"
EVENTS = "events.jsonl"
TRAINING_CSV = "training.csv"
VAL_CSV = "val.csv"
METRICS = "metrics.json"
TRACKERS = "trackers.json"
TENSORBOARD = "tb"
CHECKPOINTS = "checkpoints"
DATA_CHECKSUMS = "data_checksums"
DATA_EXCHANGE = "data_exchange"
LATEST = "latest"
MODEL = "model.pt"
MODEL_SAFETENSORS = "model.safetensors"
TOKENIZER = "tokenizer.json"
"""A file of the `tokenizers` library: in a run folder, a checkpoint, a prepared set and an exported folder."""
HALT = ".HALT"
ANOMALY = ".anomaly_type"
GATE_COLLAPSE = "gate_collapse_details.json"
HEALTH_LOG = "health_check.log"
EVALUATIONS = "evaluations"
LOCK = ".lock"
HEARTBEATS = "heartbeat_rank*.jsonl"
STACKDUMPS = "stackdump_*.txt"
COLLECTIVES = "collectives_*.json"
_HEARTBEAT = re.compile(r"heartbeat_rank(0|[1-9][0-9]{0,5})\.jsonl")


def heartbeat(rank: int) -> str:
    return f"heartbeat_rank{rank}.jsonl"


def rank_of_heartbeat(name: str) -> int | None:
    match = _HEARTBEAT.fullmatch(name)
    return int(match[1]) if match else None


def stackdump(rank: int, pid: int) -> str:
    return f"stackdump_rank{rank}_{pid}.txt"


def collectives(rank: int, pid: int) -> str:
    """Flight-recorder trace of a rank's process groups, written beside a stack dump."""
    return f"collectives_rank{rank}_{pid}.json"


def evaluation(step: int | None) -> str:
    """Results of one checkpoint; an exported model may not know its step."""
    return "model.json" if step is None else f"{step_name(step)}.json"


# In a checkpoint.

COMMIT = "COMMIT.json"
STATE = "state.json"
TENSORS = "model_and_optim"
TENSOR_INDEX = ".metadata"
TENSOR_INDEX_JSON = "index.jsonl"
TENSOR_FILES = ".distcp"
"""Ending of the files that hold tensors."""

SAVING = ".saving-"
REPLACED = ".replaced-"
DELETING = ".deleting-"
NEW_LINK = ".latest-new"

_STEP = re.compile(r"step(0|[1-9]\d{0,17})")
_NUMBER = r"(0|[1-9]\d{0,8})"
# Checkpoints of earlier versions also hold state/rank{N}.json, which nothing reads.
_KNOWN_FILE = re.compile(
    rf"COMMIT\.json|state\.json|tokenizer\.json|\.metadata\.json|state/rank{_NUMBER}\.json|train/rank{_NUMBER}\.pt"
    rf"|(model_and_optim/)?(\.metadata|index\.jsonl|__{_NUMBER}_{_NUMBER}\.distcp)"
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
    """Whether a file of this name may be in a checkpoint, ours or one written by DCP alone."""
    return _KNOWN_FILE.fullmatch(name) is not None


def is_leftover(name: str) -> bool:
    """Folders that only a killed process leaves behind."""
    return name.startswith((SAVING, DELETING, REPLACED))


def tensors_of(checkpoint: Path) -> Path:
    return checkpoint / TENSORS


# In records: what a heartbeat's `msg` says.
START = "start"
PROGRESS = "progress"
ALIVE = "alive"
"""Steps continue: written between progress records that are far apart."""
HALTED = "halt"
STOPPED = "stop"
DONE = "done"
FAILED = "error"
SKIPPED = "skipped_step"
ROLLED_BACK = "rollback"

ENDINGS = (HALTED, STOPPED, DONE, FAILED)
"""Last message of a process; one that stops without any of these hangs or was killed."""
