"""Our tokenizers as Transformers reads them: tokenizer.json and tokenizer_config.json, and back.

`AutoTokenizer` gives the same ids as ours for every text. That needs `split_special_tokens`: text that spells a special
token is text, as in training. For a chat template, which spells special tokens, load with `split_special_tokens=False`.
"""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from nsa.errors import CheckpointError
from nsa_train.convert.folder_files import read_bytes, read_json
from nsa_train.data.tokenizer import LARGEST_TOKENIZER_BYTES, Tokenizer, parse_tokenizer
from nsa_train.names import TOKENIZER

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"


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
