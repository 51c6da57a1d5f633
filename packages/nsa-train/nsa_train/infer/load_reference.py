"""Loads the model that another one is compared with: also a dense model of Transformers, as `nsa convert` reads it.

Nothing in a folder is executed.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from nsa.hf.configuration import NSAConfig
from nsa_train.checkpoint.folder import CheckpointFinding
from nsa_train.convert.dense.copied_files import SourceTokenizer
from nsa_train.convert.dense.source_folder import open_source, read_source
from nsa_train.convert.export_folder import CONFIG
from nsa_train.convert.folder_files import read_json
from nsa_train.infer.load_model import LoadedModel, ModelSource, assemble_model, load_model


def load_reference(
    path: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    key: bytes | None = None,
    on_rejected: Callable[[CheckpointFinding], None] | None = None,
) -> LoadedModel:
    """A dense model that `nsa convert` reads, with its own kinds of layers, or anything that `load_model` takes."""
    folder = Path(path)
    if not _is_source(folder):
        return load_model(folder, device=device, dtype=dtype, key=key, on_rejected=on_rejected, needs_text=False)
    source = open_source(folder)
    config, weights = source.model.config, read_source(source)
    tokenizer = SourceTokenizer(folder, config.vocab_size).tokenizer
    loaded = assemble_model(config, weights.tensors, tokenizer, ModelSource(folder, None), LoadedModel.prefill_chunk)
    loaded.model.to(device=device, dtype=dtype).eval()
    return loaded


def _is_source(folder: Path) -> bool:
    """Whether a folder holds a model of other software, by its config.json."""
    config = folder / CONFIG
    return config.exists() and read_json(config).get("model_type") != NSAConfig.model_type
