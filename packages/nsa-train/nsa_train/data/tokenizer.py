"""Tokenizers: UTF-8 bytes, or any `tokenizers` JSON file; training of a byte-level BPE; tokenizer.json of both kinds.

Every artifact built with a tokenizer stores its vocabulary size and fingerprint; `check_same` compares them before use,
because token ids of another vocabulary are valid integers and would train without an error.
"""

import errno
import hashlib
import json
import os
import re
import shlex
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nsa.errors import ConfigError, DataError
from nsa.files import open_regular, replace_file, storage_errors, temporary_path
from nsa_train.names import TOKENIZER

END_OF_TEXT = "<|endoftext|>"
# Names under which published tokenizers keep their end-of-document token, tried in this order.
_EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]")
# The parts of a tokenizer JSON that determine the ids of a text. The rest (padding, truncation, post-processor,
# decoder) is disabled here or applies to ids that exist already.
_ID_DEFINING_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens")
LARGEST_TOKENIZER_BYTES = 256 << 20  # published ones of 256,000 ids have about 35 MB
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_LARGEST_GROWTH = 64
"""How many times as long a text may become by the replacements of a normalizer or decoder."""
_LONGEST_PREFIX = 1024
_FREE_IDS, _MOST_IDS_PER_TOKEN = 1 << 16, 16  # ids without a token have a row of the embedding too
_PARENT_CHECK_S = 0.5


class Tokenizer(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int:
        """Largest id + 1: the number of embedding rows needed."""
        ...

    @property
    def eos_id(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of everything that determines the ids."""
        ...

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Ids as `token_dtype(vocab_size)`, no special tokens; text that spells one is encoded as text."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...
    def to_json(self) -> str:
        """The tokenizer as text in the format of the `tokenizers` library; `parse_tokenizer` reads it back."""
        ...


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, Any]:
    """Values that identify a tokenizer, in state.json of a checkpoint and manifest.json of a prepared set.

    A saved tokenizer is used only if it matches: ids of another one are valid integers with other meanings.
    """
    return {key: getattr(tokenizer, key) for key in ("vocab_size", "fingerprint", "eos_id")}


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest fixed width that holds every id: 2 bytes up to 65,536 ids, else 4."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class ByteTokenizer:
    """UTF-8 bytes as ids 0–255 and the end-of-document id 256.

    The vocabulary is 257 and not padded: padding the embedding for a kernel is up to the model.
    """

    name = "byte"
    vocab_size = 257
    eos_id = 256
    fingerprint = hashlib.sha256(b"nsa byte tokenizer: utf-8 bytes 0-255, eos 256").hexdigest()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        dtype = token_dtype(self.vocab_size)
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(dtype) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        array = np.asarray(ids)
        return array[array < self.eos_id].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def to_json(self) -> str:
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        options = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
        flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
        end = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        described: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": self.eos_id, "content": END_OF_TEXT, **end, "special": True}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", **options, **flags, "vocab": _byte_alphabet(), "merges": []},
        }
        return json.dumps(described, ensure_ascii=False)


def _byte_alphabet() -> dict[str, int]:
    """Character → byte, as the library's ByteLevel maps them: a printable Latin-1 character stands for its own code,
    and the characters from 256 on for the other bytes, in their order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    code = {byte: byte for byte in printable} | {byte: 256 + place for place, byte in enumerate(others)}
    return {chr(code[byte]): byte for byte in range(256)}


class JsonTokenizer:
    """Any tokenizer saved by the `tokenizers` library (`tokenizer.json`)."""

    def __init__(self, path: str | Path, *, eos_token: str | int | None = None, text: str | None = None) -> None:
        """`eos_token` is the end-of-document token or its id; `text`, if given, is read in place of the file."""
        self._path, self._eos_token, self._text = Path(path), eos_token, text
        self.name = self._path.parent.name if self._path.name == TOKENIZER else self._path.stem
        self._tokenizer, described = _parse_json(self._path, _read_text(self._path) if text is None else text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document that contains the text "<|endoftext|>" must not produce the special token.
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise ConfigError(f"tokenizer file {self._path} has an empty vocabulary. Use a trained tokenizer.")
        self.vocab_size = max(ids) + 1
        if self.vocab_size > _FREE_IDS + _MOST_IDS_PER_TOKEN * len(ids):
            raise ConfigError(
                f"tokenizer file {self._path} has {len(ids)} tokens and the id {max(ids)}: a model has a row for every "
                "id below. Number the tokens from 0."
            )
        self.eos_id = _find_eos(self._path, self._tokenizer, eos_token)
        self._parts = {part: described.get(part) for part in _ID_DEFINING_PARTS}
        self._decoder = described.get("decoder")
        canonical = json.dumps([self._parts, self.eos_id], sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle the path: the library loses `encode_special_tokens` when it pickles a tokenizer for a worker process.
        return partial(JsonTokenizer, self._path, eos_token=self._eos_token, text=self._text), ()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        dtype = token_dtype(self.vocab_size)
        fix = "Use a tokenizer that covers every byte, e.g. from `nsa data tokenizer train`."
        with _library_errors(f"tokenizer {self._path} cannot encode a text", fix):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def to_json(self) -> str:
        """The tokenizer as JSON, without padding, truncation and post-processor: every reader gets the same ids."""
        unused = dict.fromkeys(("truncation", "padding", "post_processor"))
        return json.dumps({"version": "1.0", **unused, **self._parts, "decoder": self._decoder}, ensure_ascii=False)

    @property
    def is_byte_tokenizer(self) -> bool:
        """Whether this is the text of `ByteTokenizer.to_json`, or an equal one."""
        byte = json.loads(ByteTokenizer().to_json())
        return self.eos_id == ByteTokenizer.eos_id and self._parts == {part: byte[part] for part in _ID_DEFINING_PARTS}


@contextmanager
def _library_errors(problem: str, fix: str) -> Iterator[None]:
    """The tokenizers library has no exception class of its own: it raises plain `Exception` or a `PanicException`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{problem} ({error}). {fix}") from error


def _read_text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            raw = file.read(LARGEST_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"tokenizer file {path} cannot be read ({error.strerror}). {_how_to_download(path)}Use a tokenizers JSON "
            "file, train one with `nsa data tokenizer train`, or use byte."
        ) from error
    return _decode(raw, path)


def _how_to_download(path: Path) -> str:
    """The command that downloads a tokenizer, if `path` is no file and may be the name of a model on the hub."""
    if path.exists() or not _HUB_NAME.fullmatch(str(path)) or path.suffix == ".json":
        return ""
    folder = shlex.quote(path.name)
    return (
        f"Nothing is downloaded by its name: if it is a model on the Hugging Face hub, run `hf download {path} "
        f"{TOKENIZER} --local-dir {folder}` and name {folder}/{TOKENIZER}. "
    )


def _decode(raw: bytes | bytearray, path: Path) -> str:
    if len(raw) > LARGEST_TOKENIZER_BYTES:
        raise ConfigError(
            f"tokenizer file {path} has more than the {LARGEST_TOKENIZER_BYTES} bytes allowed. Use a tokenizers JSON "
            "file."
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"tokenizer file {path} is not text ({error}). Use a file saved by the tokenizers library."
        ) from error


def _parse_json(path: Path, text: str) -> tuple[Any, dict[str, Any]]:
    from tokenizers import Tokenizer as Engine

    try:
        described = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"tokenizer file {path} is not JSON ({error}). Use a file saved by the tokenizers library."
        ) from error
    if not isinstance(described, dict) or "model" not in described:
        raise ConfigError(
            f"tokenizer file {path} has no 'model' entry: it was not saved by the tokenizers library. Use "
            "tokenizer.json, not tokenizer_config.json or vocab.json."
        )
    fix = "Save it again with that library, or download it again."
    with _library_errors(f"tokenizer file {path} cannot be loaded by the tokenizers library", fix):
        engine = Engine.from_str(text)
        # As the library reads it, which also accepts steps without a type.
        parts = [json.loads(part.__getstate__()) for part in (engine.normalizer, engine.decoder) if part is not None]
    for part in parts:
        _require_bounded_growth(path, part)
    if dropout := getattr(engine.model, "dropout", None):
        raise ConfigError(
            f"tokenizer file {path} has model.dropout {dropout:g}: the same text would have other tokens each time, so "
            "no run could be repeated or resumed. Set it to null."
        )
    return engine, described


def _require_bounded_growth(path: Path, part: dict[str, Any]) -> None:
    """Refuse a normalizer or decoder whose replacements multiply a text: the library has no limit of its own.

    A replacement is applied to what earlier ones inserted only if its pattern shares a character with that, or after a
    step that changes characters. Such growths multiply, others do not.
    """
    inserted: list[tuple[frozenset[str] | None, float]] = []  # characters (None: any), and how often one is there
    prefixes = 0
    for step in _steps(part):
        if step["type"] == "Prepend":
            prefixes += len(step["prepend"])
        elif step["type"] == "Replace":
            content, literal = step["content"], step["pattern"].get("String")  # or a regular expression
            own = len(content) / len(literal) if literal else 1.0 + len(content)
            before = (g for text, g in inserted if text is None or not literal or text & {*literal})
            inserted.append((frozenset(content), max(1.0, own) * max(before, default=1.0)))
        else:  # e.g. lower case: what was inserted may have become any other character
            inserted = [(None, max((growth for _, growth in inserted), default=1.0))]
    growth = max((growth for _, growth in inserted), default=1.0)
    if growth > _LARGEST_GROWTH or prefixes > _LONGEST_PREFIX:
        raise ConfigError(
            f"tokenizer file {path} has a normalizer or decoder that makes a text up to {growth:.3g} times as long and "
            f"puts {prefixes} characters before it: at most {_LARGEST_GROWTH} and {_LONGEST_PREFIX} are read, because "
            "a page of text would fill the memory. Use another tokenizer."
        )


def _steps(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or decoder and of the sequences in it, in their order."""
    pending = [part]
    while pending:
        step = pending.pop()
        if step["type"] == "Sequence":
            pending.extend(reversed(step.get("normalizers") or step.get("decoders") or []))
        else:
            yield step


def _find_eos(path: Path, engine: Any, requested: str | int | None) -> int:
    # From the loaded tokenizer, not the file: the library renumbers added tokens whose ids leave a gap.
    special = {t.content: int(i) for i, t in engine.get_added_tokens_decoder().items() if t.special}
    if requested is not None:
        if (token_id := _token_id(engine, requested)) is not None:
            return token_id
        raise ConfigError(
            f"end-of-document token {requested!r} is not in {path} (special tokens: {sorted(special)}). Choose one."
        )
    for name in _EOS_NAMES:
        if name in special:
            return special[name]
    if len(special) == 1:
        return next(iter(special.values()))
    raise ConfigError(
        f"tokenizer {path} does not define which token ends a document (special tokens: {sorted(special)}): packed "
        "documents would run into each other. Set eos_token."
    )


def _token_id(engine: Any, token: str | int) -> int | None:
    """The id of a token that is given by its text or id; None if the tokenizer has no such token."""
    if isinstance(token, int):
        return token if 0 <= token < 2**32 and engine.id_to_token(token) is not None else None
    try:
        token_id: int | None = engine.token_to_id(token)
    except (TypeError, UnicodeEncodeError):  # JSON may hold a list, or half a surrogate pair
        return None
    return token_id


def load_tokenizer(spec: str, *, eos_token: str | None = None) -> Tokenizer:
    """`byte`, the path of a tokenizers JSON file, or a folder that holds `tokenizer.json`."""
    if spec == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(spec)
    return _simplest(JsonTokenizer(path / TOKENIZER if path.is_dir() else path, eos_token=eos_token))


def parse_tokenizer(raw: bytes | bytearray, where: Path, *, eos_token: str | int | None = None) -> Tokenizer:
    """The tokenizer in the bytes of a file; `where` is its path, for messages. `eos_token` may be the token's id."""
    return _simplest(JsonTokenizer(where, eos_token=eos_token, text=_decode(raw, where)))


def _simplest(tokenizer: JsonTokenizer) -> Tokenizer:
    """A byte tokenizer that was saved is a byte tokenizer again, with its own fingerprint."""
    return ByteTokenizer() if tokenizer.is_byte_tokenizer else tokenizer


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


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> JsonTokenizer:
    """Train a byte-level BPE (encodes and decodes any text exactly) and save it atomically at `path`."""
    smallest = 256 + 1  # every byte and the end-of-document token
    if vocab_size < smallest:
        raise ConfigError(f"vocab_size is {vocab_size}: a byte-level BPE needs at least {smallest}. Set e.g. 32768.")
    target = Path(path)
    unfinished = temporary_path(target)
    problem, fix = f"tokenizer file {target} cannot be written", "Choose a file in a writable folder."
    with storage_errors(problem, fix=fix):  # check before training, which takes minutes
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
    try:
        engine = _train_bpe(texts, vocab_size)
        with storage_errors(problem, fix=fix):
            unfinished.write_text(engine.to_str(pretty=True), encoding="utf-8")
            replace_file(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return JsonTokenizer(target)


def _train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer=trainer)
    return engine


def check_same(artifact_vocab: int, artifact_fingerprint: str, tokenizer: Tokenizer) -> None:
    """Raise unless the artifact was built with this tokenizer."""
    if artifact_vocab == tokenizer.vocab_size and artifact_fingerprint == tokenizer.fingerprint:
        return
    raise DataError(
        f"the artifact was built with vocabulary {artifact_vocab}, fingerprint {artifact_fingerprint}, but tokenizer "
        f"{tokenizer.name!r} has vocabulary {tokenizer.vocab_size}, fingerprint {tokenizer.fingerprint}: its ids mean "
        "other text. Use the tokenizer it was built with, or build it again."
    )


def start_tokenizer_worker(parent_pid: int) -> None:
    """Call first in a worker process: it uses one thread, and exits when its parent dies, also by SIGKILL.

    The other cores are for the model or the other workers. A thread polls the pid of the parent, which changes when the
    parent is gone.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def exit_with_parent() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=exit_with_parent, name="exit-with-parent", daemon=True).start()
