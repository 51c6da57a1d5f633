"""The GPU checks in order, and their runner: a child process that is restarted after an exception, crash or hang.

An illegal access leaves a GPU's context unusable, and a hang cannot be ended from inside. The child is this module as a
program (`python -m nsa.verify.gpu_check.runner ARGUMENTS`).
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

import torch

from nsa.errors import ConfigError
from nsa.verify.gpu_check import (
    compiled,
    decode,
    determinism,
    devices,
    environment,
    long_rows,
    parity,
    speed,
    training,
)
from nsa.verify.gpu_check.check_result import CheckResult, CheckStatus, GpuCheck, MeasuredTable
from nsa.verify.gpu_check.sizes import CheckSizes, on_gpu, rehearsal

SUBJECTS: dict[str, Callable[[CheckSizes], Iterator[GpuCheck]]] = {
    "environment": environment.checks, "parity": parity.parity_checks, "autocast": parity.autocast_checks,
    "causality": determinism.causality_checks, "determinism": determinism.determinism_checks,
    "compile": compiled.checks, "decode": decode.checks, "long": long_rows.checks, "devices": devices.checks,
    "training": training.checks, "speed": speed.checks,
}  # fmt: skip

SILENCE_TIMEOUT_S = 1800.0  # a child without a message for this long hangs
_EXIT_GRACE_S = 20.0
_MOST_CHARACTERS = 300
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
    return [check for name, checks in SUBJECTS.items() if name in wanted for check in checks(scope)]


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
    """Of the child; Triton reads TRITON_INTERPRET when it is imported."""
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
                        why = message["why"] or _exception_line(output)
                        self.traces[f"{check.subject}: {check.name}"] = "\n".join(_lines(output)[-_MOST_LINES:])
                        yield CheckResult(check.name, CheckStatus.FAILS, note=why, subject=check.subject,
                                  seconds=time.monotonic() - began)  # fmt: skip
                    else:
                        return
            if reached < first:  # the child cannot even start
                return
            first = reached + 1

    def _messages(self, first: int, output: IO[bytes]) -> Iterator[dict[str, Any]]:
        reading, writing = os.pipe()
        arguments = vars(self.request) | {"to": writing, "first": first}
        child = subprocess.Popen(
            [sys.executable, "-m", "nsa.verify.gpu_check.runner", json.dumps(arguments)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(writing,), env=dict(self.environ),
            start_new_session=True,  # Ctrl-C reaches only the parent, which then ends the child
        )  # fmt: skip
        os.close(writing)
        why, left = "", False
        try:
            with os.fdopen(reading, "rb", buffering=0) as pipe:
                waiting = b""
                while not left:
                    if not select.select([pipe], [], [], self.silence_s)[0]:
                        why = f"no message for {self.silence_s:.0f} s: killed"
                        break
                    read = pipe.read(1 << 16)
                    left = not read
                    *lines, waiting = (waiting + read).split(b"\n")
                    yield from map(json.loads, lines)
        finally:
            _end(child, grace_s=_EXIT_GRACE_S if left else 0.0)
        if child.returncode:
            if not why and child.returncode < 0:
                why = f"the process died of {signal.Signals(-child.returncode).name}"
            yield {"kind": "exited", "why": why}


def _end(child: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Kill the child and its process group after a grace period."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=grace_s)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _lines(output: IO[bytes]) -> list[str]:
    output.seek(0)
    return [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]


def _exception_line(output: IO[bytes]) -> str:
    """The exception of the last traceback: its first line that is not indented."""
    lines = _lines(output)
    begin = max((n for n, line in enumerate(lines) if line.startswith("Traceback")), default=-1)
    found = next((line for line in lines[begin + 1 :] if not line.startswith((" ", "\t"))), "it exited without output")
    return found[:_MOST_CHARACTERS]


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
