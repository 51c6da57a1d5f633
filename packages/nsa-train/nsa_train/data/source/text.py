"""Document source for local text, Markdown and HTML files: one file is one unit and one document.

The id of a document is the name of its file relative to the source, so it stays the same when the text is edited. Lines
end in a newline whatever they ended in; nothing else of a text or Markdown file is changed.

Files are UTF-8, UTF-16 or UTF-32 with a byte order mark, or in a charset that a page declares. Nothing is guessed from
the language of a text: a file that is not UTF-8 and says nothing about itself is read with the fallback encoding
(Windows-1252 unless told otherwise), and the report says which encoding was used.
"""

import codecs
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from nsa.errors import ConfigError, DataError
from nsa_train.data.document import CorruptUnit, Document, DocumentColumns, SourceUnit, make_document
from nsa_train.data.source.file import LocalFile, file_kind
from nsa_train.data.source.html_text import declared_charset, html_text
from nsa_train.data.source.http import ReadDeadline, RetryPolicy
from nsa_train.data.source.read_report import BAD_ENCODING, BINARY, ReadReport

_MAX_FILE_BYTES = 2**28
"""A document is tokenized as a whole, which takes many times its size in memory."""
DEFAULT_FALLBACK = "cp1252"
UTF8 = "UTF-8"
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


class UnreadableText(CorruptUnit):
    """A text file that is binary or in an unknown encoding; `reason` is one of `SKIP_REASONS`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class TextFileSource:
    """`report`, if given, is told about files that are not UTF-8."""

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
        charset = declared_charset(raw) if is_page else None
        try:
            decoded = decode_text(raw, fallback=self._fallback, declared=find_encoding(charset) if charset else None)
        except NotText as error:
            raise UnreadableText(f"{self.unit(index)} is not text: {error}", BINARY) from error
        except UnknownEncoding as error:
            raise UnreadableText(f"{self.unit(index)} cannot be decoded: {error}", BAD_ENCODING) from error
        if decoded.encoding != UTF8 and self._report is not None:
            self._report.decoded(decoded.encoding, file.name)
        text = decoded.text.replace("\r\n", "\n").replace("\r", "\n")
        text = html_text(text) if is_page else text
        return [self._document(file.name, text if not text.isspace() else "")]

    def _document(self, name: str, text: str) -> Document:
        storable = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")  # a page can spell half a surrogate
        return make_document(
            None if self._ids_from_text else name.encode("utf-8", "backslashreplace").decode(), storable
        )


class NotText(ValueError):
    """The bytes are not text."""


class UnknownEncoding(ValueError):
    """The bytes look like text, in an encoding that is neither UTF-8 nor the fallback."""


@dataclass(frozen=True, slots=True)
class _DecodedText:
    text: str
    encoding: str
    """Name for the report; `UTF8` for plain UTF-8."""


def find_encoding(name: str) -> str | None:
    """Python's name of a text encoding; None if there is none. Browsers read Latin-1 as Windows-1252, and so do we."""
    try:
        codec = codecs.lookup(name.strip()).name
    except (LookupError, ValueError):
        return None
    if codec in ("iso8859-1", "ascii"):
        return DEFAULT_FALLBACK
    return codec if codec.startswith(_FAMILIES) and codec != "utf-7" else None


def require_encoding(name: str) -> str:
    """`find_encoding`, for a name that a user gave."""
    if (encoding := find_encoding(name)) is None:
        raise ConfigError(f"encoding {name!r} is not known. Use e.g. cp1252, iso8859-15, cp1251, shift_jis or gb18030.")
    return encoding


def decode_text(raw: bytes, *, fallback: str = DEFAULT_FALLBACK, declared: str | None = None) -> _DecodedText:
    """Decode a whole file. `declared` is an encoding that the file names itself (`<meta charset>`).

    A file that is UTF-8 except for a few bytes is read as UTF-8 with replacement characters: reading all of it with the
    fallback would change every accent. Raises `NotText` or `UnknownEncoding`.
    """
    for mark, codec, name in _MARKS:
        if raw.startswith(mark):
            try:
                return _checked(_DecodedText(raw.decode(codec), name))
            except UnicodeDecodeError as error:
                raise UnknownEncoding(f"it starts like {name} and is not ({error.reason})") from error
    if b"\0" in raw:
        raise NotText("it has NUL bytes; UTF-16 is read if it starts with a byte order mark")
    if declared is not None and declared != "utf-8" and (raw.isascii() or not _is_utf8(raw)):
        try:
            return _checked(_DecodedText(raw.decode(declared), declared))
        except UnicodeDecodeError:
            pass  # pages name encodings that they do not have
    try:
        return _checked(_DecodedText(raw.decode("utf-8"), UTF8))
    except UnicodeDecodeError:
        pass
    replaced = raw.decode("utf-8", "replace")
    bad = replaced.count("\ufffd")
    if len(replaced) - len(replaced.encode("ascii", "ignore")) >= 5 * bad:  # four good accents for each bad byte
        return _checked(_DecodedText(replaced, "damaged UTF-8, bad bytes replaced"))
    try:
        return _checked(_DecodedText(raw.decode(fallback), fallback))
    except UnicodeDecodeError as error:
        _checked(_DecodedText(raw.decode("latin-1"), "latin-1"))
        raise UnknownEncoding(f"it is neither UTF-8 nor {fallback} (byte {raw[error.start]:#04x})") from error


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _checked(decoded: _DecodedText) -> _DecodedText:
    """Raise `NotText` for control characters that no text has."""
    sample = decoded.text[:_CHECKED_CHARACTERS]
    controls = sum(sample.count(chr(code)) for code in range(32) if chr(code) not in _TEXT_CONTROLS)
    if controls > _MOST_CONTROLS * len(sample):
        raise NotText(f"{controls:,} of {len(sample):,} characters are control characters")
    return decoded
