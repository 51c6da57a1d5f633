"""Document source for local text, Markdown and HTML files: one file is one unit and one document.

The id of a document is the name of its file relative to the source, so it stays the same when the text is edited. Lines
end in a newline whatever they ended in; nothing else of a text or Markdown file is changed.
"""

import hashlib
from collections.abc import Sequence

from nsa.errors import DataError
from nsa_train.data.document import CorruptUnit, Document, DocumentColumns, SourceUnit, make_document
from nsa_train.data.source.file import LocalFile
from nsa_train.data.source.html_text import declared_charset, html_text
from nsa_train.data.source.kinds import file_kind
from nsa_train.data.source.read_report import BAD_ENCODING, BINARY, ReadReport
from nsa_train.data.source.retry_policy import ReadDeadline, RetryPolicy
from nsa_train.data.source.text_encoding import (
    DEFAULT_FALLBACK,
    UTF8,
    NotText,
    UnknownEncoding,
    decode_text,
    find_encoding,
)

_MAX_FILE_BYTES = 2**28
"""A document is tokenized as a whole, which takes many times its size in memory."""


class UnreadableText(CorruptUnit):
    """A text file that is binary or in an unknown encoding; `reason` is one of `SKIP_REASONS`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class TextFileSource:
    """`report`, if given, is told about files that are not UTF-8."""

    retries = 0  # local files only

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
        self.bytes_read = 0
        self.sizes = [file.size() for file in self.files]
        for file, size in zip(self.files, self.sizes, strict=True):
            if size > max_file_bytes:
                raise DataError(
                    f"{file.where} has {size:,} bytes; a text file is one document, at most {max_file_bytes:,} bytes. "
                    "Divide it at the ends of its documents, or write JSONL with one document per line."
                )
        digest = hashlib.sha256(f"text files, ids {self._ids_from_text}, {fallback_encoding}".encode())
        for file, size in zip(self.files, self.sizes, strict=True):
            digest.update(f"\n{file.name}\t{size}\t{file.sample_hash()}".encode("utf-8", "surrogateescape"))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.files)

    def unit(self, index: int) -> SourceUnit:
        return SourceUnit(index, self.files[index].where, "whole file")

    def read(self, index: int) -> list[Document]:
        file = self.files[index]
        raw = file.range(0, file.size(), ReadDeadline(RetryPolicy()))
        self.bytes_read += len(raw)
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
        text = html_text(text, keep_title=True) if is_page else text
        return [self._document(file.name, text if not text.isspace() else "")]

    def _document(self, name: str, text: str) -> Document:
        storable = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")  # a page can spell half a surrogate
        return make_document(
            None if self._ids_from_text else name.encode("utf-8", "backslashreplace").decode(), storable
        )
