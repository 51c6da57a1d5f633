"""NSA in a plain OLMo-core configuration: its own model, data loader and trainer, with another sequence mixer.

pip install 'nsa-train[train]'

    python train_with_olmo_core.py            dense and sparse, 30 steps each on the shipped text: seconds
    python train_with_olmo_core.py STEPS

NSAMixerConfig serves every architecture of OLMo-core; `nsa train` adds preflight, verified checkpoints and rollback.
"""

import logging
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.data.types import NumpyDatasetDType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import Duration, TrainerConfig, prepare_training_environment, teardown_training_environment
from olmo_core.train.callbacks import Callback, ConsoleLoggerCallback
from olmo_core.train.common import TRAIN_CE_LOSS_METRIC
from olmo_core.train.train_module import TransformerTrainModuleConfig

from nsa_train import NSAMixerConfig
from nsa_train.shipped import CORPUS

LENGTH, BATCH = 256, 8


def model_config(kind: str) -> TransformerConfig:
    """A small Llama of OLMo-core; for `nsa` its blocks get another sequence mixer, nothing else."""
    config = TransformerConfig.llama_like(d_model=64, vocab_size=256, n_layers=2, n_heads=4, n_kv_heads=2)
    if kind == "nsa":
        sizes = dict(n_heads=4, n_kv_groups=2, d_k=16, d_v=16)
        blocks = dict(l=16, d=8, l_sel=32, n_sel=4, w=64)  # for rows of 256 bytes; leave out in long rows
        config.block.sequence_mixer = NSAMixerConfig(options=sizes | blocks)
    return config


def write_tokens(file: Path) -> None:
    """The shipped corpus as bytes, in the format of OLMo-core's datasets: a flat array of token ids."""
    documents = pyarrow.parquet.read_table(CORPUS, columns=["text"])["text"].to_pylist()
    numpy.frombuffer("\0".join(documents).encode(), dtype=numpy.uint8).tofile(file)


@dataclass
class LossRecorder(Callback):
    losses: list[float] = field(default_factory=list)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if TRAIN_CE_LOSS_METRIC in metrics:
            self.losses.append(metrics[TRAIN_CE_LOSS_METRIC])


def train(kind: str, tokens: Path, work_dir: Path, steps: int) -> Any:
    tokenizer = TokenizerConfig(vocab_size=256, eos_token_id=0, pad_token_id=0)
    dataset = NumpyFSLDatasetConfig(
        paths=[str(tokens)], sequence_length=LENGTH, tokenizer=tokenizer, dtype=NumpyDatasetDType.uint8,
        work_dir=str(work_dir),
    ).build()  # fmt: skip
    model = model_config(kind).build(init_device="cpu")
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=BATCH * LENGTH, max_sequence_length=LENGTH, optim=AdamWConfig(lr=3e-3), max_grad_norm=1.0
    ).build(model)
    loader = NumpyDataLoaderConfig(global_batch_size=BATCH * LENGTH, seed=0, work_dir=str(work_dir)).build(dataset)
    recorder = LossRecorder()
    callbacks = {"losses": recorder, "console_logger": ConsoleLoggerCallback(log_interval=10**9)}
    TrainerConfig(
        save_folder=str(work_dir / kind), max_duration=Duration.steps(steps), metrics_collect_interval=1,
        no_checkpoints=True, callbacks=callbacks,
    ).build(module, loader).fit()  # fmt: skip
    return recorder.losses, model.num_params


if __name__ == "__main__":
    steps = int(sys.argv[1]) if sys.argv[1:] else 30
    prepare_training_environment(seed=0, backend=None)
    logging.disable(logging.INFO)  # OLMo-core logs its whole configuration
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder) / "tokens.npy")
        results = {kind: train(kind, Path(folder) / "tokens.npy", Path(folder), steps) for kind in ("dense", "nsa")}
    teardown_training_environment()
    print("".join(f"{kind}: {parameters:,} parameters   " for kind, (_, parameters) in results.items()))
    print("loss, nats per byte\n  step   dense     nsa")
    for step in sorted({1, *range(5, steps + 1, 5), steps}):
        print(f"{step:6d}" + "".join(f"{losses[step - 1]:8.3f}" for losses, _ in results.values()))
