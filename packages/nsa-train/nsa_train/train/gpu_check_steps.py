"""Part of the GPU check: the trainer makes a few steps of configs/train_50k.yaml in a child process.

Registered under the entry point group `nsa.gpu_checks`, from which `nsa gpu-check` takes the checks of other packages.
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from nsa.check.cases import BACKEND, CheckSizes
from nsa.check.comparison import CheckResult, CheckStatus, bounded, fact
from nsa.check.gpu_check_report import GpuCheck
from nsa_train import names
from nsa_train.config import load
from nsa_train.config.env import without_settings
from nsa_train.planning.estimate import estimate
from nsa_train.planning.hardware import hardware_here
from nsa_train.record.heartbeat_record import HeartbeatRecord, read_beats
from nsa_train.shipped import CONFIGS

CONFIG = CONFIGS / "train_50k.yaml"
_TIMEOUT_S = 1500.0
_LAST_LINES = 5


def checks(sizes: CheckSizes) -> Iterator[GpuCheck]:
    yield GpuCheck("training", "steps of train_50k", partial(_train_50k, sizes))


def _train_50k(sizes: CheckSizes) -> Iterator[CheckResult]:
    claim = "steps of configs/train_50k.yaml by the trainer"
    with tempfile.TemporaryDirectory() as folder:
        changes = [*sizes.training, f"train.out_dir={folder}/run", "data.dataset=synthetic", "data.tokenizer=byte"]
        environ = without_settings() | ({} if sizes.is_gpu else {"TRITON_INTERPRET": "1"})
        done = subprocess.run(
            [sys.executable, "-m", "nsa_train.cli", "train", str(CONFIG), *changes],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, env=environ,
            timeout=_TIMEOUT_S, cwd=folder,
        )  # fmt: skip
        beats = list(read_beats(Path(folder) / "run" / names.heartbeat(0))) if not done.returncode else []
        progress = [beat for beat in beats if beat.msg == names.PROGRESS]
        if not progress:
            last_lines = [line for line in done.stdout.splitlines() if line.strip()][-_LAST_LINES:]
            yield CheckResult(claim, CheckStatus.FAILS, done.returncode, 0, " / ".join(last_lines))
            return
        env = json.loads((Path(folder) / "run" / names.ENV).read_text(encoding="utf-8"))
    yield from _trained(sizes, claim, changes, progress, env)


def _trained(
    sizes: CheckSizes, claim: str, changes: list[str], progress: list[HeartbeatRecord], env: dict[str, Any]
) -> Iterator[CheckResult]:
    losses = [beat.loss for beat in progress if beat.loss is not None]
    bad = len(progress) - sum(math.isfinite(loss) for loss in losses)
    yield bounded(f"{claim}: records without a finite loss", bad, 0, f"loss {losses[0]:.4f} … {losses[-1]:.4f}")
    other = [f"{branch}: {one['backend']}, {one['reason']}" for branch, one in env["kernels"].items()
             if one["backend"] != BACKEND]  # fmt: skip
    yield bounded("train_50k: branches on another backend than Triton", len(other), 0, "; ".join(other))
    speed = progress[-1].toks_per_s or 0.0
    if not sizes.is_gpu:
        yield fact("train_50k: tokens/s", "interpreted kernels are not timed")
        return
    config = load(CONFIG, overrides=changes)
    modelled = estimate(config, hardware_here(), config.model.vocab_size or 0)
    memory = f"{(progress[-1].gpu_mem_reserved or 0) / 1024:.1f} GiB, estimated {modelled.memory.total / 2**30:.1f}"
    yield fact("train_50k: tokens/s", f"{speed:,.0f}, estimated {modelled.tokens_per_s:,.0f}")
    yield fact("train_50k: memory", memory)
