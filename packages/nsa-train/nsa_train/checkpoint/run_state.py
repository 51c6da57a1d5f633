"""state.json: step, data cursor, skipped batches, spike window and settings of a run, as JSON.

It is the same on every rank and independent of the world size. Random states are per rank: the engine keeps them in
`train/rank{N}.pt`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from nsa.errors import CheckpointError
from nsa.files import open_regular, write_atomic
from nsa_train.names import STATE

_FORMAT = 1
LARGEST_JSON_BYTES = 16 << 20
_LARGEST_VOCABULARY = 2**32
"""Ids are stored in at most four bytes."""
VOCAB_SIZE = "vocab_size"
"""Key in `RunRecord.more`: the resolved `model.vocab_size`."""
TOKENIZER_RECORD = "tokenizer"
"""Key in `RunRecord.more`: vocabulary size, fingerprint and end-of-document id of tokenizer.json, if there is one."""


def _fingerprint(config: Mapping[str, Any]) -> str:
    """Hash of a run's settings, independent of their order."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, allow_nan=False).encode()).hexdigest()


@dataclass(frozen=True)
class RunRecord:
    step: int
    world_size: int
    config: Mapping[str, Any]
    """`RunConfig.model_dump(mode="json")`."""
    data_cursor: Mapping[str, Any]
    skipped_batches: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of batches that are never trained on: first and one past last."""
    spike_window: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other values of the trainer, as JSON."""

    def write(self, checkpoint: Path) -> None:
        """Write state.json into a staging folder, on rank 0."""
        values = {"format": _FORMAT, "config_fingerprint": _fingerprint(self.config), **asdict(self)}
        try:
            content = json.dumps(values, indent=1, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{STATE} can hold finite JSON values only: {error}.") from error
        write_atomic(checkpoint / STATE, content + "\n", durable=True)

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read the record of a verified checkpoint, on any rank."""
        path = checkpoint / STATE
        try:
            with open_regular(path) as file:
                raw = file.read(LARGEST_JSON_BYTES + 1)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error
        if len(raw) > LARGEST_JSON_BYTES:
            raise CheckpointError(f"{path} has more than the {LARGEST_JSON_BYTES} bytes that a record may have.")
        return cls.parse(raw, path)

    @classmethod
    def parse(cls, raw: bytes | bytearray, path: Path) -> Self:
        """Read a record from the bytes of a file; `path` is for messages."""
        try:
            values = json.loads(raw)
            version, config_fingerprint = values.pop("format"), values.pop("config_fingerprint")
            values["skipped_batches"] = [(int(first), int(end)) for first, end in values["skipped_batches"]]
            record = cls(**values)
            record._require_types()
            intact = _fingerprint(record.config) == config_fingerprint
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path} is not a record of this version: {error!r:.300}.") from error
        if version != _FORMAT:
            raise CheckpointError(f"{path} has format {version!r:.80}, this version reads {_FORMAT}.")
        if not intact:
            raise CheckpointError(f"{path} holds a config that does not match its own fingerprint.")
        return record

    def _require_types(self) -> None:
        """Raise TypeError for values that `write` never writes: hashes detect damage, not invalid values."""
        for name, least in (("step", 0), ("world_size", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise TypeError(f"{name} is {value!r:.80}")
        for name in ("config", "data_cursor", "spike_window", "more"):
            if not isinstance(getattr(self, name), dict):
                raise TypeError(f"{name} is {getattr(self, name)!r:.80}")
        ids = self.more.get(VOCAB_SIZE, 1)
        if type(ids) is not int or not 0 < ids <= _LARGEST_VOCABULARY:
            raise TypeError(f"{VOCAB_SIZE} is {ids!r:.80}")
