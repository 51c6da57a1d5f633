"""Run folders with checkpoints of a tiny model for tests, made without training: random weights in a run's format."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dist_cp

from nsa.model.transformer import NSATransformer
from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.checkpoint.run_state import TOKENIZER_RECORD, VOCAB_SIZE, RunRecord
from nsa_train.config.schema import RunConfig
from nsa_train.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_record
from nsa_train.run_model import build_model

SETTINGS: dict[str, Any] = {
    "model": {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8},
    "nsa": {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 24},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1},
    "train": {"seq_len": 128, "batch_size": 2, "steps": 20, "warmup_steps": 1, "out_dir": "/secret/place/run"},
    "data": {"dataset": "local", "path": "/secret/place/books.jsonl"},
}


def settings(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({key: {**SETTINGS.get(key, {}), **sections.get(key, {})} for key in SETTINGS})


def save_run(
    folder: Path,
    config: RunConfig | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    step: int = 20,
    key: bytes | None = None,
    keep_tokenizer: bool = True,
) -> NSATransformer:
    """A run folder with one checkpoint; returns its model."""
    config, tokenizer = config or settings(), tokenizer or ByteTokenizer()
    torch.manual_seed(step)
    model = build_model(config, tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    save_checkpoint(folder, model, config, tokenizer, step=step, key=key, keep_tokenizer=keep_tokenizer)
    return model.eval()


GENERATION = {"train": {"seq_len": 64}, "runtime": {"prefill_chunk": 48}}


def write_run(
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    keep_tokenizer: bool = True,
    steps: Sequence[int] = (10,),
    key: bytes | None = None,
    **model: Any,
) -> Path:
    """A run folder with these checkpoints, to generate with: weights far from zero, so that every branch matters."""
    config, tokenizer = settings(**GENERATION, model=model), tokenizer or ByteTokenizer()
    for step in steps:
        net = build_model(config, tokenizer.vocab_size)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(step + 1)
            for name, parameter in net.named_parameters():
                if "norm" not in name:
                    parameter.normal_(std=0.3, generator=generator)
        save_checkpoint(folder, net, config, tokenizer, step=step, key=key, keep_tokenizer=keep_tokenizer)
    return folder


def save_checkpoint(
    folder: Path,
    model: NSATransformer,
    config: RunConfig,
    tokenizer: Tokenizer,
    *,
    step: int,
    key: bytes | None,
    keep_tokenizer: bool,
) -> None:
    checkpoints = CheckpointFolder(folder / names.CHECKPOINTS, key=key)
    saving = checkpoints.begin(step)
    dist_cp.save({"model": model.state_dict()}, checkpoint_id=names.tensors_of(saving), no_dist=True)
    more: dict[str, Any] = {VOCAB_SIZE: config.model.vocab_size or tokenizer.vocab_size}
    if keep_tokenizer:
        more[TOKENIZER_RECORD] = tokenizer_record(tokenizer)
        (saving / names.TOKENIZER).write_text(tokenizer.to_json(), encoding="utf-8")
    RunRecord(step, 1, config.model_dump(mode="json"), {}, more=more).write(saving)
    checkpoints.commit(step)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
