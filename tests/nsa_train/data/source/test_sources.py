import contextlib
import gzip
import json
import random
import shutil

import pytest
import zstandard

from nsa.errors import ConfigError, DataError
from nsa_train import shipped
from nsa_train.data.document import CorruptUnit, Document, DocumentColumns
from nsa_train.data.source.http import RetryPolicy
from nsa_train.data.source.jsonl import JsonlSource
from nsa_train.data.source.parquet import ParquetSource, _listing_path
from nsa_train.data.source.resolve import list_local, open_source
from tests.nsa_train.data.corpora import make_records, write_corpus, write_parquet
from tests.nsa_train.data.faulty_server import FaultyServer


def read_all(source):
    return [doc for index in range(len(source)) for doc in source.read(index)]


def as_documents(records):
    return [Document(record["id"], record["text"]) for record in records]


def test_a_folder_a_pattern_and_a_file_list_give_the_same_units(tmp_path):
    write_corpus(tmp_path / "deep")
    folder = open_source(str(tmp_path))
    assert len(folder) == 15
    assert str(folder.unit(6)) == f"{tmp_path}/deep/part-001.parquet, row group 1"
    wanted = [d for i in range(3) for d in as_documents(make_records(100, seed=i))]
    assert read_all(folder) == wanted
    assert read_all(open_source(str(tmp_path / "**" / "*.parquet"))) == wanted
    listed = [str(tmp_path / "deep" / f"part-{i:03d}.parquet") for i in (2, 0, 1)]
    assert read_all(open_source(listed)) == wanted, "the order is ours, not the caller's"


def test_fingerprint_follows_content_and_not_place(tmp_path):
    write_corpus(tmp_path / "here")
    here = open_source(str(tmp_path / "here")).fingerprint
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert open_source(str(tmp_path / "there")).fingerprint == here

    records = make_records(100, seed=0)
    write_parquet(tmp_path / "there" / "part-000.parquet", records, rows=25)
    assert open_source(str(tmp_path / "there")).fingerprint != here, "other row groups, same documents"
    (tmp_path / "here" / "part-002.parquet").rename(tmp_path / "here" / "part-003.parquet")
    assert open_source(str(tmp_path / "here")).fingerprint != here, "another name is another order"


def test_only_text_and_id_are_fetched(tmp_path):
    records = [{**r, "dump": random.Random(i).randbytes(4000).hex()} for i, r in enumerate(make_records(200))]
    write_parquet(tmp_path / "wide.parquet", records, rows=100)
    content = (tmp_path / "wide.parquet").read_bytes()
    with FaultyServer({"/wide.parquet": content}) as server:
        source = open_source(server.url("/wide.parquet"))
        server.ranges.clear()
        assert len(source.read(1)) == 100
        fetched = sum(int(r.split("-")[1]) - int(r[6:].split("-")[0]) + 1 for _, r in server.ranges)
    assert len(server.ranges) == 2, "one request per column"
    assert fetched < len(content) / 20


def flipped(content, at, bit):
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


def test_a_flipped_byte_of_text_is_detected_100_of_100_times(tmp_path):
    path = tmp_path / "p.parquet"
    records = make_records(60)
    write_parquet(path, records, rows=30, compression="none", use_dictionary=False, write_statistics=False)
    good, rng, detected = path.read_bytes(), random.Random(3), 0
    source = open_source(str(path))
    for _ in range(100):
        text = rng.choice(records)["text"].encode()
        path.write_bytes(flipped(good, good.index(text) + rng.randrange(len(text)), rng.randrange(8)))
        with pytest.raises(CorruptUnit):
            read_all(source)
        detected += 1
    assert detected == 100


@pytest.mark.parametrize(
    "options", [{}, {"compression": "snappy"}, {"use_dictionary": False}, {"data_page_version": "2.0"}]
)
def test_a_flipped_byte_anywhere_in_the_pages_never_changes_documents_unseen(tmp_path, options):
    path = tmp_path / "p.parquet"
    records = make_records(60, words=200)
    write_parquet(path, records, rows=30, data_page_size=2**20, write_statistics=False, **options)
    good, rng, detected = path.read_bytes(), random.Random(3), 0
    source = open_source(str(path))
    wanted = read_all(source)
    footer = int.from_bytes(good[-8:-4], "little") + 8
    for _ in range(100):
        path.write_bytes(flipped(good, rng.randrange(4, len(good) - footer), rng.randrange(8)))
        try:
            assert read_all(source) == wanted
        except CorruptUnit:
            detected += 1
    assert detected > 90, "only page headers and the column that is not read may pass, and change nothing"


def test_a_flipped_byte_in_the_footer_never_changes_documents_unseen(tmp_path):
    path = tmp_path / "p.parquet"
    write_parquet(path, make_records(60), rows=30)
    good = path.read_bytes()
    original = open_source(str(path))
    wanted = read_all(original)
    footer = int.from_bytes(good[-8:-4], "little") + 8
    for at in range(len(good) - footer, len(good), 3):
        path.write_bytes(flipped(good, at, at % 8))
        try:
            damaged = open_source(str(path))
            assert damaged.fingerprint != original.fingerprint
            assert read_all(damaged) == wanted
        except DataError:
            pass


def test_corruption_names_file_row_group_and_cause(tmp_path):
    write_corpus(tmp_path, files=1)
    path = tmp_path / "part-000.parquet"
    source = open_source(str(tmp_path))
    content = bytearray(path.read_bytes())
    content[len(content) // 8] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(CorruptUnit) as caught:
        read_all(source)
    assert str(path) in str(caught.value)
    assert "row group 0" in str(caught.value)


def test_a_file_replaced_under_a_running_stream_is_noticed(tmp_path):
    path = tmp_path / "p.parquet"
    write_parquet(path, make_records(40, seed=1), rows=20)
    source = open_source(str(path))
    source._footers.clear()  # as if many other files had been read since
    write_parquet(path, make_records(40, seed=2), rows=20)
    with pytest.raises(CorruptUnit):
        source.read(0)


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-1000], lambda b: b[:-8] + (2**31).to_bytes(4, "little") + b"PAR1", lambda b: b""],
    ids=["truncated", "footer longer than the file", "empty"],
)
def test_a_file_without_a_footer_stops_the_listing_by_name(tmp_path, damage):
    write_corpus(tmp_path)
    path = tmp_path / "part-001.parquet"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=str(path)):
        open_source(str(tmp_path))


def test_columns_can_be_named_and_missing_ones_are_said(tmp_path):
    records = [{"content": r["text"], "key": i} for i, r in enumerate(make_records(30))]
    write_parquet(tmp_path / "p.parquet", records)
    with pytest.raises(DataError, match="'text'"):
        open_source(str(tmp_path))
    named = read_all(open_source(str(tmp_path), columns=DocumentColumns(text="content", id="key")))
    assert [d.id for d in named] == [str(i) for i in range(30)]
    unnamed = read_all(open_source(str(tmp_path), columns=DocumentColumns(text="content", id=None)))
    assert len({d.id for d in unnamed}) == 30
    assert unnamed == read_all(open_source(str(tmp_path), columns=DocumentColumns(text="content", id=None)))


def test_ids_are_made_from_the_text_unless_a_column_was_named(tmp_path):
    records = make_records(30)
    write_parquet(tmp_path / "p.parquet", [{"text": record["text"]} for record in records])
    write_parquet(tmp_path / "q.parquet", make_records(10, seed=1))
    source = open_source(str(tmp_path))
    documents = read_all(source)
    assert [d.text for d in documents[:30]] == [record["text"] for record in records]
    assert all(d.id.startswith("blake2b:") for d in documents[:30])
    assert [d.id for d in documents[30:]] == [record["id"] for record in make_records(10, seed=1)]
    with pytest.raises(DataError, match="'key'"):
        open_source(str(tmp_path), columns=DocumentColumns(id="key"))


def test_too_large_a_unit_is_refused_before_it_is_read(tmp_path):
    write_corpus(tmp_path, files=1)
    source = ParquetSource(list_local(str(tmp_path)).files, RetryPolicy(), max_unit_bytes=100)
    with pytest.raises(DataError, match="max_unit_bytes=100"):
        source.read(0)


# JSON lines


def jsonl_bytes(records, newline_at_end=True):
    text = "\n".join(json.dumps(r, ensure_ascii=False) for r in records)
    return (text + "\n" * newline_at_end).encode()


@pytest.mark.parametrize("block_bytes", [1, 7, 100, 1000, 10**6])
@pytest.mark.parametrize("newline_at_end", [True, False])
def test_every_line_is_in_exactly_one_block(tmp_path, block_bytes, newline_at_end):
    records = make_records(25, words=4)
    (tmp_path / "a.jsonl").write_bytes(jsonl_bytes(records, newline_at_end))
    source = JsonlSource(list_local(str(tmp_path)).files, block_bytes=block_bytes)
    assert read_all(source) == as_documents(records)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_lines_are_read_and_damage_is_detected(tmp_path, suffix):
    records = make_records(300)
    content = jsonl_bytes(records)
    halves = (content[: len(content) // 2], content[len(content) // 2 :])  # two members or frames in one file
    packers = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}
    packed = b"".join(packers[suffix](half) for half in halves)
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(packed)
    source = open_source(str(tmp_path))
    assert read_all(source) == as_documents(records)

    path.write_bytes(packed[:-3])
    with pytest.raises(CorruptUnit, match=str(path)):
        source.read(0)
    rng = random.Random(5)
    for _ in range(100):
        at = rng.randrange(len(packed))
        path.write_bytes(flipped(packed, at, rng.randrange(8)))
        with contextlib.suppress(CorruptUnit):
            # A gzip header holds a time stamp and the like, which no text hangs on.
            assert read_all(source) == as_documents(records)


@pytest.mark.parametrize("line", ['{"text": "cut', '{"body": "x"}', '["text"]', '{"text": 3}', "\x00\x00"])
def test_a_bad_line_condemns_its_block_only(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(jsonl_bytes(make_records(3)))
    (tmp_path / "b.jsonl").write_bytes(jsonl_bytes(make_records(3)) + line.encode() + b"\n")
    source = open_source(str(tmp_path))
    assert len(source.read(0)) == 3
    with pytest.raises(CorruptUnit, match=r"b\.jsonl"):
        source.read(1)


def test_half_a_surrogate_pair_becomes_text_that_can_be_written(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": "x", "text": "a\\ud800b \\ud83d\\ude42"}\n')
    text = read_all(open_source(str(tmp_path)))[0].text
    assert text.encode().decode() == text
    assert text.endswith("b 🙂")


@pytest.mark.parametrize("names", [[], ["a.pdf", ".hidden.txt"]])
def test_folders_without_a_file_to_read_are_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError):
        open_source(str(tmp_path))


# the hub


def hub_files(content):
    card = (
        "---\nlicense: odc-by\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/*/*\n"
        "- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n# card\n"
    )
    tree = ["data/CC-1/a.parquet", "data/CC-2/b.parquet", "sample/10BT/0.parquet", "README.md"]
    api, resolve = "/api/datasets/owner/set", "/datasets/owner/set/resolve/c0ffee"
    entries = [{"type": "file", "path": path, "size": 1} for path in tree]
    return {
        f"{api}/revision/main": {"sha": "c0ffee"},
        f"{api}/tree/c0ffee?recursive=true": [{"type": "directory", "path": "data"}, *entries[:2]],
        f"{api}/tree/c0ffee?page=2": entries[2:],
        f"{resolve}/README.md": card.encode(),
        **{f"{resolve}/{path}": f"/store/{path}?signed=1" for path in tree[:3]},
        **{f"/store/{path}": data for path, data in zip(tree[:3], content, strict=True)},
    }


def test_a_dataset_id_reads_the_files_its_card_names(tmp_path):
    for i in range(3):
        write_parquet(tmp_path / f"{i}.parquet", make_records(20, seed=i))
    content = [(tmp_path / f"{i}.parquet").read_bytes() for i in range(3)]
    links = {"/api/datasets/owner/set/tree/c0ffee?recursive=true": "/api/datasets/owner/set/tree/c0ffee?page=2"}
    with FaultyServer(hub_files(content), page_links=links) as server:
        endpoint = server.url("")
        whole = open_source("owner/set", hub_endpoint=endpoint)
        assert read_all(whole) == as_documents(make_records(20, seed=0) + make_records(20, seed=1))
        sample = open_source("owner/set:sample-10BT@main", hub_endpoint=endpoint)
        assert read_all(sample) == as_documents(make_records(20, seed=2))
        assert "c0ffee" in str(sample.unit(0)), "pinned to a commit"
        with pytest.raises(DataError, match=r"'huge'.*'default', 'sample-10BT'"):
            open_source("owner/set:huge", hub_endpoint=endpoint)
        with pytest.raises(DataError, match="404"):
            open_source("owner/other", hub_endpoint=endpoint)


def test_the_listing_of_a_dataset_is_kept_between_starts(tmp_path):
    for i in range(3):
        write_parquet(tmp_path / f"{i}.parquet", make_records(20, seed=i))
    content = [(tmp_path / f"{i}.parquet").read_bytes() for i in range(3)]
    with FaultyServer(hub_files(content)) as server:
        options = {"hub_endpoint": server.url(""), "cache_dir": tmp_path / "cache"}
        first = open_source("owner/set", **options)
        server.ranges.clear()
        second = open_source("owner/set", **options)
        assert not [asked for _, asked in server.ranges if asked], "no footer was fetched"
        assert second.fingerprint == first.fingerprint
        assert read_all(second) == read_all(first)

        (listing,) = (tmp_path / "cache").iterdir()
        listing.write_text(listing.read_text().replace('"row_groups": 1', '"row_groups": 2'))
        assert open_source("owner/set", **options).fingerprint == first.fingerprint, "a changed cache is not believed"
        listing.write_text("{")
        assert len(open_source("owner/set", **options)) == len(first)


def test_the_shipped_corpus_has_a_name_that_a_folder_of_the_user_replaces(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_source("debian_docs").fingerprint == open_source(str(shipped.CORPUS)).fingerprint
    write_corpus(tmp_path / "debian_docs")
    assert open_source("debian_docs").fingerprint == open_source(str(tmp_path / "debian_docs")).fingerprint


def test_fingerprints_and_cache_names_never_change(tmp_path):
    """Saved data cursors, checksum files and listing caches carry them: values computed by an earlier version."""
    fixture = str(shipped.CORPUS)
    (tmp_path / "a.jsonl").write_text('{"id": "1", "text": "one"}\n{"id": "2", "text": "two"}\n')
    assert open_source(fixture).fingerprint == "fec5974ae3501fe5e1c0280d1cb9371d07c97ea906942b8f5a898d59b5fee43b"
    assert open_source(fixture, columns=DocumentColumns("text", None)).fingerprint == (
        "57dd7a64cee4677367887a7fb1e682891e2c38140987fb1dec2e6b1c75f4a49c"
    )
    assert open_source(str(tmp_path)).fingerprint == "5214c554838496d9c59e2989193dc62e73de4ea182176787b778d4b8546233d6"
    assert open_source(str(tmp_path), columns=DocumentColumns("id", None)).fingerprint == (
        "9db23c1140b04b551062d960db0f69db98473adc4b1edd9061487b62861d79c8"
    )
    listing = _listing_path(tmp_path, ["a", "b"], DocumentColumns())
    assert listing.name == "listing-d42a85ddaa7375e2a1e68532a55f7514.json"
