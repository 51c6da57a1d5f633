"""Overhead of `nsa train` over a bare loop (forward, backward, clip, AdamW) on the same model and rows.

    python -m tools.bench_train_overhead

Both run in this process, one after the other, several times over, on one thread and with garbage collection off as the
engine has it; the best of each counts. Processor time is compared, since a busy machine stretches wall time at random;
waiting for data is wall time, from the heartbeat. Telemetry is what beats on every step cost above beats on some, as a
share of a step at the config's own train.log_every.
"""

import argparse
import gc
import tempfile
import time
from pathlib import Path

import torch

from nsa_train.config import load
from nsa_train.config.schema import RunConfig
from nsa_train.record.heartbeat_record import HeartbeatRecord
from nsa_train.shipped import CORPUS
from nsa_train.train import datasets
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.build import BETAS, build_train_module
from nsa_train.train.engine.data_loader import to_engine
from nsa_train.train.run import train

ROOT = Path(__file__).parents[1]
WARM, STEPS, ROUNDS = 4, 20, 2


class Clock:
    """Reporter that measures processor seconds from step WARM to step STEPS and keeps the heartbeat records."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}
        self.beats: list[HeartbeatRecord] = []

    def line(self, text: str) -> None: ...

    def evaluation(self, result: object) -> None: ...

    def beat(self, beat: HeartbeatRecord, steps: int) -> None:
        if beat.loss is not None:
            self.at[beat.step] = time.process_time()
            self.beats.append(beat)

    @property
    def seconds_per_step(self) -> float:
        return (self.at[STEPS] - self.at[WARM]) / (STEPS - WARM)


def with_trainer(config: RunConfig) -> Clock:
    clock = Clock()
    assert train(config, reporter=clock) == 0
    return clock


def bare(config: RunConfig) -> float:
    vocab_size = datasets.vocabulary(config)
    model = build_train_module(config, vocab_size, RankInfo(), torch.device("cpu")).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.lr, betas=BETAS)
    stream = datasets.training_rows(config, vocab_size).open()
    batches = [to_engine(stream.next_batch(datasets.global_rows(config))) for _ in range(STEPS)]
    began = 0.0
    for step, batch in enumerate(batches):
        if step == WARM:
            began = time.process_time()
        tokens, labels = batch.pop("input_ids"), batch.pop("labels")
        loss = model(tokens, labels=labels, return_logits=False, **batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (time.process_time() - began) / (STEPS - WARM)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    gc.disable()
    plain, trained, talkative, waits = [], [], [], []
    log_every = load(ROOT / "configs" / "cpu_quickstart.yaml").train.log_every
    for _ in range(ROUNDS):
        gc.collect()
        with tempfile.TemporaryDirectory() as folder:
            changes = ["data.dataset=local", f"data.path={CORPUS}",
                       f"train.out_dir={folder}/run", f"train.steps={STEPS}", f"train.log_every={WARM}",
                       "train.eval_every=0", "train.save_every=0", "runtime.threads=1", "data.warmup_batches=4",
                       "train.warmup_steps=0", "train.batch_size=4"]  # fmt: skip
            config = load(ROOT / "configs" / "cpu_quickstart.yaml", overrides=changes)
            plain.append(bare(config))
            clock = with_trainer(config)
            trained.append(clock.seconds_per_step)
            config = load(ROOT / "configs" / "cpu_quickstart.yaml",
                          overrides=[*changes, f"train.out_dir={folder}/talkative", "train.log_every=1"])  # fmt: skip
            talkative.append(with_trainer(config).seconds_per_step)
            waits += [(beat.dt_fetch_s or 0.0) / (beat.step_s or 1.0) for beat in clock.beats[1:]]
    tokens = datasets.global_rows(config) * config.train.seq_len
    waits.sort()
    print(f"bare loop   {tokens / min(plain):8,.0f} tokens per processor second")
    print(
        f"nsa train   {tokens / min(trained):8,.0f} tokens per processor second, {min(plain) / min(trained):.3f} of it"
    )
    per_beat = max(0.0, min(talkative) - min(trained)) * WARM / (WARM - 1)
    print(f"telemetry   {100 * per_beat / log_every / min(trained):8.2f} % of the step at log_every={log_every}")
    print(f"data wait   {100 * waits[len(waits) // 2]:8.2f} % of the step, median")


if __name__ == "__main__":
    main()
