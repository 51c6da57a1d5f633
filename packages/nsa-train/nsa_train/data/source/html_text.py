"""Extracts the visible text of an HTML page: scripts, styles and navigation are dropped, paragraphs are kept."""

import re
from collections import Counter
from html import unescape

_NOT_TEXT = frozenset({"script", "style", "template", "noscript", "svg", "nav", "select", "button", "head"})
"""Elements without text to read; of the head, the title is kept."""
_BLOCK_NAMES = "p div br li ul ol dl dt dd h1 h2 h3 h4 h5 h6 pre table tr section article blockquote body title hr"
_BLOCKS = frozenset(_BLOCK_NAMES.split())
_VOID_NAMES = "area base br col embed hr img input link meta source track wbr"
_VOID = frozenset(_VOID_NAMES.split())
# Elements of a head; any other one ends it, since its end tag is optional.
_IN_HEAD = frozenset(["title", "meta", "link", "style", "script", "base", "noscript", "template"])
_CHARSET = re.compile(rb"<meta[^>]{0,256}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
_CHARSET_BYTES = 4096

# Each search below stops at the first end of its construct, or fails once for the whole page.
_NAME = re.compile(r"[a-zA-Z][^\s/>]*")
_BETWEEN_ATTRIBUTES = re.compile(r"[\s/]*")
_ATTRIBUTE = re.compile(r"""([^\s/>][^\s/=>]*)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>"'][^\s>]*))?)?""")
_COMMENT_END = re.compile(r"--\s*>")
_RAW_ENDS = {name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in ("script", "style")}
_LONG_NUMBER = re.compile(r"&#[0-9]{20,}")  # beyond 4,300 digits `unescape` raises


class _ParagraphParser:
    """Collects text by paragraph and skips dropped elements, in time proportional to the length of the page.

    Python's HTMLParser searches the rest of the page for the end of every construct that has none. Here markup that is
    never closed is text; an attribute whose quote is never closed ends at the next `>`.
    """

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.title: list[str] = []
        self._open: list[str] = []
        self._open_count: Counter[str] = Counter()  # a page may leave thousands of elements open
        self._dropped_at: int | None = None
        self._head_at = 0
        self._pre = 0

    def parse(self, html: str) -> None:
        """Read a whole page."""
        last = html.rfind(">")  # nothing is closed after it
        unclosed: set[str] = set()
        text_from = at = 0
        while 0 <= (at := html.find("<", at)) < last:
            end = self._markup_end(html, at, unclosed)
            start = _NAME.match(html, at + 1)
            if end is None and start is None:
                at += 1
                continue
            self._add_text(html[text_from:at])
            if start is not None:
                end = self._start_tag(html, start)
            elif html.startswith("</", at) and (name := _NAME.match(html, at + 2)):
                self._close(name[0].lower())
            assert end is not None
            text_from = at = end
        self._add_text(html[text_from:])

    def _markup_end(self, html: str, at: int, unclosed: set[str]) -> int | None:
        """The end of an end tag, comment, declaration or instruction; None for a start tag and for text."""
        if html[at + 1] not in "/!?":
            return None
        kind, closing = next(
            ((kind, closing) for kind, closing in _SECTIONS if html.startswith(kind, at)), (html[at : at + 2], None)
        )
        if closing is None:
            return html.index(">", at) + 1
        end = None if kind in unclosed else closing.search(html, at + len(kind))
        if end is None:
            unclosed.add(kind)
        return end and end.end()

    def _start_tag(self, html: str, name: re.Match[str]) -> int:
        """Open an element, and skip what is not parsed in it; returns where the page continues."""
        tag, at = name[0].lower(), name.end()
        while True:
            between = _BETWEEN_ATTRIBUTES.match(html, at)
            assert between is not None
            at = between.end()
            if at >= len(html) or html[at] == ">":
                break
            attribute = _ATTRIBUTE.match(html, at)
            assert attribute is not None
            at = attribute.end()
        self._open_element(tag)
        at += 1
        if between[0].endswith("/"):
            self._close(tag)
        elif tag in _RAW_ENDS:
            end = _RAW_ENDS[tag].search(html, at)
            self._add_data(html[at : end.start() if end else len(html)])
            self._close(tag)
            at = end.end() if end else len(html)
        return at

    def _open_element(self, tag: str) -> None:
        if self._open_count["head"] and tag not in _IN_HEAD and self._dropped_at == self._head_at:
            self._close("head")
        if tag in _BLOCKS:
            self.parts.append("\n" if tag in ("br", "tr") else "\n\n")
        if tag in _VOID:
            return
        self._open.append(tag)
        self._open_count[tag] += 1
        self._pre += tag == "pre"
        if tag == "head" and self._open_count[tag] == 1:
            self._head_at = len(self._open)
        if self._dropped_at is None and tag in _NOT_TEXT:
            self._dropped_at = len(self._open)

    def _close(self, tag: str) -> None:
        if not self._open_count[tag]:
            return
        while self._open:
            closed = self._open.pop()
            self._open_count[closed] -= 1
            self._pre -= closed == "pre"
            if self._dropped_at is not None and len(self._open) < self._dropped_at:
                self._dropped_at = None
            if closed == tag:
                break
        if tag in _BLOCKS:
            self.parts.append("\n\n")

    def _add_text(self, text: str) -> None:
        if text:
            self._add_data(_unescape(text))

    def _add_data(self, data: str) -> None:
        if self._dropped_at is None:
            self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))
        elif self._open_count["title"] and not self._open_count["svg"]:
            self.title.append(data)


_SECTIONS = (("<!--", _COMMENT_END), ("<![CDATA[", re.compile(r"\]\s*\]\s*>")))


def _unescape(text: str) -> str:
    return unescape(_LONG_NUMBER.sub("\ufffd", text)) if "&" in text else text


def html_text(html: str) -> str:
    """The text of a page, paragraphs separated by an empty line, after its title."""
    parser = _ParagraphParser()
    parser.parse(html)
    title = " ".join("".join(parser.title).split())
    body = _tidy("".join(parser.parts))
    return f"{title}\n\n{body}".strip() if title and not body.startswith(title) else body


def declared_charset(raw: bytes) -> str | None:
    """The charset that a page names in a <meta> element near its beginning."""
    match = _CHARSET.search(raw[:_CHARSET_BYTES])
    return match[1].decode("ascii", "replace") if match else None


def _tidy(text: str) -> str:
    """Unix lines, no trailing blanks, one empty line between paragraphs."""
    text = text.replace("\r", "").replace("\u00a0", " ")
    text = re.sub(r"(?<![ \t])[ \t]+\n", "\n", text)  # each run of blanks is tried once
    text = re.sub(r"\n (?! )", "\n", text)  # between two elements; code is indented further
    return re.sub(r"\n{3,}", "\n\n", text).strip()
