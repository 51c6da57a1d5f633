"""Loads a trained model for generation: from a run folder, a checkpoint, or a folder in Transformers' format.

Checkpoints are verified before they are used and nothing in them is executed; the training engine is not needed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from nsa.errors import CheckpointError, ConfigError, NSAError
from nsa.hf.configuration import NSAConfig
from nsa.hf.modeling import NSAForCausalLM
from nsa.hf.weight_names import EMBEDDING, HEAD, to_transformers
from nsa.kernels.gpu_versions import device_named
from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFinding, CheckpointFolder
from nsa_train.checkpoint.trained_model import open_trained_model
from nsa_train.config.model_sections import RuntimeConfig
from nsa_train.config.schema import RunConfig
from nsa_train.convert.export_folder import DTYPES, exported_config
from nsa_train.convert.folder_files import CONFIG, read_chat_template, read_json
from nsa_train.convert.import_folder import open_exported
from nsa_train.convert.tokenizer_files import transformers_tokenizer
from nsa_train.data.tokenizer import Tokenizer, choose_tokenizer, load_tokenizer
from nsa_train.infer.chat_template import ChatTemplate
from nsa_train.infer.generate import BatchResult, SamplingSettings, generate_batch


@dataclass(frozen=True)
class ModelSource:
    """Origin of a model."""

    path: Path
    """The checkpoint, the weights file or the exported folder itself."""
    step: int | None
    """Step of the run; None if it is not recorded."""

    def __str__(self) -> str:
        return f"{self.path}" if self.step is None else f"{self.path} (step {self.step})"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to generate, with its tokenizer."""

    model: NSAForCausalLM = field(repr=False)
    text_tokenizer: PreTrainedTokenizerFast | None = field(repr=False)
    """The tokenizer; None if it is not known, or if the model's ids stand for no text (synthetic data)."""
    source: ModelSource
    prefill_chunk: int = RuntimeConfig().prefill_chunk
    """Prompt tokens per forward pass."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        if self.text_tokenizer is None:
            raise _no_tokenizer(self.source.path)
        return self.text_tokenizer

    @property
    def trained_length(self) -> int:
        """Positions from here on were not seen in training."""
        return self.model.config.max_position_embeddings

    @property
    def end_ids(self) -> set[int]:
        """Tokens that end a document."""
        eos = self.model.config.eos_token_id
        return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)

    @property
    def pad_id(self) -> int:
        """Fills rows of a batch; never attended to."""
        pad = self.model.config.pad_token_id
        return pad if pad is not None else min(self.end_ids, default=0)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The tokenizer's chat template; Transformers' own `apply_chat_template` would render it without limits."""
        text = self.tokenizer.chat_template
        if not isinstance(text, str):
            raise ConfigError(f"{self.source.path} has no chat template: it continues text, and answers no messages.")
        return ChatTemplate(text, special_tokens=self.tokenizer.special_tokens_map, source=self.source.path)

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of each prompt. An empty one becomes the token between two documents: a text begins after it."""
        if not prompts:
            raise ConfigError("no prompt was given. Give at least one.")
        _require_text(prompts)
        options = dict(add_special_tokens=False, split_special_tokens=True, verbose=False)
        encoded = self.tokenizer(list(prompts), **options)["input_ids"]
        start = sorted(self.end_ids)[:1]
        if not start and not all(encoded):
            raise ConfigError("a prompt is empty and the tokenizer has no end-of-document token. Give some text.")
        return [list(ids) or start for ids in encoded]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins, by the tokenizer's chat template."""
        _require_text([text for message in messages for text in message.values()])
        text = self.chat_template.render(messages)
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            raise CheckpointError(f"the chat template of {self.source.path} writes no text for these messages.")
        return list(ids)

    @overload
    def generate(self, prompt: str, **settings: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], **settings: Any) -> list[str]: ...
    def generate(self, prompt: str | Sequence[str], **settings: Any) -> str | list[str]:
        """The text that follows a prompt, or each of several in one batch; keywords are those of `SamplingSettings`."""
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        result = self.generate_batch(prompts, **settings)
        texts = [completion.text for completion in result.completions]
        return texts[0] if isinstance(prompt, str) else texts

    def generate_batch(self, prompts: Sequence[str], **settings: Any) -> BatchResult:
        """Continue prompts in one batch, with tokens, reasons for the end, speed and memory."""
        return generate_batch(self, self.encode(prompts), SamplingSettings(**settings))


def load_model(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    tokenizer: str | Path | None = None,
    key: bytes | None = None,
    on_rejected: Callable[[CheckpointFinding], None] | None = None,
    needs_text: bool = True,
) -> LoadedModel:
    """The model of a run folder (its newest good checkpoint), of a checkpoint, or of an exported folder.

    device: default a GPU if there is one.
    dtype: fp32, bf16 or fp16; default as the weights were saved.
    tokenizer: `byte` or a tokenizer.json, for checkpoints of earlier versions, which have none.
    key: of signed checkpoints.
    on_rejected: called with each newer checkpoint that was not good.
    needs_text: raise if the tokenizer is not known; without it, using `LoadedModel.tokenizer` raises.
    """
    folder = Path(path)
    target, number = device_named(device), _dtype(dtype)
    if (folder / CONFIG).exists():
        loaded = _from_exported(folder, tokenizer)
    elif (folder / names.MODEL_SAFETENSORS).is_file() and not _has_checkpoints(folder):
        loaded = _from_weights_file(folder, tokenizer)
    else:
        loaded = _from_checkpoint(folder, tokenizer, key, on_rejected or (lambda finding: None))
    if needs_text and loaded.text_tokenizer is None:
        raise _no_tokenizer(loaded.source.path)
    loaded.model.to(device=target, dtype=number).eval()
    return loaded


def _require_text(prompts: Sequence[str]) -> None:
    for prompt in prompts:
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"a prompt holds {prompt[error.start]!r} at character {error.start}, half of a character or a byte "
                f"that is not UTF-8: it has no tokens. Give UTF-8 text."
            ) from error


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def _has_checkpoints(folder: Path) -> bool:
    return bool(CheckpointFolder(folder / names.CHECKPOINTS).steps())


def _from_checkpoint(
    folder: Path, tokenizer: str | Path | None, key: bytes | None, on_rejected: Callable[[CheckpointFinding], None]
) -> LoadedModel:
    trained = open_trained_model(folder, key=key, on_rejected=on_rejected)
    chosen = choose_tokenizer(tokenizer, trained.tokenizer())
    source = ModelSource(trained.path, trained.record.step)
    return _of_run(trained.config, trained.tensors, chosen, source)


def _from_weights_file(folder: Path, tokenizer: str | Path | None) -> LoadedModel:
    """A finished run without its checkpoints: model.safetensors, which holds the settings, and tokenizer.json."""
    from safetensors import SafetensorError, safe_open

    path = folder / names.MODEL_SAFETENSORS
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Export it again from a checkpoint.") from error
    try:
        config = RunConfig.of_saved(json.loads(about["config"]))
        step = int(about["step"])
    except (KeyError, ValueError, RecursionError, NSAError) as error:  # pydantic's ValidationError is a ValueError
        raise CheckpointError(
            f"{path} does not hold the settings of its run ({error!r:.300}). Name a checkpoint, or export it again "
            f"with `nsa checkpoint export`."
        ) from error
    own_tokenizer = load_tokenizer(str(folder)) if (folder / names.TOKENIZER).exists() else None
    return _of_run(config, tensors, choose_tokenizer(tokenizer, own_tokenizer), ModelSource(path, step))


def _from_exported(folder: Path, tokenizer: str | Path | None) -> LoadedModel:
    exported = open_exported(folder)
    chosen = choose_tokenizer(tokenizer, exported.tokenizer)
    source = ModelSource(folder, exported.record.step if exported.record is not None else None)
    loaded = _assemble_model(exported.config, exported.tensors, chosen, source, LoadedModel.prefill_chunk)
    if loaded.text_tokenizer is not None:
        loaded.text_tokenizer.chat_template = read_chat_template(folder)
    return loaded


def _no_tokenizer(where: Path) -> CheckpointError:
    return CheckpointError(
        f"{where} was saved without a tokenizer, as by earlier versions or after training on synthetic data, so its "
        f"ids mean no text. If it was trained on text, name the tokenizer: --tokenizer byte, or --tokenizer FILE.json "
        f"(in Python tokenizer=…)."
    )


def _of_run(
    config: RunConfig, tensors: Mapping[str, Tensor], tokenizer: Tokenizer | None, source: ModelSource
) -> LoadedModel:
    """The model of a run, from its tensors by the names of a checkpoint."""
    renamed = to_transformers(tensors)
    rows = renamed[EMBEDDING].shape[0] if EMBEDDING in renamed else 0
    described = exported_config(config, max(1, rows), tokenizer.eos_id if tokenizer is not None else None)
    return _assemble_model(described, renamed, tokenizer, source, config.runtime.prefill_chunk)


def _assemble_model(
    config: NSAConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    source: ModelSource,
    prefill_chunk: int,
) -> LoadedModel:
    """A model that holds these tensors themselves, by the names of `NSAForCausalLM`."""
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids and the embedding of {source.path} "
            f"{config.vocab_size} rows: it is not the tokenizer the model was trained with. Name that one with "
            f"--tokenizer."
        )
    with torch.device("meta"):  # its tensors are replaced by those that were read
        model = NSAForCausalLM(config)
    tied = {HEAD: tensors[EMBEDDING]} if config.tie_word_embeddings and EMBEDDING in tensors else {}
    try:
        model.load_state_dict({**tensors, **tied}, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{source.path} does not hold the weights that its settings describe: {error}") from error
    model.tie_weights()
    reader = transformers_tokenizer(tokenizer, config.max_position_embeddings) if tokenizer is not None else None
    return LoadedModel(model, reader, source, prefill_chunk)


def load_reference(
    path: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    key: bytes | None = None,
    on_rejected: Callable[[CheckpointFinding], None] | None = None,
) -> LoadedModel:
    """Load a model to compare with: a dense one that `nsa convert` reads, as it is, or one that `load_model` takes."""
    folder = Path(path)
    if not _is_source(folder):
        return load_model(folder, device=device, dtype=dtype, key=key, on_rejected=on_rejected, needs_text=False)

    from nsa_train.convert.dense.source_folder import open_source, read_source
    from nsa_train.convert.tokenizer_files import SourceTokenizer  # with the configs of all families it reads

    source = open_source(folder)
    config, weights = source.model.config, read_source(source)
    tokenizer = SourceTokenizer(folder, config.vocab_size).tokenizer
    loaded = _assemble_model(config, weights.tensors, tokenizer, ModelSource(folder, None), LoadedModel.prefill_chunk)
    loaded.model.to(device=device, dtype=dtype).eval()
    return loaded


def _is_source(folder: Path) -> bool:
    """Whether a folder holds a model of other software, by its config.json."""
    config = folder / CONFIG
    return config.exists() and read_json(config).get("model_type") != NSAConfig.model_type
