"""The GPU checks in order, and their runner: a child process that is restarted after an exception, crash or hang.

An illegal access leaves a GPU's context unusable, and a hang cannot be ended from inside. The child is this module as a
program (`python -m nsa.check.gpu_check.runner ARGUMENTS`).
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import entry_points
from typing import IO, Any

import torch

from nsa.check.gpu_check import (
    compiled,
    decode,
    determinism,
    devices,
    environment,
    long_rows,
    parity,
    self_check,
    speed,
    training,
)
from nsa.check.gpu_check.check_result import CheckResult, CheckStatus, GpuCheck, MeasuredTable
from nsa.check.gpu_check.sizes import CheckSizes, on_gpu, rehearsal
from nsa.errors import ConfigError
from nsa.kernels.self_check.child import child_messages, exception_line, output_lines

SUBJECTS: dict[str, Callable[[CheckSizes], Iterator[GpuCheck]]] = {
    "environment": environment.checks, "self-check": self_check.checks, "parity": parity.parity_checks,
    "autocast": parity.autocast_checks,
    "causality": determinism.causality_checks, "determinism": determinism.determinism_checks,
    "compile": compiled.checks, "decode": decode.checks, "long": long_rows.checks, "devices": devices.checks,
    "training": training.checks, "speed": speed.checks,
}  # fmt: skip

ENTRY_POINT_GROUP = "nsa.gpu_checks"
"""Subject → function of `CheckSizes` that yields checks of another package, e.g. of a trainer."""

SILENCE_TIMEOUT_S = 1800.0  # a child without a message for this long hangs
_MOST_LINES = 40


def check_sizes(*, rehearse: bool, full: bool) -> CheckSizes:
    return rehearsal(full=full) if rehearse else on_gpu(torch.device("cuda"), full=full)


def select_checks(scope: CheckSizes, only: Iterable[str] = ()) -> list[GpuCheck]:
    """The checks of these subjects, or of all, in their order."""
    wanted = list(only) or list(SUBJECTS)
    for name in wanted:
        if name not in SUBJECTS:
            raise ConfigError(f"--only is {name!r}: there is no such subject. Use one of: {', '.join(SUBJECTS)}.")
    if "speed" in only and not scope.full:
        raise ConfigError("--only speed without --full times nothing: the benchmark is what --full adds. Add --full.")
    return [check for name in SUBJECTS if name in wanted for check in _checks_of(name, scope)]


def _checks_of(subject: str, scope: CheckSizes) -> Iterator[GpuCheck]:
    """The checks of this package, and those that installed packages register for the subject."""
    yield from SUBJECTS[subject](scope)
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=subject):
        yield from entry.load()(scope)


@dataclass(frozen=True)
class GpuCheckRequest:
    """Options of `nsa gpu-check` that the child needs."""

    rehearse: bool = False
    full: bool = False
    only: tuple[str, ...] = ()


@dataclass
class GpuCheckRunner:
    request: GpuCheckRequest
    checks: list[GpuCheck]
    environ: Mapping[str, str]
    """Environment of the child; Triton reads TRITON_INTERPRET when it is imported."""
    silence_s: float = SILENCE_TIMEOUT_S
    traces: dict[str, str] = field(default_factory=dict)
    """By check that ended the child: the last lines of its output."""

    def run(self) -> Iterator[GpuCheck | CheckResult | MeasuredTable]:
        """Yield each check as it begins, then its results; a check that ends the child yields a failed result."""
        first = 0
        while first < len(self.checks):
            reached, began = -1, time.monotonic()
            with tempfile.TemporaryFile() as output:
                for message in self._messages(first, output):
                    if message["kind"] == "begin":
                        reached, began = message["number"], time.monotonic()
                        yield self.checks[reached]
                    elif message["kind"] == "result":
                        yield CheckResult(**message["result"] | {"verdict": CheckStatus(message["result"]["verdict"])})
                    elif message["kind"] == "measured":
                        yield MeasuredTable(**message["measured"])
                    elif message["kind"] == "exited":
                        check = self.checks[max(reached, first)]
                        why = message["why"] or exception_line(output)
                        self.traces[f"{check.subject}: {check.name}"] = "\n".join(output_lines(output)[-_MOST_LINES:])
                        yield CheckResult(check.name, CheckStatus.FAILS, note=why, subject=check.subject,
                                  seconds=time.monotonic() - began)  # fmt: skip
                    else:
                        return
            if reached < first:  # the child cannot even start
                return
            first = reached + 1

    def _messages(self, first: int, output: IO[bytes]) -> Iterator[dict[str, Any]]:
        command = [sys.executable, "-m", "nsa.check.gpu_check.runner"]
        return child_messages(command, vars(self.request) | {"first": first}, self.environ, output, self.silence_s)


def main(arguments: str) -> None:
    """In the child: run the checks and write each result to a pipe at once.

    `arguments`: JSON with the pipe to write to, what to run, and the first check.
    """
    to, rehearse, full, only, first = (
        json.loads(arguments)[key] for key in ("to", "rehearse", "full", "only", "first")
    )
    torch.set_float32_matmul_precision("highest")  # no TF32 in what kernels are compared with
    with os.fdopen(to, "w", encoding="utf-8") as pipe:

        def write(**message: Any) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        for number, check in enumerate(select_checks(check_sizes(rehearse=rehearse, full=full), only)):
            if number < first:
                continue
            write(kind="begin", number=number)
            begin = time.perf_counter()
            for result in check.run():
                if isinstance(result, CheckResult):
                    now = time.perf_counter()
                    write(kind="result", result=asdict(replace(result, subject=check.subject, seconds=now - begin)))
                    begin = now
                else:
                    write(kind="measured", measured=asdict(result))
        write(kind="done")


if __name__ == "__main__":
    main(sys.argv[1])
