"""Folders of text, Markdown, HTML, JSONL and parquet: which files are read, in which order, as which documents."""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.errors import ConfigError, DataError
from nsa_train.data.document import CorruptUnit, DocumentColumns
from nsa_train.data.document_stream import DocumentStream
from nsa_train.data.source.read_report import (
    _SHOWN_NAMES,
    FOLDER_LINK,
    HIDDEN,
    NOT_A_FILE,
    UNKNOWN_ENDING,
    UNREADABLE,
    ReadReport,
)
from nsa_train.data.source.resolve import list_local, open_source
from nsa_train.data.source.text import TextFileSource, html_text
from nsa_train.data.tokenizer import ByteTokenizer
from tests.nsa_train.data.corpora import make_records, write_parquet

ROOT = Path(__file__).parents[4]


def write(path: Path, content: str | bytes = "some text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read_all(source):
    return [doc for index in range(len(source)) for doc in source.read(index)]


def mixed_folder(folder: Path) -> Path:
    for name in ("b.md", "a.TXT", "deep/er/c.txt", "page.html"):
        write(folder / name, f"text of {name}")
    write(folder / "lines.jsonl", "\n".join(json.dumps(r) for r in make_records(3)))
    write(folder / "packed.jsonl.gz", gzip.compress(json.dumps({"text": "packed"}).encode()))
    write_parquet(folder / "table.parquet", make_records(4, seed=1))
    return folder


def test_all_kinds_of_a_folder_are_read_in_a_fixed_order(tmp_path):
    source = open_source(str(mixed_folder(tmp_path)))
    documents = read_all(source)
    assert [d.id for d in documents[-4:]] == ["a.TXT", "b.md", "deep/er/c.txt", "page.html"]
    assert [d.text for d in documents[-4:-1]] == ["text of a.TXT", "text of b.md", "text of deep/er/c.txt"]
    assert len(documents) == 4 + 3 + 1 + 4
    assert [source.unit(i).index for i in range(len(source))] == list(range(len(source)))


def test_the_direct_stream_reads_them_too(tmp_path):
    source = open_source(str(mixed_folder(tmp_path)))
    stream = DocumentStream(source, ByteTokenizer(), seed=1, at_end="stop")
    assert sorted(doc.doc_id for doc in stream) == sorted(doc.id for doc in read_all(source))


def test_the_fingerprint_follows_content_names_and_settings(tmp_path):
    write(tmp_path / "here/a.txt"), write(tmp_path / "there/a.txt"), write(tmp_path / "other/b.txt")
    here = open_source(str(tmp_path / "here")).fingerprint
    assert open_source(str(tmp_path / "there")).fingerprint == here
    assert open_source(str(tmp_path / "other")).fingerprint != here
    assert TextFileSource(list_local(str(tmp_path / "here")).files, fallback_encoding="cp1251").fingerprint != here
    write(tmp_path / "there/a.txt", "some texT")
    assert open_source(str(tmp_path / "there")).fingerprint != here


def test_a_kind_that_came_later_can_be_left_out_by_a_pattern(tmp_path):
    """A run that streamed a folder of parquet files beside a README goes on with this pattern."""
    write_parquet(tmp_path / "deep/table.parquet", make_records(4))
    alone = open_source(str(tmp_path)).fingerprint
    write(tmp_path / "README.md")
    assert open_source(str(tmp_path)).fingerprint != alone
    assert open_source(str(tmp_path / "**" / "*.parquet")).fingerprint == alone


def test_what_is_left_out_is_reported_with_its_reason(tmp_path):
    write(tmp_path / "a.txt")
    for name in (".hidden.txt", ".git/b.txt", "paper.pdf", "sub/.cache/x.md"):
        write(tmp_path / name)
    (tmp_path / "sub/loop").symlink_to("..")
    (tmp_path / "sub/self.txt").symlink_to("self.txt")
    (tmp_path / "gone.txt").symlink_to("nowhere")
    (tmp_path / "linked.txt").symlink_to("a.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    listing = list_local(str(tmp_path))
    assert [file.name for file in listing.files] == ["a.txt", "linked.txt"]
    names_by_reason = {reason: sorted(of.first) for reason, of in listing.left_out.skipped.items()}
    assert names_by_reason == {
        HIDDEN: [".git", ".hidden.txt", "sub/.cache"],
        UNKNOWN_ENDING: ["paper.pdf"],
        FOLDER_LINK: ["sub/loop"],
        NOT_A_FILE: ["gone.txt", "pipe.txt", "sub/self.txt"],
    }


def test_an_output_inside_the_source_is_not_looked_into(tmp_path):
    write(tmp_path / "a.txt"), write(tmp_path / "out/log.txt")
    assert [f.name for f in list_local(str(tmp_path), exclude=tmp_path / "out").files] == ["a.txt"]
    assert len(list_local(str(tmp_path)).files) == 2


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_unreadable_text_files_and_folders_are_left_out():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        write(root / "a.txt"), write(root / "secret.txt").chmod(0), write(root / "folder/b.txt")
        (root / "folder").chmod(0)
        program = (
            "import os, sys\nfrom nsa_train.data.source.resolve import list_local\n"
            "os.setgid(65534); os.setuid(65534)\nlisting = list_local(sys.argv[1])\n"
            "print([f.name for f in listing.files], sorted(listing.left_out.skipped[sys.argv[2]].first))"
        )
        command = [sys.executable, "-c", program, folder, UNREADABLE]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "['a.txt'] ['folder/ (Permission denied)', 'secret.txt']"


@pytest.mark.parametrize("name", [b"with space.txt", b"new\nline.txt", b"\xff\xfe not utf-8.txt", "ü☃.txt".encode()])
def test_any_file_name_is_read_and_gives_an_id_that_can_be_stored(tmp_path, name):
    with open(os.fsencode(tmp_path) + b"/" + name, "w") as file:
        file.write("content")
    (document,) = read_all(open_source(str(tmp_path)))
    assert document.text == "content"
    assert document.id.encode("utf-8")


def test_lines_end_in_a_newline_and_nothing_else_is_changed(tmp_path):
    write(tmp_path / "a.txt", b"\xef\xbb\xbf  one\r\ntwo\rthree\n\n\tfour  ")
    assert read_all(open_source(str(tmp_path)))[0].text == "  one\ntwo\nthree\n\n\tfour  "


@pytest.mark.parametrize("content", ["", " \n\t\r\n", "\ufeff"])
def test_files_without_words_are_empty_documents(tmp_path, content):
    write(tmp_path / "a.txt", content)
    assert [d.text for d in read_all(open_source(str(tmp_path)))] == [""]


def test_binary_text_files_are_corrupt_units_of_a_stream(tmp_path):
    write(tmp_path / "a.txt", b"\x00\x01\x02" * 100)
    with pytest.raises(CorruptUnit, match=r"a\.txt"):
        open_source(str(tmp_path)).read(0)


def test_a_huge_line_is_one_document_and_a_larger_file_is_refused(tmp_path):
    write(tmp_path / "a.txt", "word " * 2_000_000)
    assert len(read_all(open_source(str(tmp_path)))[0].text) == 10_000_000
    with pytest.raises(DataError, match=r"a\.txt"):
        TextFileSource(list_local(str(tmp_path)).files, max_file_bytes=1000)


def test_ids_can_come_from_the_text(tmp_path):
    write(tmp_path / "a.txt", "same"), write(tmp_path / "b.txt", "same")
    ids = {d.id for d in read_all(open_source(str(tmp_path), columns=DocumentColumns(id=None)))}
    assert len(ids) == 1
    assert "a.txt" not in ids


@pytest.mark.parametrize("names", [[], ["a.pdf"], [".a.txt"]])
def test_a_folder_with_nothing_to_read_says_what_is_in_it(tmp_path, names):
    for name in names:
        write(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        list_local(str(tmp_path))
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize("spec", ["missing", "*.nothing", "a.pdf", "*"])
def test_paths_and_patterns_without_a_readable_file_are_refused(tmp_path, spec):
    write(tmp_path / "a.pdf")
    with pytest.raises(ConfigError):
        list_local(str(tmp_path / spec))


# JSONL


def test_bad_lines_are_skipped_and_counted_with_a_report(tmp_path):
    from nsa_train.data.source.jsonl import JsonlSource

    lines = [json.dumps({"text": f"line {i}"}) for i in range(5)] + ["{cut", "[]"]
    write(tmp_path / "a.jsonl", "\n".join(lines))
    report = ReadReport()
    source = JsonlSource(list_local(str(tmp_path)).files, report=report)
    assert len(read_all(source)) == 5
    assert report.skipped["bad JSON lines"].count == 2
    with pytest.raises(CorruptUnit):
        open_source(str(tmp_path)).read(0)


def test_a_wrong_column_is_an_error_and_not_an_empty_set(tmp_path):
    from nsa_train.data.source.jsonl import JsonlSource

    write(tmp_path / "a.jsonl", "\n".join(json.dumps({"body": "x"}) for _ in range(5)))
    with pytest.raises(CorruptUnit, match="body"):
        JsonlSource(list_local(str(tmp_path)).files, report=ReadReport()).read(0)


# HTML


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<title> A  title </title><p>One<p>Two", "A title\n\nOne\n\nTwo"),
        ("<html><head><title>T</title><style>p{}</style><body>x<script>if (a < b) {}</script>y", "T\n\nxy"),
        ("<head><title>T</title><meta charset=utf-8><h1>No body tag</h1>end", "T\n\nNo body tag\n\nend"),
        ("a &amp; b &eacute; &#x263A; &lt;tag&gt;", "a & b é ☺ <tag>"),
        ("<pre>  code\n    more</pre>", "code\n    more"),
        ("<nav>menu</nav><template>t</template>kept<svg><title>icon</title></svg>", "kept"),
        ("plain text", "plain text"),
        ("", ""),
        ("<p>unclosed <b>bold <i>both", "unclosed bold both"),
        ("<ul><li>one<li>two</ul>", "one\n\ntwo"),
        ("<head><title>Same</title></head><h1>Same</h1><p>x", "Same\n\nx"),
    ],
)
def test_the_text_of_a_page(page, text):
    assert html_text(page) == text


@settings(deadline=None)
@given(st.text(st.sampled_from("<>/!-&;=\"'abp \n") | st.characters(exclude_categories=("Cs",))))
def test_any_page_gives_text(page):
    html_text(page)


def test_thousands_of_open_elements_take_no_time():
    import time

    started = time.process_time()
    text = html_text("<p>a<i>b</i>" * 20_000)
    assert time.process_time() - started < 8
    assert text.startswith("ab\n\nab")


# reports


def reports(numbers: list[int]) -> list[ReadReport]:
    numbered = []
    for number in numbers:
        report = ReadReport()
        for i in range(number):
            report.skip(HIDDEN, f"{number}-{i}")
            report.count("text", i, 2 * i)
        numbered.append(report)
    return numbered


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 6))
def test_adding_reports_does_not_depend_on_how_they_are_grouped(numbers, cut):
    one, left, right = ReadReport(), ReadReport(), ReadReport()
    for report in reports(numbers):
        one.add(report)
    for place, report in enumerate(reports(numbers)):
        (left if place < cut else right).add(report)
    left.add(right)
    assert left.as_json() == one.as_json() == ReadReport.from_json(json.loads(json.dumps(one.as_json()))).as_json()
    if sum(numbers):
        assert len(one.skipped[HIDDEN].first) == min(_SHOWN_NAMES, sum(numbers))
        assert one.total().documents == sum(numbers)
