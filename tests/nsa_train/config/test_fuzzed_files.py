"""Config files of any content are used or refused with a message, without a traceback and in bounded time.

`tests/fuzz/test_settings.py` changes the shipped files at random; these files are too large for its corpus.
"""

from pathlib import Path

import pytest

from nsa.errors import ConfigError
from nsa_train.config import load
from tests.fuzz.campaign import time_limit

LONGEST_S = 30


def refusal(content: bytes, folder: Path, overrides: tuple[str, ...] = ()) -> str | None:
    """The message with which a file is refused; None if it can be used. Anything else that is raised is a defect."""
    file = folder / "run.yaml"
    file.write_bytes(content)
    with time_limit(LONGEST_S):
        try:
            load(file, overrides=overrides)
        except ConfigError as error:
            return str(error)
    return None


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
    refusal(content, tmp_path)


def test_an_endless_or_huge_file_is_refused(tmp_path):
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    for path in (large, "/dev/zero"):
        with time_limit(LONGEST_S), pytest.raises(ConfigError):
            load(path)


def test_a_whole_number_of_thousands_of_digits_is_refused_with_its_place(tmp_path):
    message = refusal(b"train:\n  steps: " + b"9" * 5000, tmp_path)
    assert message is not None
    assert "run.yaml:2" in message
    assert len(message) < 1000
    assert refusal(b"train: {warmup_steps: 5}", tmp_path, ("train.steps=" + "9" * 5000,)) is not None
    assert refusal(b"train: {warmup_steps: " + b"9" * 5000 + b"}", tmp_path, ("train.steps=5",)) is not None
