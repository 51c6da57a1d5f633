"""Results of the checks of `nsa gpu-check`, and their report: two files, and whether they count as a result."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nsa.bench import report
from nsa.check.comparison import CheckResult, CheckStatus
from nsa.errors import ConfigError

_SCHEMA = 1
_RESULTS = Path("bench/results")
INCOMPLETE_RESULTS = Path("artifacts/gpu_check")
_COLUMNS = ("verdict", "subject", "claim", "measured", "at most", "seconds", "note")
_REHEARSAL = "REHEARSAL"


@dataclass(frozen=True)
class MeasuredTable:
    """A measurement for the report: its JSON record, and table rows and notes as text."""

    record: dict[str, Any]
    rows: list[tuple[str, ...]]
    notes: list[str]
    kind: str = "figures"
    """Section of the report: gpu, peaks, figures or memory."""


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
    peaks: list[MeasuredTable] = field(default_factory=list)
    figures: list[MeasuredTable] = field(default_factory=list)
    memory: list[MeasuredTable] = field(default_factory=list)
    traces: dict[str, str] = field(default_factory=dict)

    def add(self, result: CheckResult | MeasuredTable) -> None:
        if isinstance(result, CheckResult):
            self.rows.append(result)
        elif result.kind == "gpu":
            self.gpu = result.record
        else:
            getattr(self, result.kind).append(result)

    def count(self, verdict: CheckStatus) -> int:
        return sum(row.verdict is verdict for row in self.rows)

    @property
    def holds(self) -> bool:
        return self.complete and self.count(CheckStatus.HOLDS) > 0 and not self.count(CheckStatus.FAILS)

    def flaws(self) -> list[str]:
        """Why this is not a complete result of a GPU; empty if it is."""
        return _flaws(vars(self))

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

    def stem(self) -> str:
        if self.rehearsal:
            return "gpu_check_rehearsal"
        name = re.sub(r"[^a-z0-9]+", "_", (self.gpu["name"] if self.gpu else "unknown").lower()).strip("_")
        return "gpu_" + name.removeprefix("nvidia_").removeprefix("amd_") + ("_incomplete" if self.flaws() else "")

    def write(self, folder: Path | None) -> tuple[Path, Path]:
        folder = folder or (INCOMPLETE_RESULTS if self.flaws() else _RESULTS)
        folder.mkdir(parents=True, exist_ok=True)
        files = folder / f"{self.stem()}.json", folder / f"{self.stem()}.md"
        for file, text in zip(files, (self.to_json(), self.to_markdown()), strict=True):
            file.write_text(text, encoding="utf-8")
        return files

    def to_json(self) -> str:
        body = asdict(self) | {"schema": _SCHEMA, "title": self.title(), "holds": self.holds}
        for kind in ("peaks", "figures", "memory"):
            body[kind] = [measured.record for measured in getattr(self, kind)]
        return json.dumps(body, indent=1, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        machine = self.machine | ({"gpu": self.gpu} if self.gpu else {})
        lines = [f"# {self.title()}", "", f"`{self.command}`", "", report.machine_line(machine), ""]
        lines += [f"{self.summary()}.", "", *report.to_markdown_table(_COLUMNS, [cells(row) for row in self.rows]), ""]
        lines += [note for peaks in self.peaks for note in peaks.notes]
        if self.figures:
            columns = (*report.COLUMNS, "modelled")
            lines += ["", *report.to_markdown_table(columns, [tuple(row) for m in self.figures for row in m.rows]), ""]
            lines += dict.fromkeys(note for measured in self.figures for note in measured.notes)
        if self.memory:
            lines += [
                "",
                *report.to_markdown_table(report.MEMORY_COLUMNS, [tuple(row) for m in self.memory for row in m.rows]),
            ]
        for name, trace in self.traces.items():
            lines += ["", f"## {name}", "", "```", trace, "```"]
        return "\n".join(lines).rstrip() + "\n"


def cells(row: CheckResult) -> tuple[str, ...]:
    limit = "" if row.limit is None else f"{row.limit:g}"
    note = row.note.replace("|", "/").replace("\n", " ")
    return row.verdict, row.subject, row.claim, _number(row.measured), limit, f"{row.seconds:.1f}", note


def _number(measured: float | str | None) -> str:
    if measured is None:
        return "–"
    return measured if isinstance(measured, str) else f"{measured:.3g}"


def _flaws(body: dict[str, Any]) -> list[str]:
    reasons = ["a rehearsal without a GPU"] if body["rehearsal"] else []
    reasons += [f"only {', '.join(body['only'])}"] if body["only"] else []
    return reasons + ([] if body["complete"] else ["cut short"])


def read_result(file: Path) -> dict[str, Any]:
    """Read a complete report of a real GPU; refuse a rehearsal, a selection of subjects or an interrupted run."""
    body: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if reasons := _flaws(body):
        raise ConfigError(
            f"{file} is no result ({'; '.join(reasons)}): it is not a complete check of a GPU. "
            f"Run nsa gpu-check to its end on one, without --rehearse and --only."
        )
    return body


def refuse_rehearsal_among_results(folder: Path | None) -> None:
    if folder is not None and folder.absolute().parts[-2:] == _RESULTS.parts:
        raise ConfigError(
            f"--out is {folder} and --rehearse was given: that folder is for results of GPUs. "
            f"Leave --out out (then {INCOMPLETE_RESULTS} is used) or name another folder."
        )
