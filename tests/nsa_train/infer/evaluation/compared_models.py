"""A tiny dense model of Transformers and its conversion, loaded, with rows of tokens to compare them on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from nsa.hf.modeling import NSAForCausalLM
from nsa_train.convert.dense.conversion_plan import ConversionOptions
from nsa_train.convert.dense.convert_folder import convert_folder
from nsa_train.data.rows.batch import Batch
from nsa_train.infer.load_model import load_model, load_reference
from tests.nsa_train.convert.dense_sources import SIZES, save_dense

COVERED = 4 * 16 + 24
OPTIONS: dict[str, Any] = dict(l=8, d=4, l_sel=16, n_sel=4, w=24)


def converted_pair(
    folder: Path, case: str = "llama", **options: Any
) -> tuple[NSAForCausalLM, NSAForCausalLM, PreTrainedModel]:
    """The converted model, the dense one in our classes, and the dense one of Transformers."""
    theirs = save_dense(folder / "dense", case)
    convert_folder(folder / "dense", folder / "sparse", ConversionOptions(**{**OPTIONS, **options}))
    sparse = load_model(folder / "sparse", device="cpu", needs_text=False).model
    return sparse, load_reference(folder / "dense", device=sparse.device, dtype=sparse.dtype).model, theirs


def token_rows(count: int, length: int, ends: Sequence[int] | None = None) -> list[Batch]:
    """Batches of one row; `ends`: where documents end in it."""
    generator = np.random.default_rng(3)
    cu = (np.array([0, *(ends or ()), length], dtype=np.int32),)
    return [
        Batch(
            generator.integers(3, SIZES["vocab_size"], (1, length)).astype(np.uint16),
            cu,
            None,
            np.zeros(1, np.int64),
            0,
            1,
        )
        for _ in range(count)
    ]


def token_tensor(batch: Batch) -> torch.Tensor:
    return torch.from_numpy(batch.tokens.astype(np.int64))
