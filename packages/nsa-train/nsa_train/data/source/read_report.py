"""Report of what was read and what was skipped: counts by kind of file, reasons with the first few names.

A task of `nsa data prepare` fills one and stores it in its record; the reports of all tasks are added in the order of
the tasks, so that the total is the same for any number of workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nsa_train.data.source.file import FILE_KINDS

_SHOWN_NAMES = 5

# Why something was not used, in the order of the table. Each counts files, unless it says otherwise.
HIDDEN = "hidden (name starts with a dot)"
UNKNOWN_ENDING = "unknown ending"
FOLDER_LINK = "symbolic link to a folder"
NOT_A_FILE = "not a regular file"
UNREADABLE = "cannot be read"
EMPTY = "empty"
EMPTY_RECORDS = "records without text"
BINARY = "binary content"
BAD_ENCODING = "unknown encoding"
BAD_LINES = "bad JSON lines"
DAMAGED_PARTS = "damaged parts of files"
DUPLICATES = "duplicate documents"
_SKIP_REASONS = (
    UNREADABLE, BINARY, BAD_ENCODING, DAMAGED_PARTS, BAD_LINES, EMPTY, EMPTY_RECORDS, DUPLICATES, UNKNOWN_ENDING,
    HIDDEN, FOLDER_LINK, NOT_A_FILE,
)  # fmt: skip


@dataclass
class NamedCount:
    """A number of files, lines or documents, and the names of the first few."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, names: list[str], count: int) -> None:
        self.count += count
        self.first += names[: _SHOWN_NAMES - len(self.first)]


@dataclass
class _KindCount:
    """Counts of what was read from files of one kind."""

    files: int = 0
    documents: int = 0
    characters: int = 0
    tokens: int = 0


@dataclass
class ReadReport:
    """Counts of what was read, by kind; what was skipped, by reason; text files by encoding, if it is not UTF-8."""

    kinds: dict[str, _KindCount] = field(default_factory=dict)
    skipped: dict[str, NamedCount] = field(default_factory=dict)
    encodings: dict[str, NamedCount] = field(default_factory=dict)

    def kind(self, name: str) -> _KindCount:
        return self.kinds.setdefault(name, _KindCount())

    def count(self, kind: str, characters: int, tokens: int) -> None:
        """Count a document that was written."""
        counted = self.kind(kind)
        counted.documents += 1
        counted.characters += characters
        counted.tokens += tokens

    def skip(self, reason: str, name: str) -> None:
        """Record something that was not used; a name that is not valid Unicode is stored with escapes."""
        self.skipped.setdefault(reason, NamedCount()).add([_storable(name)], 1)

    def decoded(self, encoding: str, name: str) -> None:
        """Record a text file that was not plain UTF-8."""
        self.encodings.setdefault(encoding, NamedCount()).add([_storable(name)], 1)

    def add(self, other: "ReadReport") -> None:
        """Add the report of the next task."""
        for name, counted in other.kinds.items():
            total = self.kind(name)
            for key in ("files", "documents", "characters", "tokens"):
                setattr(total, key, getattr(total, key) + getattr(counted, key))
        for mine, theirs in ((self.skipped, other.skipped), (self.encodings, other.encodings)):
            for key, entry in theirs.items():
                mine.setdefault(key, NamedCount()).add(entry.first, entry.count)

    def total(self) -> _KindCount:
        """All kinds together."""
        whole = ReadReport()
        for counted in self.kinds.values():
            whole.add(ReadReport(kinds={"": counted}))
        return whole.kind("")

    def as_json(self) -> dict[str, Any]:
        """The report as JSON in a fixed order, so that the bytes do not depend on what was read first."""
        return {
            "kinds": {kind: vars(self.kinds[kind]) for kind in FILE_KINDS if kind in self.kinds},
            "skipped": {reason: vars(self.skipped[reason]) for reason in _SKIP_REASONS if reason in self.skipped},
            "encodings": {name: vars(self.encodings[name]) for name in sorted(self.encodings)},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ReadReport":
        return cls(
            {kind: _KindCount(**counted) for kind, counted in content["kinds"].items()},
            {reason: NamedCount(**entry) for reason, entry in content["skipped"].items()},
            {name: NamedCount(**entry) for name, entry in content["encodings"].items()},
        )


def _storable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode("utf-8")
