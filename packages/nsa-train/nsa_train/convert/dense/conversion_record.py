"""conversion.json of a converted folder: what the model was converted from, and how, so that it can be undone."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from nsa.errors import CheckpointError
from nsa_train.convert.folder_files import read_json

CONVERSION = "conversion.json"
_FORMAT = 1
_HASH_DIGITS = 64


@dataclass(frozen=True)
class ConversionRecord:
    architecture: str
    """Architecture of the source, as in its config.json."""
    config: str
    """The source's config.json as it was."""
    dtype: str
    """Type of the source's tensors."""
    tensors: Mapping[str, str]
    """SHA-256 of the values of every tensor of the source, by its name there."""
    files: Mapping[str, str]
    """Other files of the source that were copied: name there → name here."""
    options: Mapping[str, Any]
    """Options of the conversion."""
    version: str
    """Version of nsa-train."""

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=2, sort_keys=True, allow_nan=False)
        (folder / CONVERSION).write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the record of a folder that may come from anyone; raises CheckpointError."""
        where = folder / CONVERSION
        if not where.exists() and not where.is_symlink():
            raise CheckpointError(
                f"{folder} has no {CONVERSION}: it does not say which model it was converted from. Name the converted "
                f"folder that its training started from with --like."
            )
        values = read_json(where)
        expected = {
            "format": int, "architecture": str, "config": str, "dtype": str, "tensors": dict, "files": dict,
            "options": dict, "version": str,
        }  # fmt: skip
        for key in values.keys() | expected.keys():
            if key not in values or type(values[key]) is not expected.get(key):
                raise CheckpointError(f"{where} has {key}={values.get(key)!r:.80}: it is not a record of this version.")
        if values.pop("format") != _FORMAT:
            raise CheckpointError(f"{where} is of another version than {_FORMAT}, which this version reads.")
        if not all(isinstance(value, str) and len(value) == _HASH_DIGITS for value in values["tensors"].values()):
            raise CheckpointError(f"{where} has a tensor without the SHA-256 of its values.")
        if not all(isinstance(name, str) for name in values["files"].values()):
            raise CheckpointError(f"{where} has a copied file without its name.")
        return cls(**values)
