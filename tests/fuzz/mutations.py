"""Hypothesis strategies that change good inputs: bytes, text of lines, JSON documents and folders of files.

Cases are plain values that JSON can hold (a case of a folder is a list of edits), so that a finding is kept as a file
of the corpus.
"""

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

STRANGE_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**32, 2**53, 2**63, 2**64, 2**70, 10**30, 10**400, -(10**400), 0.5, -1.5,
    1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"), "", "x", "0", "-1", "1e5", "NaN", "null", "²",
    "٣", "\x00", "\ud800", "\u001b[31mred", "../up", "/", "a/b", "x" * 300, "9" * 5000, [], {}, [[]], [None], [1],
    ["a"], [1, "x"], {"a": 1}, {"type": "Nope"}, {"": None},
]  # fmt: skip
"""Values that few fields may have: other types, bounds of integers, numbers without a value, hostile text."""

PIECES: list[bytes] = [
    b"\0", b"\n", b"\r", b"\t", b" ", b":", b"{", b"}", b"[", b"]", b'"', b"- ", b"&a ", b"*a", b"!", b"%", b"#", b",",
    b"\xff", b"\xc2\x85", b"\xe2\x80\xa8", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"---\n", b"...\n", b"? ", b"| ", b"<<: ",
    b"!!python/object:os.system x", b"NaN", b"1e999", b"9" * 400, b"[" * 200, b"\0" * 64, bytes(range(256)),
]  # fmt: skip
"""What the byte mutations insert."""

_ANYWHERE = st.integers(0, 2**31 - 1)
_BYTE_EDITS = ("flip", "set", "cut", "delete", "repeat", "insert", "line_away", "line_twice", "lines_swapped")


def edits_of_bytes() -> st.SearchStrategy[list[Any]]:
    """One edit of a byte string, for `edit_bytes`: what, two places, a number."""
    return st.tuples(st.sampled_from(_BYTE_EDITS), _ANYWHERE, _ANYWHERE, st.integers(0, 255)).map(list)


def edit_bytes(raw: bytes, edit: Sequence[Any]) -> bytes:
    what, first, second, value = edit
    if not raw:
        return PIECES[value % len(PIECES)]
    a, b = sorted((first % (len(raw) + 1), second % (len(raw) + 1)))
    at = first % len(raw)
    if what == "flip":
        return raw[:at] + bytes([raw[at] ^ 1 << value % 8]) + raw[at + 1 :]
    if what == "set":
        return raw[:at] + bytes([value]) + raw[at + 1 :]
    if what == "cut":
        return raw[:at]
    if what == "delete":
        return raw[:a] + raw[b:]
    if what == "repeat":
        return raw[:b] + raw[a:]
    if what == "insert":
        return raw[:at] + PIECES[value % len(PIECES)] + raw[at:]
    lines = raw.splitlines(keepends=True)
    i, j = first % len(lines), second % len(lines)
    if what == "line_away":
        del lines[i]
    elif what == "line_twice":
        lines.insert(j, lines[i])
    else:
        lines[i], lines[j] = lines[j], lines[i]
    return b"".join(lines)


@st.composite
def mutated_bytes(draw: st.DrawFn, *samples: bytes, most: int = 4) -> bytes:
    """One of the samples after one to `most` edits."""
    raw = draw(st.sampled_from(samples))
    for edit in draw(st.lists(edits_of_bytes(), min_size=1, max_size=most)):
        raw = edit_bytes(raw, edit)
    return raw


@st.composite
def mutated_json(draw: st.DrawFn, document: Any, most: int = 3, values: Sequence[Any] = STRANGE_VALUES) -> Any:
    """A copy of a JSON document in which values are replaced, left out, repeated, renamed or exchanged."""
    root = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, most))):
        places = list(_places(root))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        what = draw(st.sampled_from(("value", "value", "value", "neighbour", "away", "rename", "twice", "exchange")))
        other_holder, other_key = draw(st.sampled_from(places))
        if what == "value":
            holder[key] = copy.deepcopy(draw(st.sampled_from(values)))
        elif what == "neighbour" and type(holder[key]) in (int, float):
            holder[key] += draw(st.sampled_from((-1, 1)))
        elif what == "away":
            del holder[key]
        elif what == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from(("x", "", str(other_key))))] = holder.pop(key)
        elif what == "twice" and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif what == "exchange":
            holder[key] = copy.deepcopy(other_holder[other_key])
    return root[0] if root else None


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a document; of a long list only the first items."""
    items = list(node.items())[:60] if isinstance(node, dict) else list(enumerate(node))[:4] if _is_list(node) else []
    for key, child in items:
        yield node, key
        yield from _places(child)


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


def json_bytes(value: Any) -> bytes:
    """Encode as JSON, with NaN and lone surrogates: readers must expect both."""
    return json.dumps(value).encode()


_FILE_EDITS = ("remove", "empty", "rename", "swap", "copy", "extra", "pipe", "folder")


def edits_of_folder(files: Sequence[str], most: int = 2) -> st.SearchStrategy[list[list[Any]]]:
    """Edits of a folder that holds these files: mostly of their bytes, sometimes of the files themselves."""
    of_bytes = st.tuples(st.sampled_from(files), st.just("bytes"), edits_of_bytes())
    of_files = st.tuples(st.sampled_from(files), st.sampled_from(_FILE_EDITS), st.sampled_from(files))
    one = st.one_of(of_bytes, of_bytes, of_bytes, of_files).map(list)
    return st.lists(one, min_size=1, max_size=most)


@contextmanager
def edited_folder(folder: Path, files: Mapping[str, bytes], edits: Sequence[Sequence[Any]]) -> Iterator[None]:
    """The folder after these edits, and as it was again afterwards. `files`: everything in it."""
    try:
        for name, what, how in edits:
            _edit_file(folder, name, what, how)
        yield
    finally:
        touched = {name for name, _, _ in edits} | {how for _, what, how in edits if what != "bytes"}
        for name in sorted(touched | {f"{name}.extra" for name in touched}):
            _remove(folder / name)
        for name in sorted(touched):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(files[name])


def _edit_file(folder: Path, name: str, what: str, how: Any) -> None:
    path = folder / name
    if what == "extra":
        path.with_name(f"{path.name}.extra").write_bytes(b"more")
        return
    if not path.is_file() or path.is_symlink():
        return  # an earlier edit took it away
    if what == "bytes":
        path.write_bytes(edit_bytes(path.read_bytes(), how))
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "rename":
        path.rename(path.with_name(f"{path.name}.extra"))
    elif what in ("swap", "copy"):
        other = folder / how
        if other.is_file() and not other.is_symlink():
            mine, theirs = path.read_bytes(), other.read_bytes()
            path.write_bytes(theirs)
            if what == "swap":
                other.write_bytes(mine)
    else:
        path.unlink()
        if what == "pipe":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
