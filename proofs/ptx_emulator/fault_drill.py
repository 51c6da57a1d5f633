"""Plants faults in the PTX of our kernels and reports which the emulator finds, and which the numbers show.

A fault of planted_faults.toml names a kernel, a regular expression, which of the instructions that match it to change,
and the replacement (empty: the instruction is removed). `shared_bytes` takes bytes from the allocation instead.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from proofs.ptx_emulator.cases import run_case
from proofs.ptx_emulator.driver import EmulatorDriver, emulated
from proofs.ptx_emulator.parser import UnsupportedPtx

TABLE = Path(__file__).with_name("planted_faults.toml")


@dataclass(frozen=True)
class PtxFault:
    name: str
    kernel: str
    """Without the ending _kernel."""
    case: str
    kind: str
    """barrier, wait, mask, address, bounds, fragment, fence or arithmetic."""
    pattern: str = ""
    after: str = ""
    """Only instructions after the first that matches this one count."""
    nth: int = 0
    """Number of the matching instruction, from the end if negative."""
    replace: str = ""
    every: bool = False
    """Plant it in each of the matching instructions in turn, e.g. in every copy that the compiler made of a store."""
    gpu: str = "sm_80"
    shared_bytes: int = 0
    """Taken from the kernel's shared memory."""
    missed_because: str = ""
    """Reason why nothing shows it, if nothing does."""

    def plant(self, kernel: str, ptx: str) -> str:
        if kernel != f"{self.kernel}_kernel" or not self.pattern:
            return ptx
        lines = ptx.split("\n")
        code = [i for i, line in enumerate(lines) if line.startswith("\t") and line.lstrip()[:1] not in "./"]
        begin = next((i for i in code if re.search(self.after, lines[i])), len(lines)) if self.after else 0
        places = [i for i in code if i >= begin and re.search(self.pattern, lines[i])]
        if not -len(places) <= self.nth < len(places):
            raise LookupError(f"{self.name}: {len(places)} instructions of {kernel} match {self.pattern!r}")
        at = places[self.nth]
        lines[at] = re.sub(self.pattern, self.replace, lines[at]) if self.replace else ""
        return "\n".join(lines)


@dataclass(frozen=True)
class FaultResult:
    fault: PtxFault
    findings: tuple[str, ...]
    """Kinds of findings; "refused" where the emulator stopped with an error."""
    wrong_numbers: bool
    copies: int = 1
    """Instructions that it was planted in, one after the other."""
    missed_copies: tuple[int, ...] = ()
    """Those that nothing showed, by number."""

    @property
    def caught(self) -> bool:
        return (bool(self.findings) or self.wrong_numbers) and not self.missed_copies

    @property
    def shown_by(self) -> list[str]:
        return [*self.findings, *(["numbers"] if self.wrong_numbers else [])]

    def __str__(self) -> str:
        what = f"{self.fault.kernel} on {self.fault.gpu}: {self.fault.name}"
        shown = ", ".join(self.shown_by) or self.fault.missed_because
        copies = f", {self.copies} copies" * self.fault.every + f", missed: {self.missed_copies}" * bool(
            self.missed_copies
        )
        return f"{'caught' if self.caught else 'MISSED'}  {what}{copies}: {shown}"


def load_faults() -> list[PtxFault]:
    rows: list[dict[str, Any]] = tomllib.loads(TABLE.read_text())["fault"]
    return [PtxFault(**row) for row in rows]


def drill(faults: Iterable[PtxFault]) -> Iterator[FaultResult]:
    by_gpu: dict[str, list[PtxFault]] = {}
    for fault in faults:
        by_gpu.setdefault(fault.gpu, []).append(fault)
    for gpu, some in by_gpu.items():
        with emulated(gpu) as driver:
            for fault in some:
                yield run_in_every_copy(driver, fault) if fault.every else run_fault(driver, fault)


def run_in_every_copy(driver: EmulatorDriver, fault: PtxFault) -> FaultResult:
    results: list[FaultResult] = []
    while True:
        try:
            results.append(run_fault(driver, replace(fault, nth=len(results))))
        except LookupError:  # there are no more
            if not results:
                raise
            break
    findings = sorted({finding for result in results for finding in result.findings})
    missed = tuple(nth for nth, result in enumerate(results) if not result.caught)
    return FaultResult(fault, tuple(findings), any(r.wrong_numbers for r in results), len(results), missed)


def run_fault(driver: EmulatorDriver, fault: PtxFault) -> FaultResult:
    planted: set[str] = set()

    def edit(kernel: str, ptx: str) -> str:
        changed = fault.plant(kernel, ptx)
        if changed != ptx or (fault.shared_bytes and kernel == f"{fault.kernel}_kernel"):
            planted.add(kernel)
        return changed

    driver.replace_edit(edit)
    driver.less_shared = {f"{fault.kernel}_kernel": fault.shared_bytes}
    try:
        figures = run_case(fault.case, torch.bfloat16)
        wrong, kinds = not all(f.holds for f in figures), [str(each.kind) for each in driver.log.take()]
    except (UnsupportedPtx, RuntimeError, IndexError, OverflowError):  # nonsense that a wrong index led to
        wrong, kinds = False, [*map(str, (finding.kind for finding in driver.log.take())), "refused"]
    finally:
        driver.replace_edit(None)
        driver.less_shared = {}
    assert planted, f"{fault.name}: nothing was changed"
    return FaultResult(fault, tuple(sorted(set(kinds))), wrong)


def summary(results: list[FaultResult]) -> str:
    caught, n = sum(r.caught for r in results), len(results)
    by_findings, by_numbers = sum(bool(r.findings) for r in results), sum(r.wrong_numbers for r in results)
    return f"{caught} of {n} caught ({caught / n:.0%}): {by_findings} by findings, {by_numbers} by numbers."


def markdown(results: list[FaultResult]) -> str:
    rows = ["| fault | kernel | GPU | found by |", "|---|---|---|---|"]
    for result in results:
        shown = ", ".join(result.shown_by).replace("_", " ") or f"**missed**: {result.fault.missed_because}"
        name = result.fault.name + f" ({result.copies} copies)" * result.fault.every
        rows.append(f"| {name} | {result.fault.kernel} | {result.fault.gpu} | {shown} |")
    return "\n".join([*rows, "", summary(results)])
