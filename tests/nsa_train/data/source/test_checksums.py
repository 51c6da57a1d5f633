"""A unit that changes after its first read is found at the next one, whatever its format can check by itself."""

import contextlib
import json
import random
import shutil
from pathlib import Path

import pytest
import zstandard

from nsa.errors import DataError
from nsa_train.data.document import CorruptUnit, DocumentSource
from nsa_train.data.rows.specs import DirectData
from nsa_train.data.source.resolve import ChecksummedSource, open_source
from tests.nsa_train.data.corpora import make_records, write_parquet

FLIPS = 150
RECORDS = make_records(200, words=60)
FORMATS = ["plain JSONL", "parquet without page checksums", "zstd without frame checksum"]


def write(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    records = RECORDS
    if name.startswith("parquet"):
        path = folder / "a.parquet"
        write_parquet(path, records, rows=50, write_page_checksum=False, compression="none", use_dictionary=False)
        return path
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    if name.startswith("plain"):
        path = folder / "a.jsonl"
        path.write_bytes(lines)
        return path
    path = folder / "a.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor(write_checksum=False).compress(lines))
    return path


def read_all(source: DocumentSource) -> list[object]:
    return [(d.id, d.text) for index in range(len(source)) for d in source.read(index)]


def checked(path: Path, checksums: Path) -> DocumentSource:
    return ChecksummedSource(open_source(str(path)), checksums)


@pytest.mark.parametrize("name", FORMATS)
def test_150_flipped_bits_after_the_first_read_are_all_found_or_harmless(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "src", name)
    good, rng = path.read_bytes(), random.Random(4)
    sources = {"without": open_source(str(path)), "with": checked(path, tmp_path / "sums")}
    wanted = read_all(sources["with"])
    silent = dict.fromkeys(sources, 0)
    for _ in range(FLIPS):
        at = rng.randrange(len(good))
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :])
        for kind, source in sources.items():
            with contextlib.suppress(DataError):
                silent[kind] += read_all(source) != wanted
    assert silent["with"] == 0
    assert silent["without"] > 20, "the flips are found without the checksum file: this test shows nothing"


def test_a_later_epoch_leaves_the_changed_unit_out(tmp_path: Path) -> None:
    path = write(tmp_path / "src", FORMATS[1])
    data = DirectData(str(path), "byte", 64, seed=3, checksum_path=str(tmp_path / "sums"))
    stream = data.open()
    while (batch := stream.next_batch(4)).epoch == 0:
        pass
    content, text = path.read_bytes(), RECORDS[120]["text"].encode()
    path.write_bytes(content.replace(text, text.swapcase()))
    while batch.epoch < 3:
        batch = stream.next_batch(4)
    assert len(stream.state_dict()["documents"]["quarantined"]) == 1


def test_the_error_names_the_unit_and_the_checksum_file(tmp_path: Path) -> None:
    path = write(tmp_path / "src", FORMATS[0])
    read_all(checked(path, tmp_path / "sums"))
    source = checked(path, tmp_path / "sums")
    path.write_bytes(path.read_bytes().replace(b"stone", b"Stone", 1))
    with pytest.raises(CorruptUnit) as caught:
        read_all(source)
    assert str(path) in str(caught.value)
    assert str(tmp_path / "sums") in str(caught.value)


def test_other_files_have_checksums_of_their_own_and_a_copy_shares_them(tmp_path: Path) -> None:
    first = write(tmp_path / "one", FORMATS[1])
    read_all(checked(first, tmp_path / "sums"))
    write_parquet(tmp_path / "two" / "a.parquet", make_records(80, seed=5), rows=50)
    assert read_all(checked(tmp_path / "two", tmp_path / "sums"))
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    read_all(checked(tmp_path / "moved", tmp_path / "sums"))
    assert len(list((tmp_path / "sums").iterdir())) == 2


def test_a_damaged_entry_of_the_checksum_file_condemns_no_good_unit(tmp_path: Path) -> None:
    path = write(tmp_path / "src", FORMATS[1])
    wanted = read_all(checked(path, tmp_path / "sums"))
    (sums,) = (tmp_path / "sums").iterdir()
    good = sums.read_bytes()
    for at in range(0, len(good), 5):
        sums.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        assert read_all(checked(path, tmp_path / "sums")) == wanted
    sums.write_bytes(good[:40])
    assert read_all(checked(path, tmp_path / "sums")) == wanted
    assert sums.read_bytes() == good, "written anew"


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "src", FORMATS[1])
    with pytest.raises(DataError, match=r"a\.parquet/sums"):
        read_all(checked(path, path / "sums"))  # below a file
