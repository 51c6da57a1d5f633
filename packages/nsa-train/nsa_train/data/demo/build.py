"""Builds the demo corpus: downloads packages, filters and deduplicates text, writes parquet like FineWeb-Edu."""

import hashlib
import json
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa.errors import ConfigError
from nsa.files import replace_file, storage_errors, temporary_path
from nsa_train.data.demo.extract import extract_texts
from nsa_train.data.demo.packages import PACKAGES, DocPackage, UnpackedPackage, download, resolve
from nsa_train.data.permutation import seeded_permutation

ROWS_PER_GROUP = 1000  # as in FineWeb-Edu
ROWS_PER_FILE = 5 * ROWS_PER_GROUP
SOURCES_FILE = "SOURCES.json"
_SHUFFLE_SEED = 20
_NAMESPACE = uuid.UUID("6d0f3f0e-52f1-5c3e-9a3f-0d6a3f1f7c55")

Record = dict[str, str | float | int]
Progress = Callable[[str, int, int], None]
"""Called with the current activity, bytes of text so far, and bytes requested (0: all)."""


MIN_WORDS = 50
MIN_LETTER_SHARE = 0.70
MIN_STOP_WORD_SHARE = 0.15
_STOP_WORD_LIST = """
a about after all also an and any are as at be been but by can do each for from has have how if in into is it its may
more most must no not of on one only or other out same should so some such than that the their them then there these
they this those to two up use used was we were what when where which while who will with would you your
"""
_STOP_WORDS = frozenset(_STOP_WORD_LIST.split())
# Headings and one-line entries may repeat; a repeated paragraph of this length is boilerplate.
_MIN_PARAGRAPH_CHARS = 60


def stop_word_share(words: list[str]) -> float:
    return sum(word in _STOP_WORDS for word in words) / max(1, len(words))


def is_good_english(text: str) -> bool:
    words = re.findall(r"[a-z']+", text.lower())
    if len(words) < MIN_WORDS or stop_word_share(words) < MIN_STOP_WORD_SHARE:
        return False
    neither_letter_nor_space = re.sub(r"[^\W\d_]+|\s+", "", text)
    return len(neither_letter_nor_space) <= (1 - MIN_LETTER_SHARE) * len(text)


class Deduplicator:
    """Removes paragraphs that occurred in an earlier document, by hash."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def remove_repeated(self, text: str) -> str:
        """The text without paragraphs seen before."""
        kept = []
        for paragraph in text.split("\n\n"):
            if len(paragraph) >= _MIN_PARAGRAPH_CHARS:
                words = " ".join(paragraph.lower().split())
                key = hashlib.blake2b(words.encode(), digest_size=12).digest()
                if key in self._seen:
                    continue
                self._seen.add(key)
            kept.append(paragraph)
        return "\n\n".join(kept)


@dataclass(frozen=True, slots=True)
class DemoCorpus:
    documents: int
    text_bytes: int
    files: int
    packages: list[dict[str, str | int]]


def build_demo(
    folder: Path, *, megabytes: float = 0, packages: Sequence[DocPackage] = PACKAGES, progress: Progress | None = None
) -> DemoCorpus:
    """Build the corpus in `folder`; the same package versions give the same bytes. `megabytes` of text, 0 for all."""
    problem, fix = f"the demo corpus cannot be written to {folder}", "Choose a new folder in a writable place."
    with storage_errors(problem, fix=fix):  # before the downloads
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: a corpus is written to a new folder. Choose another one.")
        probe = folder / f".{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
    report = progress or (lambda what, done, requested: None)
    requested = int(megabytes * 1e6)
    records: list[Record] = []
    sources: list[dict[str, str | int]] = []
    deduplicator, done = Deduplicator(), 0
    for name, package in resolve(packages):
        if requested and done >= requested:
            break
        report(f"downloading {name}", done, requested)
        with tempfile.TemporaryDirectory(prefix="nsa-demo-") as scratch:
            unpacked = download(name, package, Path(scratch))
            report(f"reading {name}", done, requested)
            before, first = done, len(records)
            for record in clean_records(unpacked, deduplicator):
                records.append(record)
                done += len(str(record["text"]).encode())
                report(f"reading {name}", done, requested)
                if requested and done >= requested:
                    break
        sources.append(
            {
                "package": name,
                "version": unpacked.version,
                "licence": unpacked.licence,
                "documents": len(records) - first,
                "text_bytes": done - before,
            }
        )
    report("writing parquet", done, requested)
    with storage_errors(problem, fix=fix):
        files = write_files(folder, records)
        (folder / SOURCES_FILE).write_text(json.dumps({"packages": sources, "columns": _COLUMN_NOTES}, indent=1) + "\n")
    return DemoCorpus(len(records), done, files, sources)


_COLUMN_NOTES = {
    "language_score": "share of English stop words, not a classifier's score",
    "token_count": "words, not tokens of any tokenizer",
    "score, int_score": "0: the educational score of FineWeb-Edu was not computed",
}


def clean_records(unpacked: UnpackedPackage, deduplicator: Deduplicator) -> Iterator[Record]:
    for path, text in extract_texts(unpacked.root, unpacked.below):
        if not is_good_english(text):
            continue
        text = deduplicator.remove_repeated(text)
        if not is_good_english(text):
            continue
        words = re.findall(r"[a-z']+", text.lower())
        yield {
            "text": text,
            # From the path without the version: a document stays in its split when the package is updated.
            "id": f"<urn:uuid:{uuid.uuid5(_NAMESPACE, f'{unpacked.name}/{path}')}>",
            "dump": f"{unpacked.name}_{unpacked.version}",
            "url": f"deb:{unpacked.name}/{path}",
            "file_path": path,
            "language": "en",
            "language_score": round(stop_word_share(words), 4),
            "token_count": len(words),
            "score": 0.0,
            "int_score": 0,
        }


def write_files(folder: Path, records: Sequence[Record]) -> int:
    """Write shuffled records, so that a row group holds documents of many packages; each file atomically."""
    order = seeded_permutation(len(records), _SHUFFLE_SEED)
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(records), ROWS_PER_FILE)
    for number, start in enumerate(starts):
        chosen = [records[i] for i in order[start : start + ROWS_PER_FILE]]
        write_parquet(folder / f"{number:03d}_{len(starts):05d}.parquet", chosen)
    return len(starts)


def write_parquet(path: Path, records: Iterable[Record], *, rows_per_group: int = ROWS_PER_GROUP) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, number, real = pa.string(), pa.int64(), pa.float64()
    schema = pa.schema(
        [(name, text) for name in ("text", "id", "dump", "url", "file_path", "language")]
        + [("language_score", real), ("token_count", number), ("score", real), ("int_score", number)]
    )
    unfinished = temporary_path(path)
    pq.write_table(
        pa.Table.from_pylist(list(records), schema=schema),
        unfinished,
        row_group_size=rows_per_group,
        compression="zstd",
        compression_level=9,
        write_page_checksum=True,
    )
    replace_file(unfinished, path)
