"""Files beside the weights: tokenizers as Transformers reads them, and what `nsa convert` copies as it is.

`AutoTokenizer` gives the same ids as ours for every text. That needs `split_special_tokens`: text that spells a special
token is text, as in training. For a chat template, which spells special tokens, load with `split_special_tokens=False`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from nsa.errors import CheckpointError, ConfigError, DataError
from nsa_train.convert.folder_files import CHAT_TEMPLATE, TOKENIZER_CONFIG, parse_json, read_bytes, read_json
from nsa_train.data.tokenizer import LARGEST_TOKENIZER_BYTES, Tokenizer, parse_tokenizer
from nsa_train.names import TOKENIZER

GENERATION_CONFIG = "generation_config.json"
_UNREAD_TOKENIZER = "source_tokenizer.json"
"""A tokenizer.json that this package cannot read: beside the weights under its own name, it would not load."""
_TOKENIZER_FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model"),
)
_OTHER_FILES = (GENERATION_CONFIG, "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt")
COPIED_FILES = (*_TOKENIZER_FILES, *_OTHER_FILES)


def _tokenizer_options(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    """Arguments of a Transformers tokenizer that reads text as ours does; `max_length` as in training, for warnings."""
    end = _engine(tokenizer).id_to_token(tokenizer.eos_id)
    return {
        "clean_up_tokenization_spaces": False,
        "eos_token": end,
        "model_max_length": max_length,
        "pad_token": end,
        "padding_side": "left",  # generation appends at the right
        "split_special_tokens": True,
    }


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> dict[str, str]:
    """The files of a tokenizer for Transformers: name → content."""
    # Since Transformers 5 the class has another name of its own; every version knows this one.
    options = {**_tokenizer_options(tokenizer, max_length), "tokenizer_class": "PreTrainedTokenizerFast"}
    return {
        TOKENIZER: f"{tokenizer.to_json()}\n",
        TOKENIZER_CONFIG: json.dumps(options, indent=2, sort_keys=True, ensure_ascii=False) + "\n",
    }


def transformers_tokenizer(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """Make the Transformers tokenizer directly, without files in between."""
    return PreTrainedTokenizerFast(tokenizer_object=_engine(tokenizer), **_tokenizer_options(tokenizer, max_length))


def read_tokenizer_files(folder: Path) -> Tokenizer | None:
    """The tokenizer of an exported folder; None if it has none. Nothing in it is executed."""
    if not (folder / TOKENIZER).exists() and not (folder / TOKENIZER).is_symlink():
        return None
    end = read_json(folder / TOKENIZER_CONFIG).get("eos_token")
    if isinstance(end, dict):  # Transformers may save a token with its options
        end = end.get("content")
    if not isinstance(end, str):
        raise CheckpointError(
            f"{folder / TOKENIZER_CONFIG} has eos_token {end!r}: it must name the token that ends a document."
        )
    raw = read_bytes(folder / TOKENIZER, LARGEST_TOKENIZER_BYTES)
    return parse_tokenizer(raw, folder / TOKENIZER, eos_token=end)


def _engine(tokenizer: Tokenizer) -> Any:
    from tokenizers import Tokenizer as Engine

    return Engine.from_str(tokenizer.to_json())


class SourceTokenizer:
    """The tokenizer of a source folder, or the reason why this package cannot read it."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.tokenizer: Tokenizer | None = None
        self.problem: str | None = None
        try:
            self.tokenizer = read_tokenizer_files(folder)
        except (CheckpointError, ConfigError, DataError) as error:
            self.problem = str(error)
        if self.tokenizer is not None and self.tokenizer.vocab_size > vocab_size:
            self.problem = f"it has {self.tokenizer.vocab_size} ids and the model {vocab_size}"
            self.tokenizer = None
        elif self.tokenizer is None and self.problem is None:
            self.problem = f"the folder has no {TOKENIZER}"


def copy_source_files(folder: Path, out: Path, *, tokenizer_is_read: bool) -> dict[str, str]:
    """Copy the known files of a source; returns name there → name in `out`."""
    copied = {}
    for name in COPIED_FILES:
        if not (folder / name).exists() and not (folder / name).is_symlink():
            continue
        content = read_bytes(folder / name, LARGEST_TOKENIZER_BYTES)
        if name == GENERATION_CONFIG:  # Transformers reads it with the model
            parse_json(content.decode("utf-8", "replace"), folder / name)
        copied[name] = _UNREAD_TOKENIZER if name == TOKENIZER and not tokenizer_is_read else name
        (out / copied[name]).write_bytes(content)
    return copied


def copy_back(folder: Path, out: Path, files: Mapping[str, str]) -> list[str]:
    """Copy the files of a converted folder back to their names in the source; returns those that are not there."""
    missing = []
    for name, here in files.items():
        if name not in COPIED_FILES or here not in (*COPIED_FILES, _UNREAD_TOKENIZER):
            raise CheckpointError(
                f"{folder} names the file {name!r:.60} in its record: a conversion copies no such file."
            )
        if (folder / here).exists() or (folder / here).is_symlink():
            (out / name).write_bytes(read_bytes(folder / here, LARGEST_TOKENIZER_BYTES))
        else:
            missing.append(name)
    return missing
