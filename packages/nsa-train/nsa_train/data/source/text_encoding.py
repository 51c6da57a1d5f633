"""Decodes text files: UTF-8, UTF-16 and UTF-32 with a byte order mark, a declared charset, and a fallback encoding.

Nothing is guessed from the language of a text: a file that is not UTF-8 and says nothing about itself is read with the
fallback encoding (Windows-1252 unless told otherwise), and the caller is told which encoding was used.
"""

import codecs
from dataclasses import dataclass

from nsa.errors import ConfigError

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


class NotText(ValueError):
    """The bytes are not text."""


class UnknownEncoding(ValueError):
    """The bytes look like text, in an encoding that is neither UTF-8 nor the fallback."""


@dataclass(frozen=True, slots=True)
class DecodedText:
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


def decode_text(raw: bytes, *, fallback: str = DEFAULT_FALLBACK, declared: str | None = None) -> DecodedText:
    """Decode a whole file. `declared` is an encoding that the file names itself (`<meta charset>`).

    A file that is UTF-8 except for a few bytes is read as UTF-8 with replacement characters: reading all of it with the
    fallback would change every accent. Raises `NotText` or `UnknownEncoding`.
    """
    for mark, codec, name in _MARKS:
        if raw.startswith(mark):
            try:
                return _checked(DecodedText(raw.decode(codec), name))
            except UnicodeDecodeError as error:
                raise UnknownEncoding(f"it starts like {name} and is not ({error.reason})") from error
    if b"\0" in raw:
        raise NotText("it has NUL bytes; UTF-16 is read if it starts with a byte order mark")
    if declared is not None and declared != "utf-8" and (raw.isascii() or not _is_utf8(raw)):
        try:
            return _checked(DecodedText(raw.decode(declared), declared))
        except UnicodeDecodeError:
            pass  # pages name encodings that they do not have
    try:
        return _checked(DecodedText(raw.decode("utf-8"), UTF8))
    except UnicodeDecodeError:
        pass
    replaced = raw.decode("utf-8", "replace")
    bad = replaced.count("\ufffd")
    if len(replaced) - len(replaced.encode("ascii", "ignore")) >= 5 * bad:  # four good accents for each bad byte
        return _checked(DecodedText(replaced, "damaged UTF-8, bad bytes replaced"))
    try:
        return _checked(DecodedText(raw.decode(fallback), fallback))
    except UnicodeDecodeError as error:
        _checked(DecodedText(raw.decode("latin-1"), "latin-1"))
        raise UnknownEncoding(f"it is neither UTF-8 nor {fallback} (byte {raw[error.start]:#04x})") from error


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _checked(decoded: DecodedText) -> DecodedText:
    """Raise `NotText` for control characters that no text has."""
    sample = decoded.text[:_CHECKED_CHARACTERS]
    controls = sum(sample.count(chr(code)) for code in range(32) if chr(code) not in _TEXT_CONTROLS)
    if controls > _MOST_CONTROLS * len(sample):
        raise NotText(f"{controls:,} of {len(sample):,} characters are control characters")
    return decoded
