"""Fenced blocks of Markdown pages: read, listed with what they need, and run as a newcomer would.

`python -m tests.docs.blocks` prints how many blocks of each user page run from the wheels, and how many do not.
"""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from nsa_train.cli.main import app

ROOT = Path(__file__).parents[2]
ONLY_PARSED = {
    "install": "installs packages from an index",
    "gpu": "needs a GPU",
    "host": "needs other machines, an object store, the network or a daemon",
    "download": "downloads models or tasks",
}
"""Word after ```bash of a block that does not run in a test → the reason."""
SERVE = "serve"
"""Word of a block whose first line starts a server for the lines after it."""

_FENCE = re.compile(r"^```(bash|python) ?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_USER_SECTIONS = ("Start", "Use", "Operate")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    needs: str
    """Empty: runs anywhere. Else `SERVE` or a key of `ONLY_PARSED`."""
    code: str

    @property
    def runs(self) -> bool:
        return self.needs not in ONLY_PARSED


def blocks(path: Path, language: str = "bash") -> list[Block]:
    return [block for block in all_blocks(path) if block.language == language]


def all_blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [Block(text.count("\n", 0, m.start()) + 1, m[1], m[2], m[3]) for m in _FENCE.finditer(text)]


def user_pages() -> list[Path]:
    """README, the first page of the site and the pages that its contents list under Start, Use and Operate."""
    index = ROOT / "docs" / "index.md"
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", index.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    captions = {re.findall(r":caption: (\w+)", tree)[0]: tree.split("\n\n", 1)[1].split() for tree in trees}
    names = [name for section in _USER_SECTIONS for name in captions[section]]
    return [ROOT / "README.md", index, *(ROOT / "docs" / f"{name}.md" for name in names)]


def code_of(path: Path) -> list[str]:
    """Every code span and block of a page but those that install; comments of the page left out."""
    text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
    text = re.sub(r"^```bash install\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    fenced = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
    return [*fenced, *re.findall(r"`[^`\n]+`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))]


def run_page(
    page: Path,
    folder: Path,
    programs: Path,
    timeout_s: float,
    *,
    replace: Mapping[str, str] | None = None,
) -> str:
    """Run every block that runs here: the shell blocks in order, then the Python blocks in one process.

    Returns what they print.

    programs: folder of the `nsa` and `python` to use.
    replace: words of the page, each there once or more, and what to run instead, e.g. to train for fewer steps.
    """
    script = "set -euo pipefail\n"
    for block in filter(lambda block: block.runs, blocks(page)):
        script += f"echo '== {page.name} line {block.line}' >&2\n{_with_server(block)}\n"
    if examples := blocks(page, "python"):
        file = folder / f"{page.stem}.py"
        file.write_text("\n".join(f"# {page.name} line {block.line}\n{block.code}" for block in examples))
        script += f"echo '== {file.name}' >&2\npython {file.name}\n"
    for printed, instead in (replace or {}).items():
        assert printed in script, printed
        script = script.replace(printed, instead)
    (folder / "page.sh").write_text(script)
    left_out = ("CONFIG", "PYTHONPATH")
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("NSA_") and name not in left_out
    }
    environ = {**inherited, "PATH": f"{programs}:{inherited['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "page.sh"], cwd=folder, env=environ, text=True, capture_output=True, timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n--- stderr\n{done.stderr[-5000:]}"
    return done.stdout


def _with_server(block: Block) -> str:
    """The code of a block; the server of a `SERVE` block runs until the lines after it are done."""
    if block.needs != SERVE:
        return block.code
    first, _, requests = block.code.partition("\n")
    server = first.partition(" #")[0]
    (port,) = re.findall(r"--port (\d+)", server)
    wait = f"until curl -s -o server_answer http://127.0.0.1:{port}/; do kill -0 $server; sleep 1; done"
    return f"{server} &\nserver=$!\ntrap 'kill $server' EXIT\n{wait}\n{requests}kill $server\nwait $server\ntrap - EXIT"


def unknown_words(words: list[str]) -> str | None:
    """Return the part of a command (the words after `nsa`) that does not exist; None if all of it does."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        if not words:
            return "a command is missing"
        if words[0] not in command.commands:
            return f"nsa has no {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    return f"no such option: {used - known}" if used - known else None


def nsa_commands(code: str) -> list[list[str]]:
    """The words of every `nsa …` in a block, also in $(…); comments, redirections and what follows a pipe left out."""
    joined = code.replace("\\\n", " ")
    commands = []
    for line in joined.splitlines():
        for part in re.split(r"\|\||&&|[|;&)]|\$\(", line.partition(" #")[0]):
            words = part.split()
            if words[:1] == ["nsa"]:
                commands.append(words[1:])
    return commands


def tokenizer_command(path: Path) -> tuple[str, str]:
    """Corpus and file of the one `nsa data tokenizer train` in a text, also in a comment; no other word but a size."""
    text = path.read_text(encoding="utf-8")
    (words,) = re.findall(r"nsa data tokenizer train ([^#\n`]*)", text)
    source, file = re.sub(r" --vocab-size \d+", "", words).split()
    return source, file


def table() -> str:
    """Blocks of each user page by what is done with them, as Markdown."""
    rows = ["| page | blocks | run from the wheels | only parsed |", "|---|---|---|---|"]
    total = Counter[str]()
    for page in user_pages():
        every = all_blocks(page)
        parsed = Counter(block.needs for block in every if not block.runs)
        total += Counter(blocks=len(every), run=sum(block.runs for block in every), parsed=parsed.total())
        if every:
            why = f" ({', '.join(f'{count} {word}' for word, count in sorted(parsed.items()))})" if parsed else ""
            name = page.relative_to(ROOT).as_posix()
            rows.append(f"| {name} | {len(every)} | {len(every) - parsed.total()} | {parsed.total()}{why} |")
    rows.append(f"| **all** | **{total['blocks']}** | **{total['run']}** | **{total['parsed']}** |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
