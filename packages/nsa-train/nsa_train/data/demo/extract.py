"""Extracts plain text from the formats of Debian documentation: HTML, man pages, POD, dictd dictionaries."""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

from nsa_train.data.source.html_text import html_text, tidy

_DROPPED = frozenset({"script", "style", "nav", "head", "footer", "header", "select", "button", "svg", "noscript"})
_DROPPED_CLASSES = frozenset(
    {"sphinxsidebar", "related", "navheader", "navfooter", "headerlink", "toc", "toctree-wrapper", "footer", "header"}
)
_DICTD_DIGITS = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}


def extract_texts(root: Path, below: str) -> Iterator[tuple[str, str]]:
    """(path inside the package, text) of every supported file below a folder, sorted by path."""
    for path in sorted(p for p in (root / below).rglob("*") if p.is_file() and not p.is_symlink()):
        name = path.relative_to(root).as_posix()
        if "/_modules/" in name:  # source code rendered as HTML by Sphinx
            continue
        if name.endswith((".html", ".htm", ".html.gz")):
            yield name, page_text(_read(path))
        elif re.search(r"/man\d/[^/]+\.gz$", name):
            yield name, man_text(_read(path))
        elif name.endswith(".pod"):
            yield name, pod_text(_read(path))
        elif name.endswith(".index") and "/dictd/" in name:
            yield from _dictionary(path, name)


def _read(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def page_text(html: str) -> str:
    """Text of a documentation page without the sidebars, headers and anchors of Sphinx and DocBook."""
    return html_text(html, dropped=_DROPPED, dropped_classes=_DROPPED_CLASSES, dropped_characters="¶")


def man_text(roff: str) -> str:
    """Text of a man page: enough of roff for the man macros; requests and font changes are removed."""
    lines: list[str] = []
    literal = False
    for line in roff.replace("\\\n", "").splitlines():
        if line.startswith((".", "'")):
            request, _, rest = line[1:].strip().partition(" ")
            if request in ("nf", "EX", "fi", "EE"):
                literal = request in ("nf", "EX")
                lines.append("")
            elif request in ("SH", "SS", "TH", "Sh", "Ss"):
                lines += ["", _roff_words(rest), ""]
            elif request in ("PP", "P", "LP", "TP", "IP", "HP", "sp", "Pp", "It", "RS", "RE"):
                lines += ["", _roff_words(rest.split('" ')[0])] if request in ("IP", "It") else [""]
            elif request in ("B", "I", "BR", "IR", "BI", "IB", "RB", "RI", "SM", "SB"):
                lines.append(_roff_words(rest, join=len(request) == 2 and request not in ("SM", "SB")))
        elif line.strip() or literal:
            lines.append(_roff_characters(line))
        else:
            lines.append("")
    # A paragraph ends at a blank line.
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    return tidy("\n\n".join(re.sub(r"\s*\n\s*", " ", p) for p in paragraphs))


def _roff_words(rest: str, *, join: bool = False) -> str:
    words = [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', rest)]
    return _roff_characters(("" if join else " ").join(words))


def _roff_characters(text: str) -> str:
    text = re.sub(r'\\".*', "", text)
    text = re.sub(r"\\f(\[\w*\]|\(\w\w|\w)|\\s[+-]?\d|\\[&/,|^%:]|\\c$", "", text)
    named = {"aq": "'", "dq": '"', "lq": '"', "rq": '"', "em": "—", "en": "–", "bu": "•", "ha": "^", "ti": "~"}
    text = re.sub(r"\\\*?\((\w\w)|\\\*?\[(\w+)\]", lambda m: named.get((m[1] or m[2]).lower(), ""), text)
    return text.replace("\\-", "-").replace("\\e", "\\").replace("\\(", "(").replace("\\ ", " ").replace("\\~", " ")


def pod_text(pod: str) -> str:
    paragraphs: list[str] = []
    inside, block = False, False
    for paragraph in re.split(r"\n\s*\n", pod):
        command = re.match(r"=(\w+)\s*(.*)", paragraph, re.DOTALL)
        if command:
            name, rest = command.groups()
            inside = name != "cut"
            block = name in ("begin", "for") or (block and name != "end")
            if inside and not block and (name.startswith("head") or name == "item"):
                paragraphs.append(_pod_codes(rest))
        elif inside and not block:
            verbatim = paragraph[:1].isspace()
            paragraphs.append(paragraph if verbatim else re.sub(r"\s+", " ", _pod_codes(paragraph)))
    return tidy("\n\n".join(paragraphs))


def _pod_codes(text: str) -> str:
    named = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/"}
    text = re.sub(r"\b[XZ]<[^<>]*>", "", text)
    for _ in range(4):  # codes nest
        text = re.sub(r"\bE<(\w+)>", lambda m: named.get(m[1], ""), text)
        text = re.sub(r"\bL<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m[1] or m[2], text)
        text = re.sub(r"\b[BICFS](?:<<+\s+(.*?)\s+>>+|<([^<>]*)>)", lambda m: m[1] or m[2] or "", text)
    return text


def _dictionary(index: Path, name: str) -> Iterator[tuple[str, str]]:
    data = gzip.decompress(index.with_suffix(".dict.dz").read_bytes())
    seen: set[tuple[int, int]] = set()
    for line in index.read_text(encoding="utf-8", errors="replace").splitlines():
        word, offset, length = line.split("\t")[:3]
        start, size = _dictd_number(offset), _dictd_number(length)
        if word.startswith("00-database") or (start, size) in seen:
            continue
        seen.add((start, size))
        entry = data[start : start + size].decode("utf-8", "replace")
        paragraphs = re.split(r"\n\s*\n", entry)
        yield (
            f"{name}#{start}",
            tidy("\n\n".join(re.sub(r"\s+", " ", p).replace("{", "").replace("}", "") for p in paragraphs)),
        )


def _dictd_number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = value * 64 + _DICTD_DIGITS[digit]
    return value
