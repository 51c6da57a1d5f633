"""Decoding of text files: what is read, with which encoding, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.errors import ConfigError
from nsa_train.data.source.text import (
    _UTF8,
    _decode_text,
    _find_encoding,
    _NotText,
    _UnknownEncoding,
    require_encoding,
)

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1)


@given(TEXT)
def test_utf8_is_read_exactly(text):
    raw = text.encode()
    if not raw.startswith((b"\xef\xbb\xbf",)):
        assert _decode_text(raw) == _decode_text(raw, fallback="shift_jis")
        assert (_decode_text(raw).text, _decode_text(raw).encoding) == (text, _UTF8)


@given(TEXT, st.sampled_from(["utf-8-sig", "utf-16", "utf-32"]))
def test_a_byte_order_mark_decides(text, codec):
    assert _decode_text(text.encode(codec)).text == text


@pytest.mark.parametrize("mark", [b"\xfe\xff", b"\xff\xfe"])
def test_both_orders_of_utf16_are_read(mark):
    codec = "utf-16-be" if mark == b"\xfe\xff" else "utf-16-le"
    assert _decode_text(mark + "größe".encode(codec)).text == "größe"


def test_the_fallback_is_named():
    decoded = _decode_text("naïve café “quoted”".encode("cp1252"))
    assert (decoded.text, decoded.encoding) == ("naïve café “quoted”", "cp1252")
    russian = "Война и мир. " * 20
    assert _decode_text(russian.encode("cp1251"), fallback="cp1251").text == russian


def test_a_few_bad_bytes_do_not_change_every_accent():
    raw = ("Ärger über Öl. " * 20).encode()
    decoded = _decode_text(raw[:100] + b"\xff" + raw[100:])
    assert decoded.text.count("Ärger") >= 19
    assert "\ufffd" in decoded.text
    assert "damaged" in decoded.encoding


def test_a_declared_charset_is_used_and_a_wrong_one_is_not_believed():
    japanese = "日本語のページ"
    assert _decode_text(japanese.encode("shift_jis"), declared="shift_jis").text == japanese
    assert _decode_text("naïve".encode(), declared="shift_jis").text == "naïve"


@pytest.mark.parametrize("raw", [b"\x7fELF\x02\x01\x01\0\0\0", b"PK\x03\x04" + b"\x01\x02\x06" * 50, b"a\0b\0c\0"])
def test_binary_content_is_refused(raw):
    with pytest.raises(_NotText):
        _decode_text(raw)


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_random_bytes_are_refused(seed):
    import random

    with pytest.raises((_NotText, _UnknownEncoding)):
        _decode_text(random.Random(seed).randbytes(4096))


def test_truncated_utf16_is_an_unknown_encoding():
    with pytest.raises(_UnknownEncoding):
        _decode_text("größe".encode("utf-16")[:-1])


def test_bytes_that_no_encoding_has_are_refused():
    with pytest.raises(_UnknownEncoding):
        _decode_text(b"words \x81\x8d and words")


@pytest.mark.parametrize("name", ["rot13", "hex", "unicode_escape", "idna", "utf-7", "no-such", "\0", "x" * 1000])
def test_names_that_are_no_text_encoding_are_refused(name):
    assert _find_encoding(name) is None
    with pytest.raises(ConfigError):
        require_encoding(name)


def test_latin1_is_read_as_browsers_do():
    assert _find_encoding("ISO-8859-1") == _find_encoding("latin1") == _find_encoding("us-ascii") == "cp1252"


@given(st.binary(max_size=200))
def test_any_bytes_give_text_or_a_refusal(raw):
    try:
        text = _decode_text(raw).text
    except (_NotText, _UnknownEncoding):
        return
    assert isinstance(text, str)
