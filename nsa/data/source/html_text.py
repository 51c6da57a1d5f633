"""Extracts the visible text of an HTML page: scripts, styles and navigation are dropped, paragraphs are kept."""

import re
from collections import Counter
from collections.abc import Collection
from html.parser import HTMLParser

NOT_TEXT = frozenset({"script", "style", "template", "noscript", "svg", "nav", "select", "button", "head"})
"""Elements without text to read; of the head, the title is kept on request."""
_BLOCK_NAMES = "p div br li ul ol dl dt dd h1 h2 h3 h4 h5 h6 pre table tr section article blockquote body title hr"
_BLOCKS = frozenset(_BLOCK_NAMES.split())
_VOID_NAMES = "area base br col embed hr img input link meta source track wbr"
_VOID = frozenset(_VOID_NAMES.split())
# Elements of a head; any other one ends it, since its end tag is optional.
_IN_HEAD = frozenset(["title", "meta", "link", "style", "script", "base", "noscript", "template"])
_CHARSET = re.compile(rb"<meta[^>]{0,256}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
_CHARSET_BYTES = 4096


class ParagraphParser(HTMLParser):
    """Collects text by paragraph and skips dropped elements."""

    def __init__(self, dropped: Collection[str], dropped_classes: Collection[str]) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.title: list[str] = []
        self._dropped, self._dropped_classes = dropped, frozenset(dropped_classes)
        self._open: list[str] = []
        self._open_count: Counter[str] = Counter()  # a page may leave thousands of elements open
        self._dropped_at: int | None = None
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._open_count["head"] and tag not in _IN_HEAD and self._dropped_at == self._open.index("head") + 1:
            self.handle_endtag("head")
        if tag in _BLOCKS:
            self.parts.append("\n" if tag in ("br", "tr") else "\n\n")
        if tag in _VOID:
            return
        self._open.append(tag)
        self._open_count[tag] += 1
        self._pre += tag == "pre"
        classes = next((set((value or "").split()) for key, value in attrs if key == "class"), set())
        if self._dropped_at is None and (tag in self._dropped or classes & self._dropped_classes):
            self._dropped_at = len(self._open)

    def handle_endtag(self, tag: str) -> None:
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

    def handle_data(self, data: str) -> None:
        if self._dropped_at is None:
            self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))
        elif self._open_count["title"] and not self._open_count["svg"]:
            self.title.append(data)


def html_text(
    html: str,
    *,
    dropped: Collection[str] = NOT_TEXT,
    dropped_classes: Collection[str] = (),
    dropped_characters: str = "",
    keep_title: bool = False,
) -> str:
    """The text of a page, paragraphs separated by an empty line; with `keep_title` it begins with the title."""
    parser = ParagraphParser(dropped, dropped_classes)
    parser.feed(html)
    parser.close()
    title = " ".join("".join(parser.title).split()) if keep_title else ""
    body = tidy("".join(parser.parts).translate({ord(character): None for character in dropped_characters}))
    return f"{title}\n\n{body}".strip() if title and not body.startswith(title) else body


def declared_charset(raw: bytes) -> str | None:
    """The charset that a page names in a <meta> element near its beginning."""
    found = _CHARSET.search(raw[:_CHARSET_BYTES])
    return found[1].decode("ascii", "replace") if found else None


def tidy(text: str) -> str:
    """Unix lines, no trailing blanks, one empty line between paragraphs."""
    text = text.replace("\r", "").replace("\u00a0", " ")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n (?! )", "\n", text)  # between two elements; code is indented further
    return re.sub(r"\n{3,}", "\n\n", text).strip()
