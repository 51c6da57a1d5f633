"""Document source for local text, Markdown and HTML files: one file is one unit and one document.

The id of a document is the name of its file relative to the source, so it stays the same when the text is edited. Lines
end in a newline whatever they ended in; nothing else of a text or Markdown file is changed.

Files are UTF-8, UTF-16 or UTF-32 with a byte order mark, or in a charset that a page declares. Nothing is guessed from
the language of a text: a file that is not UTF-8 and says nothing about itself is read with the fallback encoding
(Windows-1252 unless set otherwise), and the report says which encoding was used. Of an HTML page the visible text is
read: scripts, styles and navigation are dropped, paragraphs are kept.
"""

import codecs
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import unescape

from nsa.errors import ConfigError, DataError
from nsa_train.data.document import CorruptUnit, Document, DocumentColumns, SourceUnit, make_document
from nsa_train.data.source.file import LocalFile, file_kind
from nsa_train.data.source.http import ReadDeadline, RetryPolicy
from nsa_train.data.source.read_report import BAD_ENCODING, BINARY, ReadReport

_MAX_FILE_BYTES = 2**28
"""A document is tokenized as a whole, which takes many times its size in memory."""
DEFAULT_FALLBACK = "cp1252"
_UTF8 = "UTF-8"
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig", "UTF-8 with a byte order mark"),
    (codecs.BOM_UTF32_LE, "utf-32", "UTF-32"),  # before UTF-16, whose mark is the beginning of this one
    (codecs.BOM_UTF32_BE, "utf-32", "UTF-32"),
    (codecs.BOM_UTF16_LE, "utf-16", "UTF-16"),
    (codecs.BOM_UTF16_BE, "utf-16", "UTF-16"),
)
# Encodings that a page or a user may name. Python's others include escapes and compressions, which are not text.
_FAMILIES = (
    "ascii", "utf", "iso8859", "iso2022", "cp", "koi8", "mac", "shift_jis", "euc", "gb", "big5", "johab", "tis", "hz",
)  # fmt: skip
_TEXT_CONTROLS = frozenset("\t\n\r\f\v\b\x1b\x1a\x7f")
_MOST_CONTROLS = 0.01  # share of other control characters above which a file counts as binary
_CHECKED_CHARACTERS = 1 << 20

_NOT_TEXT = frozenset({"script", "style", "template", "noscript", "svg", "nav", "select", "button", "head"})
"""Elements without text to read; of the head, the title is kept."""
_BLOCK_NAMES = "p div br li ul ol dl dt dd h1 h2 h3 h4 h5 h6 pre table tr section article blockquote body title hr"
_BLOCKS = frozenset(_BLOCK_NAMES.split())
_VOID_NAMES = "area base br col embed hr img input link meta source track wbr"
_VOID = frozenset(_VOID_NAMES.split())
# Elements of a head; any other one ends it, since its end tag is optional.
_IN_HEAD = frozenset(["title", "meta", "link", "style", "script", "base", "noscript", "template"])
# The charset that a page names in a <meta> element near its beginning.
_CHARSET = re.compile(rb"<meta[^>]{0,256}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
_CHARSET_BYTES = 4096

# Each search below stops at the first end of its construct, or fails once for the whole page.
_NAME = re.compile(r"[a-zA-Z][^\s/>]*")
_BETWEEN_ATTRIBUTES = re.compile(r"[\s/]*")
_ATTRIBUTE = re.compile(r"""([^\s/>][^\s/=>]*)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>"'][^\s>]*))?)?""")
_COMMENT_END = re.compile(r"--\s*>")
_RAW_ENDS = {name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in ("script", "style")}
_LONG_NUMBER = re.compile(r"&#[0-9]{20,}")  # beyond 4,300 digits `unescape` raises


class UnreadableText(CorruptUnit):
    """A text file that is binary or in an unknown encoding; `reason` is one of `SKIP_REASONS`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class TextFileSource:
    """`report`, if given, receives the files that are not UTF-8."""

    def __init__(
        self,
        files: Sequence[LocalFile],
        *,
        columns: DocumentColumns | None = None,
        fallback_encoding: str = DEFAULT_FALLBACK,
        report: ReadReport | None = None,
        max_file_bytes: int = _MAX_FILE_BYTES,
    ) -> None:
        self.files = list(files)
        self._ids_from_text = columns is not None and columns.id is None
        self._fallback = fallback_encoding
        self._report = report
        self.sizes = [file.size() for file in self.files]
        for file, size in zip(self.files, self.sizes, strict=True):
            if size > max_file_bytes:
                raise DataError(
                    f"{file.where} has {size:,} bytes; a text file is one document, at most {max_file_bytes:,} bytes. "
                    "Divide it at the ends of its documents, or write JSONL with one document per line."
                )
        digest = hashlib.sha256(f"text files, ids {self._ids_from_text}, {fallback_encoding}".encode())
        for file in self.files:
            digest.update(file.signature())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.files)

    def unit(self, index: int) -> SourceUnit:
        return SourceUnit(index, self.files[index].where, "whole file")

    def read(self, index: int) -> list[Document]:
        file = self.files[index]
        raw = file.range(0, file.size(), ReadDeadline(RetryPolicy()))
        is_page = file_kind(file.name) == "html"
        charset = _CHARSET.search(raw[:_CHARSET_BYTES]) if is_page else None
        declared = _find_encoding(charset[1].decode("ascii", "replace")) if charset else None
        try:
            decoded = _decode_text(raw, fallback=self._fallback, declared=declared)
        except _NotText as error:
            raise UnreadableText(f"{self.unit(index)} is not text: {error}", BINARY) from error
        except _UnknownEncoding as error:
            raise UnreadableText(f"{self.unit(index)} cannot be decoded: {error}", BAD_ENCODING) from error
        if decoded.encoding != _UTF8 and self._report is not None:
            self._report.decoded(decoded.encoding, file.name)
        text = decoded.text.replace("\r\n", "\n").replace("\r", "\n")
        text = html_text(text) if is_page else text
        text = "" if text.isspace() else text
        storable = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")  # a page can spell half a surrogate
        id = None if self._ids_from_text else file.name.encode("utf-8", "backslashreplace").decode()
        return [make_document(id, storable)]


class _NotText(ValueError):
    """The bytes are not text."""


class _UnknownEncoding(ValueError):
    """The bytes look like text, in an encoding that is neither UTF-8 nor the fallback."""


@dataclass(frozen=True, slots=True)
class _DecodedText:
    text: str
    encoding: str
    """Name for the report; `UTF8` for plain UTF-8."""


def _find_encoding(name: str) -> str | None:
    """Python's name of a text encoding; None if there is none. Browsers read Latin-1 as Windows-1252, and so do we."""
    try:
        codec = codecs.lookup(name.strip()).name
    except (LookupError, ValueError):
        return None
    if codec in ("iso8859-1", "ascii"):
        return DEFAULT_FALLBACK
    return codec if codec.startswith(_FAMILIES) and codec != "utf-7" else None


def require_encoding(name: str) -> str:
    """`_find_encoding`, for a name that a user gave."""
    if (encoding := _find_encoding(name)) is None:
        raise ConfigError(f"encoding {name!r} is not known. Use e.g. cp1252, iso8859-15, cp1251, shift_jis or gb18030.")
    return encoding


def _decode_text(raw: bytes, *, fallback: str = DEFAULT_FALLBACK, declared: str | None = None) -> _DecodedText:
    """Decode a whole file. `declared` is an encoding that the file names itself (`<meta charset>`).

    A file that is UTF-8 except for a few bytes is read as UTF-8 with replacement characters: reading all of it with the
    fallback would change every accent. Raises `_NotText` or `_UnknownEncoding`.
    """
    for mark, codec, name in _MARKS:
        if raw.startswith(mark):
            try:
                return _checked(_DecodedText(raw.decode(codec), name))
            except UnicodeDecodeError as error:
                raise _UnknownEncoding(f"it starts like {name} and is not ({error.reason})") from error
    if b"\0" in raw:
        raise _NotText("it has NUL bytes; UTF-16 is read if it starts with a byte order mark")
    text = None
    with suppress(UnicodeDecodeError):
        text = raw.decode("utf-8")
    if declared is not None and declared != "utf-8" and (raw.isascii() or text is None):
        with suppress(UnicodeDecodeError):  # pages name encodings that they do not have
            return _checked(_DecodedText(raw.decode(declared), declared))
    if text is not None:
        return _checked(_DecodedText(text, _UTF8))
    replaced = raw.decode("utf-8", "replace")
    bad = replaced.count("\ufffd")
    if len(replaced) - len(replaced.encode("ascii", "ignore")) >= 5 * bad:  # four good accents for each bad byte
        return _checked(_DecodedText(replaced, "damaged UTF-8, bad bytes replaced"))
    try:
        return _checked(_DecodedText(raw.decode(fallback), fallback))
    except UnicodeDecodeError as error:
        _checked(_DecodedText(raw.decode("latin-1"), "latin-1"))
        raise _UnknownEncoding(f"it is neither UTF-8 nor {fallback} (byte {raw[error.start]:#04x})") from error


def _checked(decoded: _DecodedText) -> _DecodedText:
    """Raise `_NotText` for control characters that no text has."""
    sample = decoded.text[:_CHECKED_CHARACTERS]
    controls = sum(sample.count(chr(code)) for code in range(32) if chr(code) not in _TEXT_CONTROLS)
    if controls > _MOST_CONTROLS * len(sample):
        raise _NotText(f"{controls:,} of {len(sample):,} characters are control characters")
    return decoded


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
            self._add_data(unescape(_LONG_NUMBER.sub("\ufffd", text)) if "&" in text else text)

    def _add_data(self, data: str) -> None:
        if self._dropped_at is None:
            self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))
        elif self._open_count["title"] and not self._open_count["svg"]:
            self.title.append(data)


_SECTIONS = (("<!--", _COMMENT_END), ("<![CDATA[", re.compile(r"\]\s*\]\s*>")))


def html_text(html: str) -> str:
    """The text of a page, paragraphs separated by an empty line, after its title."""
    parser = _ParagraphParser()
    parser.parse(html)
    title = " ".join("".join(parser.title).split())
    body = _tidy("".join(parser.parts))
    return f"{title}\n\n{body}".strip() if title and not body.startswith(title) else body


def _tidy(text: str) -> str:
    """Unix lines, no trailing blanks, one empty line between paragraphs."""
    text = text.replace("\r", "").replace("\u00a0", " ")
    text = re.sub(r"(?<![ \t])[ \t]+\n", "\n", text)  # each run of blanks is tried once
    text = re.sub(r"\n (?! )", "\n", text)  # between two elements; code is indented further
    return re.sub(r"\n{3,}", "\n\n", text).strip()
