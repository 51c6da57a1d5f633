"""Files beside the weights that `nsa convert` copies as they are: tokenizer, chat template, generation config, licence.

They are copied as data, with limits, and never executed.
"""

from collections.abc import Mapping
from pathlib import Path

from nsa.errors import CheckpointError, ConfigError, DataError
from nsa_train.convert.folder_files import parse_json, read_bytes
from nsa_train.convert.tokenizer_files import CHAT_TEMPLATE, TOKENIZER_CONFIG, read_tokenizer_files
from nsa_train.data.tokenizer import LARGEST_TOKENIZER_BYTES, Tokenizer
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
