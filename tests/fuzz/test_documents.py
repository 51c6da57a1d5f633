"""Fuzz targets: pages and files of documents, plain, compressed and as parquet.

Oracle: what is read from an unchanged file, and that every text can be stored as UTF-8.
"""

import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import strategies as st

from nsa_train.data.document import DocumentSource
from nsa_train.data.source.file import LocalFile
from nsa_train.data.source.http import RetryPolicy
from nsa_train.data.source.jsonl import JsonlSource
from nsa_train.data.source.text import TextFileSource
from tests.fuzz.campaign import FuzzCampaign
from tests.fuzz.mutations import mutated_bytes

PAGE = (
    b"<!DOCTYPE html><html><head><title>A &amp; B</title><script>a < b</script></head><body class='x'><!-- no -->"
    b"<p>hello <b>bold</b> &#65;</p><pre>  code\n</pre><![CDATA[ x ]]><img alt='>' src=a><?x?></body></html>"
)
LINES = b"".join(json.dumps({"id": str(n), "text": f"text {n} é" * n}).encode() + b"\n" for n in range(8))


def read_all(source: DocumentSource) -> None:
    for index in range(len(source)):
        for document in source.read(index):
            document.text.encode()


def test_html_pages(fuzz: FuzzCampaign, tmp_path: Path) -> None:
    """Every page is read as text that is at most as long as the page."""
    from nsa_train.data.source.text import html_text

    path = tmp_path / "page.html"

    def check(raw: bytes) -> None:
        path.write_bytes(raw)
        read_all(TextFileSource([LocalFile("page.html", path)]))
        page = raw.decode("latin-1")
        assert len(html_text(page)) <= 3 * len(page)

    cases = st.one_of(
        mutated_bytes(PAGE, most=8), mutated_bytes(PAGE), st.text("<>!-[]?/'\"=ab &#;", max_size=80).map(str.encode)
    )
    fuzz.run(cases, check, examples=1000, good=[PAGE])


def test_document_files(fuzz: FuzzCampaign, tmp_path: Path) -> None:
    """A changed file is refused or read; the kind of a file is the first byte of its case."""
    zstandard, pa = pytest.importorskip("zstandard"), pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    from nsa_train.data.source.parquet import ParquetSource

    stream = io.BytesIO()
    pq.write_table(pa.table({"id": ["a", "b"], "text": ["hello", "hello"]}), stream, compression="zstd")
    good = {
        b"p": LINES,
        b"g": gzip.compress(LINES, mtime=0),
        b"z": zstandard.ZstdCompressor().compress(LINES),
        b"q": stream.getvalue(),
    }
    names = {b"p": "a.jsonl", b"g": "a.jsonl.gz", b"z": "a.jsonl.zst", b"q": "a.parquet"}

    def check(case: bytes) -> None:
        name = names.get(case[:1], "a.jsonl")
        (tmp_path / name).write_bytes(case[1:])
        file = LocalFile(name, tmp_path / name)
        read_all(ParquetSource([file], RetryPolicy()) if name.endswith(".parquet") else JsonlSource([file]))

    cases = st.sampled_from(sorted(good)).flatmap(lambda kind: mutated_bytes(good[kind]).map(lambda raw: kind + raw))
    fuzz.run(cases, check, examples=600, good=[kind + raw for kind, raw in good.items()])
