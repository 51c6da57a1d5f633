import gzip
import hashlib
import json

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from nsa.errors import ConfigError
from nsa_train import shipped
from nsa_train.cli.main import app
from nsa_train.data.demo.build import ROWS_PER_FILE, Deduplicator, build_demo, is_good_english, write_files
from nsa_train.data.demo.extract import extract_texts, man_text, page_text, pod_text
from nsa_train.data.demo.packages import PACKAGES, _version_key
from nsa_train.data.document_stream import DocumentStream
from nsa_train.data.source import CorruptUnit, open_source
from nsa_train.data.tokenizer import ByteTokenizer, load_tokenizer

FIXTURE = shipped.CORPUS
COLUMNS = ["text", "id", "dump", "url", "file_path", "language", "language_score", "token_count", "score", "int_score"]


def test_html_keeps_what_is_read_and_drops_what_is_clicked():
    html = """<html><head><title>x</title><style>p{}</style></head><body><nav>menu</nav>
    <div class="sphinxsidebar">aside<p>still</p></div><h1>Sets &amp; maps<a class="headerlink">¶</a></h1>
    <p>A set is <em>unordered</em>;
    it has no  index.<br>So it is.</p><pre>x = 1
    y = 2</pre><script>var a = "<p>no</p>";</script><p>Unclosed <b>end</body></html>"""
    text = page_text(html)
    assert "Sets & maps\n\nA set is unordered; it has no index.\nSo it is." in text
    assert "x = 1\n    y = 2" in text
    assert text.endswith("Unclosed end")
    assert not any(word in text for word in ("menu", "aside", "still", "var a", "¶", "p{}"))


def test_man_pages_become_paragraphs():
    roff = '.\\" comment\n.TH OPEN 2\n.SH NAME\nopen \\- open a file\n.SH DESCRIPTION\nThe\n.BR open ()\ncall opens\n'
    roff += '.IR pathname .\n.PP\nIt is\n.B not\nslow, \\fIreally\\fP.\n.BI "int open(const char *" path ");"\n'
    text = man_text(roff)
    assert "The open() call opens pathname." in text
    assert "It is not slow, really. int open(const char *path);" in text
    assert "comment" not in text


def test_pod_becomes_paragraphs():
    pod = "code\n\n=head1 NAME\n\nperlx - B<bold> and C<< a < b >>\nL<text|perlfunc>\n\n=begin html\n\n<p>\n\n"
    pod += "=end html\n\nDone E<gt> X<i>.\n\n=cut\n\ncode"
    assert pod_text(pod) == "NAME\n\nperlx - bold and a < b text\n\nDone > ."


def test_a_dictionary_is_read_by_its_index(tmp_path):
    folder = tmp_path / "usr" / "share" / "dictd"
    folder.mkdir(parents=True)
    entries = ["abacus\n   a frame\n   with beads\n", "byte\n   eight bits\n"]
    (folder / "d.dict.dz").write_bytes(gzip.compress("".join(entries).encode()))
    (folder / "d.index").write_text("abacus\tA\tg\nbyte\tg\tT\nbytes\tg\tT\n")  # base 64: g is 32
    texts = dict(extract_texts(tmp_path, "usr/share"))
    assert list(texts.values()) == ["abacus a frame with beads", "byte eight bits"]


ENGLISH = "The reader of this page should know that it is only a test of the rules which we use to keep good text. " * 4


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (ENGLISH, True),
        ("The reader of this page should know.", False),
        ("Der Leser dieser Seite sollte wissen, dass es nur eine Probe ist, nach der wir Texte behalten. " * 5, False),
        (ENGLISH + "0x1f; {} == [] && 12 | 55 " * 20, False),
        ("word " * 200, False),
        ("", False),
    ],
)
def test_the_rules_keep_english_prose(text, good):
    assert is_good_english(text) is good


def test_a_repeated_paragraph_is_kept_once_and_short_ones_always():
    deduplicator = Deduplicator()
    assert deduplicator.remove_repeated(f"Title\n\n{ENGLISH}") == f"Title\n\n{ENGLISH}"
    assert deduplicator.remove_repeated(f"Title\n\n{ENGLISH.upper()}\n\nNew") == "Title\n\nNew"


def test_packages_are_found_by_the_newest_name():
    names = ["python3.9-doc", "python3.11-doc", "python3.10-doc"]
    assert max(names, key=_version_key) == "python3.11-doc"
    assert len({p.pattern for p in PACKAGES}) == len(PACKAGES)


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "old").write_text("x")
    with pytest.raises(ConfigError):
        build_demo(tmp_path)


def test_written_files_have_the_shape_of_fineweb_edu(tmp_path):
    rows = pq.read_table(FIXTURE).to_pylist()[:30]
    records = [{**rows[i % 30], "id": f"id-{i}"} for i in range(ROWS_PER_FILE + 1200)]
    for folder in ("a", "b"):
        assert write_files(tmp_path / folder, records) == 2
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == ["000_00002.parquet", "001_00002.parquet"]
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names)
    metadata = pq.read_metadata(tmp_path / "a" / names[1])
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [1000, 200]
    assert metadata.schema.to_arrow_schema().names == COLUMNS
    assert {d.id for i in range(7) for d in open_source(str(tmp_path / "a")).read(i)} == {r["id"] for r in records}


def test_the_shipped_text_is_real_small_clean_and_checked():
    assert FIXTURE.stat().st_size < 5_000_000
    assert pq.read_schema(FIXTURE).names == COLUMNS
    source = open_source(str(FIXTURE))
    documents = [d for i in range(len(source)) for d in source.read(i)]
    assert len(documents) == len({d.id for d in documents}) == 729
    assert sum(len(d.text.encode()) for d in documents) > 5_000_000
    assert all(is_good_english(d.text) for d in documents)
    stream = DocumentStream(source, ByteTokenizer(), seed=0, at_end="stop")
    assert sum(1 for _ in stream) == 729


def test_the_shipped_text_carries_page_checksums(tmp_path):
    content = bytearray(FIXTURE.read_bytes())
    content[20_000] ^= 1
    (tmp_path / "flipped.parquet").write_bytes(content)
    source = open_source(str(tmp_path))
    with pytest.raises(CorruptUnit, match=r"row group 0 is corrupt.*CRC"):
        source.read(0)


def test_the_command_trains_a_tokenizer(tmp_path):
    path = tmp_path / "bpe.json"
    command = ["data", "tokenizer", "train", str(FIXTURE), str(path), "--vocab-size", "600", "--mb", "0.3"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.fingerprint in result.output
    assert tokenizer.vocab_size == 600
    text = "The reader of this page"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text) / 1.5


@pytest.mark.nightly
def test_the_command_builds_a_corpus_from_packages_twice_the_same(tmp_path):
    """Needs apt and a package archive."""
    digests = []
    for name in ("one", "two"):
        result = CliRunner().invoke(app, ["data", "demo", str(tmp_path / name), "--mb", "2"])
        assert result.exit_code == 0, result.output
        files = sorted((tmp_path / name).iterdir())
        digests.append([(f.name, hashlib.sha256(f.read_bytes()).hexdigest()) for f in files])
    assert digests[0] == digests[1]
    sources = json.loads((tmp_path / "one" / "SOURCES.json").read_text())
    assert 2_000_000 <= sum(p["text_bytes"] for p in sources["packages"]) < 2_500_000
    assert len(sources["packages"]) >= 2
    source = open_source(str(tmp_path / "one"))
    assert all(is_good_english(d.text) for i in range(len(source)) for d in source.read(i))
