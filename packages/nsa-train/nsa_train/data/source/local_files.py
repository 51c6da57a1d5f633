"""Lists the data files of a local folder, file or glob pattern, in a fixed order, with what was left out and why."""

import glob
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nsa.errors import ConfigError
from nsa_train.data.source.file import LocalFile
from nsa_train.data.source.kinds import SUFFIXES, WHOLE_FILE_KINDS, FileKind, file_kind
from nsa_train.data.source.read_report import FOLDER_LINK, HIDDEN, NOT_A_FILE, UNKNOWN_ENDING, UNREADABLE, ReadReport


@dataclass(frozen=True)
class LocalListing:
    """The files of a source, sorted by name; names are relative to the root."""

    files: list[LocalFile]
    left_out: ReadReport

    def of_kind(self, *kinds: FileKind) -> list[LocalFile]:
        return [file for file in self.files if file_kind(file.name) in kinds]


def list_local(spec: str, *, exclude: Path | None = None) -> LocalListing:
    """Files of a folder with its subfolders, of a pattern, or one file. Raises if there is none.

    In a folder, hidden files and folders, other endings and links to folders are left out, and the folder `exclude`
    (the output of a preparation) is not looked into. A file or pattern that names another ending is refused.
    """
    path, left_out = Path(spec), ReadReport()
    root = local_root(spec)
    if path.is_dir():
        paths = list(_walk(path, exclude.resolve() if exclude is not None else None, left_out))
    else:
        paths = [path] if path.is_file() else [Path(p) for p in glob.glob(spec, recursive=True)]
        _refuse_other_endings(spec, paths)
    if not paths:
        raise ConfigError(f"data source {spec!r} {_why_nothing(path, left_out)}")
    files = [LocalFile(p.relative_to(root).as_posix(), p) for p in paths]
    return LocalListing(sorted(files, key=lambda file: file.name), left_out)


def local_root(spec: str) -> Path:
    """The folder that the names of a source's files are relative to."""
    path = Path(spec)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    parts: list[str] = []
    for part in path.parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts)


def _walk(folder: Path, exclude: Path | None, left_out: ReadReport) -> Iterator[Path]:
    """Links to folders are not followed, so that a loop of them does no harm."""
    pending = [folder]
    while pending:
        here = pending.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            left_out.skip(UNREADABLE, f"{here.relative_to(folder).as_posix()}/ ({error.strerror})")
            continue
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                if exclude is None or path.resolve() != exclude:
                    pending.append(path)
            elif (reason := _why_left_out(entry, path)) is not None:
                left_out.skip(reason, path.relative_to(folder).as_posix())
            else:
                yield path


def _why_left_out(entry: os.DirEntry[str], path: Path) -> str | None:
    if entry.name.startswith("."):
        return HIDDEN
    kind = file_kind(entry.name)
    try:
        mode = entry.stat().st_mode
    except OSError:  # a link to nothing, or to itself
        return NOT_A_FILE
    if stat.S_ISDIR(mode):
        return FOLDER_LINK
    if not stat.S_ISREG(mode):
        return NOT_A_FILE
    if kind is None:
        return UNKNOWN_ENDING
    # A parquet or JSONL file that cannot be read is an error: it may be most of the data.
    return UNREADABLE if kind in WHOLE_FILE_KINDS and not os.access(path, os.R_OK) else None


def _refuse_other_endings(spec: str, paths: list[Path]) -> None:
    if other := [str(path) for path in paths if file_kind(path.name) is None]:
        raise ConfigError(
            f"data source {spec!r} matches {other[:3]}: files must end in {', '.join(SUFFIXES)}. Rename the file, or "
            "choose another pattern."
        )


def _why_nothing(path: Path, left_out: ReadReport) -> str:
    endings = f"files must end in {', '.join(SUFFIXES)}"
    if not path.is_dir():
        return f"matches no file: {endings}. Check the path; a hub dataset id is written as owner/name."
    reasons = [f"{entry.count} {reason}, e.g. {entry.first[0]!r}" for reason, entry in left_out.skipped.items()]
    return f"has no file to read ({'; '.join(reasons) or 'it is empty'}): {endings}. Check the path."
