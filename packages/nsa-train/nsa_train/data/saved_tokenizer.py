"""tokenizer.json kept with a prepared set, a run and its checkpoints, and the record that identifies it.

The record (vocabulary size, fingerprint, end-of-document id) is in manifest.json of a prepared set and in state.json of
a checkpoint. A tokenizer is returned only if it matches: ids of another one are valid integers with other meanings.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsa.errors import DataError
from nsa_train.data.shards.manifest import ShardManifest
from nsa_train.data.tokenizer import LARGEST_TOKENIZER_BYTES, Tokenizer, check_same, load_tokenizer, parse_tokenizer
from nsa_train.names import TOKENIZER
from nsa_train.storage import StorageFolder


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint,
        "eos_id": tokenizer.eos_id,
    }


def set_tokenizer_record(manifest: ShardManifest) -> dict[str, Any]:
    """The record of the tokenizer that a set was prepared with."""
    return {
        "vocab_size": manifest.vocab_size,
        "fingerprint": manifest.tokenizer_fingerprint,
        "eos_id": manifest.eos_id,
    }


def parse_saved(raw: bytes | bytearray, where: Path, record: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in the bytes of tokenizer.json; raises unless it is the recorded one."""
    vocab_size, fingerprint, eos_id = (record.get(key) for key in ("vocab_size", "fingerprint", "eos_id"))
    if type(vocab_size) is not int or type(eos_id) is not int or type(fingerprint) is not str:
        raise DataError(f"the record of {where} has no vocab_size, eos_id or fingerprint: {dict(record)!r:.200}.")
    tokenizer = parse_tokenizer(raw, where, eos_token=eos_id)
    check_same(vocab_size, fingerprint, tokenizer)
    return tokenizer


def choose_tokenizer(override: str | Path | None, saved: Tokenizer | None) -> Tokenizer | None:
    """Return the tokenizer saved with a model, or `override`, which must equal the saved one if there is one."""
    if override is None:
        return saved
    chosen = load_tokenizer(str(override))
    if saved is not None:
        check_same(saved.vocab_size, saved.fingerprint, chosen)
    return chosen


def save_with_set(out: StorageFolder, tokenizer: Tokenizer, vocab_size: int, fingerprint: str) -> None:
    """Write tokenizer.json into a prepared set, unless it has one; raises if it is not the tokenizer of the set."""
    if out.exists(TOKENIZER):
        return
    check_same(vocab_size, fingerprint, tokenizer)
    out.write_bytes(TOKENIZER, tokenizer.to_json().encode())


def read_from_set(folder: StorageFolder, manifest: ShardManifest) -> Tokenizer | None:
    """The tokenizer of a prepared set; None for a set of an earlier version, which has none."""
    if not folder.exists(TOKENIZER):
        return None
    where = Path(folder.url) / TOKENIZER
    raw = folder.read_bytes(TOKENIZER, limit=LARGEST_TOKENIZER_BYTES)
    return parse_saved(raw, where, set_tokenizer_record(manifest))
