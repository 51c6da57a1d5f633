"""Whatever a config file contains, it is used or refused with a message: never a traceback, and never for long."""

import random
import signal
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from nsa.config import load
from nsa.config.schema import settings
from nsa.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
MUTATED = 600
LONGEST_S = 30

VALUES = (
    "9" * 5000, "-" + "9" * 5000, "1" + "0" * 400, "1e999999", "-1e308", "0x" + "f" * 40, "0.1e-400", ".nan", "-.inf",
    "NaN", "1_0", "٣", "²", "1\u2028", '"\\0"', '"a\\0b"', '"\\ud800"', "'" + "x" * 5000 + "'", "~", "''",
    "|\n    text\n", "[1, 2]", "{a: b}", "&a 3", "*a", "!!python/object:os.system x", "!!binary aGk=", "!x y", "<<",
    "2024-01-01", "12:30", "yes", "- 1", "../" * 2000 + "x", "a/b.yaml", ".yaml", "/", ".", "/dev/null.yaml", "~root",
    "$HOME", "*", "\x7f", "# gone", "? x",
)  # fmt: skip
PIECES = (b"\t", b"\r", b"\0", b":", b"{", b"[", b"- ", b"&a ", b"*a", b"\xff", b"\xc2\x85", b"---\n", b"%", b"!")


@contextmanager
def limited():
    """An endless loop must fail the test, not hang it."""

    def too_long(*_) -> None:
        raise AssertionError(f"still busy after {LONGEST_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judge(content: bytes, folder: Path, overrides: tuple[str, ...] = ()) -> str | None:
    """The message with which a file is refused; None if it can be used. Anything else that is raised is a defect."""
    file = folder / "run.yaml"
    file.write_bytes(content)
    with limited():
        try:
            load(file, overrides=overrides)
        except ConfigError as error:
            return str(error)
    return None


def flip(dice: random.Random, text: bytes) -> bytes:
    """Some bytes replaced by any others."""
    changed = bytearray(text)
    for _ in range(dice.choice((1, 1, 2, 8, 40))):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def cut(dice: random.Random, text: bytes) -> bytes:
    start, end = sorted(dice.randrange(len(text) + 1) for _ in range(2))
    return dice.choice((text[:start], text[start:], text[:start] + text[end:], text[:end] + text[start:]))


def insert(dice: random.Random, text: bytes) -> bytes:
    at = dice.randrange(len(text) + 1)
    piece = dice.choice(PIECES)
    return text[:at] + piece * dice.choice((1, 1, 3, 100)) + text[at:]


def set_value(dice: random.Random, text: bytes) -> bytes:
    """A value that no one would write, for a setting that there is."""
    lines = []
    for key in dice.sample(sorted(settings()), 3):
        section, _, name = key.rpartition(".")
        value = dice.choice(VALUES)
        lines.append(f"{section}: {{{name}: {value}}}" if section else f"{name}: {value}")
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def encode(dice: random.Random, text: bytes) -> bytes:
    encoding = dice.choice(("utf-16", "utf-32", "utf-8-sig", "utf-16-be", "cp500"))
    return text.decode(errors="replace").encode(encoding, errors="replace")


def shuffle(dice: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    dice.shuffle(lines)
    return b"".join(lines)


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    flip, cut, insert, insert, set_value, set_value, set_value, encode, shuffle,
)  # fmt: skip


def test_mutated_files_are_used_or_refused_in_words(tmp_path):
    dice = random.Random(7)
    refused = used = 0
    for _ in range(MUTATED):
        content = dice.choice(SHIPPED).read_bytes()
        for _ in range(dice.choice((1, 1, 2))):
            content = dice.choice(MUTATIONS)(dice, content) or b"\n"
        message = judge(content, tmp_path)
        refused, used = refused + (message is not None), used + (message is None)
    assert refused > MUTATED // 2
    assert used > MUTATED // 50


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b"{a: " * 100_000,
        b"- " * 100_000,
        b"? " * 100_000,
        b"train: " + b"[" * 5000 + b"]" * 5000,
        b"".join(b" " * depth + b"a:\n" for depth in range(3000)),
        BOMB.encode(),
        b"train: &t {steps: 3, x: *t}\n",
        b"&a ? *a : *a\n",
        b"train: {steps: " + b"9" * 200_000 + b"}",
        b"train:\n  steps: 5\n" * 2_000,
        b"\0" * 1000,
        b"\x1f\x8b\x08\x00" + bytes(range(256)),
        b"train:\n\tsteps: 3\n",
        b"\xef\xbb\xbf",
        b"---\n---\n",
        b"%YAML 9.9\n---\ntrain: {}\n",
        b"profile: " + b"x" * 300,
        b"profile: " + b"x/" * 3000,
        b'profile: "a\\0b/c"',
        b"train: {steps: !!int 3}\n",
    ],
    ids=lambda content: content[:12].decode("latin-1").encode("unicode_escape").decode(),
)
def test_hostile_files_are_used_or_refused_in_words(content, tmp_path):
    judge(content, tmp_path)


def test_a_file_without_an_end_is_not_read_to_its_end():
    with limited(), pytest.raises(ConfigError, match="KiB"):
        load("/dev/zero")


def test_a_whole_number_of_thousands_of_digits_is_refused_with_its_place(tmp_path):
    message = judge(b"train:\n  steps: " + b"9" * 5000, tmp_path)
    assert message is not None
    assert "run.yaml:2" in message
    assert len(message) < 1000
    assert judge(b"train: {warmup_steps: 5}", tmp_path, ("train.steps=" + "9" * 5000,)) is not None
    assert judge(b"train: {warmup_steps: " + b"9" * 5000 + b"}", tmp_path, ("train.steps=5",)) is not None
