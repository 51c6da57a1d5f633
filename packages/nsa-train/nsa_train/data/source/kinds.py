"""Kinds of data files (parquet, JSONL, plain text, Markdown, HTML), recognised by the ending of their name."""

from typing import Literal, get_args

FileKind = Literal["parquet", "jsonl", "text", "markdown", "html"]

FILE_KINDS: tuple[FileKind, ...] = get_args(FileKind)
PARQUET_SUFFIX = ".parquet"
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
WHOLE_FILE_KINDS: tuple[FileKind, ...] = ("text", "markdown", "html")
"""Kinds of which one file is one document."""

_SUFFIXES: dict[FileKind, tuple[str, ...]] = {
    "parquet": (PARQUET_SUFFIX,),
    "jsonl": JSONL_SUFFIXES,
    "text": (".txt", ".text"),
    "markdown": (".md", ".markdown"),
    "html": (".html", ".htm", ".xhtml"),
}
SUFFIXES = tuple(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)


def file_kind(name: str) -> FileKind | None:
    """The kind of a file by its name, in upper or lower case; None for an ending that is not read."""
    lowered = name.lower()
    return next((kind for kind, suffixes in _SUFFIXES.items() if lowered.endswith(suffixes)), None)
