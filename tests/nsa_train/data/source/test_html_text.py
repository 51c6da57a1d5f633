"""Text of HTML pages: as Python's HTMLParser reads well-formed ones; what is never closed is text."""

import random
from html.parser import HTMLParser

import pytest

from nsa_train.data.source.text import _ParagraphParser, html_text

PIECES = (
    *("<p>", "</p>", "<div class='a b'>", "</div>", '<DIV CLASS="toc">', "<br>", "<br/>", "<hr />", "<b>", "</b>"),
    *("<head>", "<title>A &amp; B</title>", "<meta charset=utf-8>", "</head>", "<body>", "<pre>  x\n   y </pre>"),
    *("<script>if (a < b) { '</p>' }</script>", "<style>p > b { }</style>", "<svg><title>no</title>", "</svg>"),
    *("<nav>menu</nav>", "<!-- a <b> comment -->", "<!DOCTYPE html>", "<?xml version='1.0'?>", "<![CDATA[ <i> ]]>"),
    *('<a href="x>y" title=\'"\'>', "</a>", "<a href=foo/>", "<img src=a.png alt='<p>'>", "<input disabled>", "<td\n>"),
    *("text ", "a < b", " &lt;&eacute;&#65;&#x42; ", "1 > 0", "\n\n", "\t", "&", "&amp", "é漢", "<3", "< p>", "</ >"),
)


class Oracle(HTMLParser):
    """Drives the same collection of paragraphs by Python's tokenizer."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs = _ParagraphParser()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.paragraphs._open_element(tag)

    def handle_endtag(self, tag: str) -> None:
        self.paragraphs._close(tag)

    def handle_data(self, data: str) -> None:
        self.paragraphs._add_data(data)


@pytest.mark.parametrize("seed", range(20))
def test_well_formed_pages_are_read_as_by_html_parser(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        page = "".join(chance.choices(PIECES, k=chance.randrange(1, 40))) + "<p>end</p>"
        oracle, ours = Oracle(), _ParagraphParser()
        oracle.feed(page)
        oracle.close()
        ours.parse(page)
        assert "".join(ours.parts) == "".join(oracle.paragraphs.parts), page
        assert "".join(ours.title) == "".join(oracle.paragraphs.title), page


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>a</p> 1 < 2 and <unclosed", "a\n\n1 < 2 and <unclosed"),
        ("<p>a <!-- never closed <b>b</b></p>", "a <!-- never closed b"),
        ("<p>a <![CDATA[ never closed <b>b</b></p>", "a <![CDATA[ never closed b"),
        ("<p>a<![other[ b ]> c</p>", "a c"),
        ('<p title="never closed>a</p>', "a"),
        (f"<p>&#{'9' * 5000};</p>", "\ufffd;"),
        ("<script>never closed <p>text</p>", ""),
    ],
)
def test_markup_that_is_never_closed_is_text(page: str, text: str) -> None:
    assert html_text(page) == text
