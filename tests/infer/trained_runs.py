"""Run folders for tests of generation: real, committed checkpoints of a tiny model, made without training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dist_cp

from nsa import names
from nsa.checkpoint.folder import CheckpointFolder
from nsa.checkpoint.run_state import TOKENIZER_RECORD, VOCAB_SIZE, RunRecord
from nsa.config.schema import RunConfig
from nsa.data.saved_tokenizer import tokenizer_record
from nsa.data.tokenizer import ByteTokenizer, Tokenizer
from nsa.model.build import build_model

SETTINGS: dict[str, Any] = {
    "model": {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8},
    "nsa": {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 24},
    "train": {"seq_len": 64},
    "runtime": {"device": "cpu", "precision": "fp32", "prefill_chunk": 48},
}


def write_run(
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    keep_tokenizer: bool = True,
    steps: Sequence[int] = (10,),
    key: bytes | None = None,
    **model: Any,
) -> Path:
    """A run folder with these checkpoints; weights are far from zero, so that every branch matters."""
    tokenizer = tokenizer or ByteTokenizer()
    config = RunConfig.model_validate(SETTINGS | {"model": SETTINGS["model"] | model})
    checkpoints = CheckpointFolder(folder / names.CHECKPOINTS, key=key)
    for step in steps:
        net = build_model(config, tokenizer.vocab_size)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(step)
            for name, parameter in net.named_parameters():
                if "norm" not in name:
                    parameter.normal_(std=0.3, generator=generator)
        staging = checkpoints.begin(step)
        dist_cp.save({"model": net.state_dict()}, checkpoint_id=names.tensors_of(staging), no_dist=True)
        more: dict[str, Any] = {VOCAB_SIZE: tokenizer.vocab_size}
        if keep_tokenizer:
            more[TOKENIZER_RECORD] = tokenizer_record(tokenizer)
            (staging / names.TOKENIZER).write_text(tokenizer.to_json())
        RunRecord(step, 1, config.model_dump(mode="json"), {}, more=more).write(staging)
        checkpoints.commit(step)
    return folder
