"""Run folders of beats and events, written by the package's own writers."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsa_train import names
from nsa_train.record.events import EventKind, add_event
from nsa_train.record.heartbeat_record import HeartbeatRecord
from nsa_train.record.record_files import JsonLines
from tests.nsa_train.record.beats import a_run

CONFIG = {"train": {"steps": 1000, "lr": 3e-4, "out_dir": "artifacts/run"}, "nsa": {"n_sel": 4, "l_sel": 64}}


def write_run(
    folder: Path,
    beats: Iterable[HeartbeatRecord] = (),
    events: Iterable[tuple[EventKind, float, int, dict[str, Any]]] = (),
    *,
    config: dict[str, Any] | None = None,
    val: Iterable[tuple[int, float, float, float]] = (),
    accuracy: float | None = None,
) -> Path:
    """`val` rows: step, loss, seconds, ts; without an accuracy they are those of an older version."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[int, JsonLines] = {}
    for beat in beats:
        if beat.rank not in files:
            files[beat.rank] = JsonLines(folder / names.heartbeat(beat.rank))
        files[beat.rank].append(beat.to_line())
    for file in files.values():
        file.close()
    for kind, ts, step, details in events:
        add_event(folder, kind, ts=ts, step=step, **details)
    env = {
        "nsa": "0", "host": "elsewhere", "packages": {"torch": "2"}, "config": config or CONFIG,
        "origins": {"train.steps": "default", "train.lr": "run.yaml:3"}, "world_size": max(1, len(files)),
    }  # fmt: skip
    (folder / names.ENV).write_text(json.dumps(env))
    last, head = ("", "") if accuracy is None else (f",{accuracy}", ",val_accuracy")
    rows = "".join(f"{step},{loss},100,{seconds},{ts}{last}\n" for step, loss, seconds, ts in val)
    if rows:
        (folder / names.VAL_CSV).write_text(f"step,val_loss,tokens,seconds,ts{head}\n{rows}")
    return folder


def with_layers(beats: Iterable[HeartbeatRecord], layers: int) -> list[HeartbeatRecord]:
    shares = tuple((0.2 + 0.01 * (layer % 9), 0.3, 0.5 - 0.01 * (layer % 9)) for layer in range(layers))
    return [replace(beat, gate_shares_by_layer=shares) if beat.msg == names.PROGRESS else beat for beat in beats]


def of_ranks(world: int, steps: int) -> list[HeartbeatRecord]:
    return [beat for rank in range(world) for beat in a_run(steps, rank=rank)]
