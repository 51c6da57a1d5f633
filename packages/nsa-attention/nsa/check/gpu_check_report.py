"""Results of the GPU check, and their archive: one zip file that is complete at any moment and names nobody.

After every result the whole archive is replaced at once, so that a check that is interrupted or crashes leaves all
that it found. Names, folders and addresses of the machine are removed from every file in it.
"""

import getpass
import io
import json
import os
import platform
import re
import socket
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nsa.bench import report
from nsa.check.comparison import CheckResult, CheckStatus
from nsa.errors import ConfigError
from nsa.files import write_atomic

_SCHEMA = 2
_COLUMNS = ("verdict", "subject", "claim", "measured", "at most", "seconds", "note")
_REHEARSAL = "REHEARSAL"
REPORT, PAGE = "report.json", "report.md"
"""Files of the archive: everything that was measured, and the same to read."""
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
KINDS = ("installation", "self_check", "peaks", "host", "kernels", "generation", "figures", "memory")
"""Sections of the report that hold measurements."""


@dataclass(frozen=True)
class MeasuredTable:
    """A measurement for the report: its JSON record, and table rows and notes as text."""

    record: dict[str, Any]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kind: str = "figures"
    """Section of the report: gpu, or one of KINDS."""


@dataclass(frozen=True)
class GpuCheck:
    """A check that yields one or more results. If it crashes, the next one still runs."""

    subject: str
    name: str
    run: Callable[[], Iterator[CheckResult | MeasuredTable]]


@dataclass
class GpuCheckReport:
    command: str
    machine: dict[str, Any]
    rehearsal: bool = False
    full: bool = False
    only: tuple[str, ...] = ()
    complete: bool = False
    rows: list[CheckResult] = field(default_factory=list)
    gpu: dict[str, Any] | None = None
    measured: dict[str, list[MeasuredTable]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    traces: dict[str, str] = field(default_factory=dict)

    def add(self, result: CheckResult | MeasuredTable) -> None:
        if isinstance(result, CheckResult):
            self.rows.append(result)
        elif result.kind == "gpu":
            self.gpu = result.record
        else:
            self.measured[result.kind].append(result)

    def count(self, verdict: CheckStatus) -> int:
        return sum(row.verdict is verdict for row in self.rows)

    @property
    def holds(self) -> bool:
        return self.complete and self.count(CheckStatus.HOLDS) > 0 and not self.count(CheckStatus.FAILS)

    def flaws(self) -> list[str]:
        """Why this is not a complete result of a GPU; empty if it is."""
        reasons = ["a rehearsal without a GPU"] * self.rehearsal
        reasons += [f"only {', '.join(self.only)}"] * bool(self.only)
        return reasons + ["cut short"] * (not self.complete)

    def title(self) -> str:
        if self.rehearsal:
            return f"{_REHEARSAL} of the GPU check: a CPU, interpreted kernels, tiny shapes; no result"
        part = "" if not self.flaws() else f" ({'; '.join(self.flaws())}: no result)"
        return f"GPU check: {self.gpu['name'] if self.gpu else 'unknown GPU'}{part}"

    def summary(self) -> str:
        """Counts of results and total time, in one line."""
        checked = self.count(CheckStatus.HOLDS) + self.count(CheckStatus.FAILS)
        waiting = self.count(CheckStatus.NEEDS_GPU)
        return (
            f"{self.count(CheckStatus.HOLDS)} of {checked} rows hold, {sum(row.seconds for row in self.rows):.0f} s"
            + f"; {waiting} more need a GPU" * bool(waiting)
            + "; cut short" * (not self.complete)
        )

    def write(self, file: Path) -> None:
        """Replace the archive by one of everything so far."""
        raw, names = io.BytesIO(), names_here()
        with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in ((PAGE, names.remove(self.to_markdown())), (REPORT, self.to_json(names))):
                archive.writestr(zipfile.ZipInfo(name, _ZIP_TIME), text, zipfile.ZIP_DEFLATED)
        write_atomic(file, raw.getvalue())

    def to_json(self, names: "NameRemover") -> str:
        body = asdict(self) | {"schema": _SCHEMA, "title": self.title(), "holds": self.holds}
        del body["measured"]
        body |= {kind: [table.record for table in tables] for kind, tables in self.measured.items()}
        return json.dumps(names.remove_everywhere(body), indent=1, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        machine = self.machine | ({"gpu": self.gpu} if self.gpu else {})
        lines = [f"# {self.title()}", "", f"`{self.command}`", "", report.machine_line(machine), ""]
        lines += [f"{self.summary()}.", "", *report.to_markdown_table(_COLUMNS, [cells(row) for row in self.rows]), ""]
        for kind, tables in self.measured.items():
            rows = [tuple(row) for table in tables for row in table.rows]
            if rows:
                lines += ["", *report.to_markdown_table(_TABLE_COLUMNS[kind], rows), ""]
            lines += dict.fromkeys(note for table in tables for note in table.notes)
        for name, trace in self.traces.items():
            lines += ["", f"## {name}", "", "```", trace, "```"]
        return "\n".join(lines).rstrip() + "\n"


_TABLE_COLUMNS: dict[str, tuple[str, ...]] = {
    "figures": (*report.COLUMNS, "modelled"),
    "memory": report.MEMORY_COLUMNS,
    "host": ("call", "tokens", "launches", "eager", "captured"),
    "kernels": ("pass", "kernel", "launches", "measured", "modelled"),
    "generation": ("model", "prompt", "eager", "captured"),
}


def cells(row: CheckResult) -> tuple[str, ...]:
    limit = "" if row.limit is None else f"{row.limit:g}"
    note = row.note.replace("|", "/").replace("\n", " ")
    measured = "–" if row.measured is None else row.measured
    measured = measured if isinstance(measured, str) else f"{measured:.3g}"
    return row.verdict, row.subject, row.claim, measured, limit, f"{row.seconds:.1f}", note


def read_report(archive: Path) -> dict[str, Any]:
    """Read the report in an archive, of a whole check or not."""
    try:
        with zipfile.ZipFile(archive) as files:
            body: dict[str, Any] = json.loads(files.read(REPORT))
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ConfigError(
            f"{archive} is not an archive of the GPU check ({error}). `nsa gpu-check --full --bundle FILE` writes one."
        ) from None
    return body


_NAME_VARIABLES = (
    "USER", "LOGNAME", "USERNAME", "SUDO_USER", "HOSTNAME", "HOST", "SLURMD_NODENAME", "NODE_NAME", "POD_NAME",
)  # fmt: skip
_NOBODY = frozenset(
    ("root", "user", "ubuntu", "admin", "localhost", "nsa", "triton", "torch", "cuda", "python", "gpu", "cpu", "dense",
     "linux", "base", "wide", "paper", "portable", "reference")
)  # fmt: skip
"""Names of accounts and machines that identify nobody and that the report needs as words."""
_PATH = re.compile(r"(?<![\w./…])~?/(?:[^\s/\"'`<>:,;|()\[\]{}]+/)+[^\s/\"'`<>:,;|()\[\]{}]*")
_QUOTED_PATH = re.compile(r"(?<=\")~?/[^\"\n]+(?=\")|(?<=')~?/[^'\n]+(?=')")
"""With spaces too, as in tracebacks."""
_PACKAGES = re.compile(r"(?:site-packages|dist-packages|packages/nsa-attention|packages/nsa-train)/")
_NUMBERS = re.compile(
    r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"  # UUIDs, as GPUs have them
    r"|(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"  # IPv4
    r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}:{1,2}){4,7}[0-9a-fA-F]{1,4}(?![\w:])"  # IPv6 and MAC
    r"|[\w.+-]+@[\w-]+\.[\w.-]+"  # e-mail
)


@dataclass(frozen=True)
class NameRemover:
    """Removes from text what names the machine, its users and its folders."""

    folders: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def of_machine(cls, environ: Mapping[str, str]) -> "NameRemover":
        names = {socket.gethostname(), platform.node()}
        with suppress(OSError, KeyError, ImportError):  # an account without an entry
            names.add(getpass.getuser())
        names |= {environ.get(variable, "") for variable in _NAME_VARIABLES}
        names |= {name.partition(".")[0] for name in names}
        folders = {os.getcwd(), str(Path.home()), environ.get("HOME", ""), environ.get("TMPDIR", "")}
        telling = (name for name in names if len(name) > 2 and name.lower() not in _NOBODY)
        return cls(_longest_first(folder for folder in folders if len(folder) > 1), _longest_first(telling))

    def remove(self, text: str) -> str:
        text = _PATH.sub(_end_of_path, _QUOTED_PATH.sub(_end_of_path, text))
        for folder in self.folders:
            text = text.replace(folder, "…")
        for name in self.names:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])(?:\.[a-z][\w-]*)*", "…", text)
        return _NUMBERS.sub("…", text)

    def remove_everywhere(self, content: Any) -> Any:
        """Remove them from all text in a JSON document before it is encoded, which would put letters before a path."""
        if isinstance(content, str):
            return self.remove(content)
        if isinstance(content, dict):
            return {name: self.remove_everywhere(value) for name, value in content.items()}
        return [self.remove_everywhere(value) for value in content] if isinstance(content, list | tuple) else content


@cache
def names_here() -> NameRemover:
    return NameRemover.of_machine(os.environ)


def _longest_first(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(words), key=len, reverse=True))


def _end_of_path(path: re.Match[str]) -> str:
    """The module of an installed package, the name of a file, nothing of a folder."""
    inside = _PACKAGES.split(path[0])
    name = inside[-1] if len(inside) > 1 else path[0].rpartition("/")[2]
    return f"…/{name}" if "." in name else "…"
