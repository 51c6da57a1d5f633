"""Runs the checks in a child and goes on after whatever happens to it: an exception, a crash, a hang."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from nsa.verify.gpu_check.check_result import CheckResult, CheckStatus, GpuCheck, MeasuredTable

SILENCE_S = 1800.0  # no check is silent for longer: then it hangs
_PATIENCE_S = 20.0
_LAST_WORDS = 300  # characters
_MOST_LINES = 40


@dataclass(frozen=True)
class GpuCheckRequest:
    """What the child is to do."""

    rehearse: bool = False
    full: bool = False
    only: tuple[str, ...] = ()


@dataclass
class GpuCheckRunner:
    asked: GpuCheckRequest
    checks: list[GpuCheck]
    environ: Mapping[str, str]
    """Of the child: whether Triton interprets is decided when it is imported."""
    silence_s: float = SILENCE_S
    traces: dict[str, str] = field(default_factory=dict)
    """By check that died: the end of what the child said."""

    def run(self) -> Iterator[GpuCheck | CheckResult | MeasuredTable]:
        """Each check as it begins, then its results; a check that dies yields a row that fails."""
        first = 0
        while first < len(self.checks):
            reached, began = -1, time.monotonic()
            with tempfile.TemporaryFile() as said:
                for message in self._messages(first, said):
                    if message["kind"] == "begin":
                        reached, began = message["number"], time.monotonic()
                        yield self.checks[reached]
                    elif message["kind"] == "row":
                        yield CheckResult(**message["row"] | {"verdict": CheckStatus(message["row"]["verdict"])})
                    elif message["kind"] == "measured":
                        yield MeasuredTable(**message["measured"])
                    elif message["kind"] == "dead":
                        check = self.checks[max(reached, first)]
                        why = message["why"] or _last_words(said)
                        self.traces[f"{check.subject}: {check.name}"] = "\n".join(_lines(said)[-_MOST_LINES:])
                        yield CheckResult(check.name, CheckStatus.FAILS, note=why, subject=check.subject,
                                  seconds=time.monotonic() - began)  # fmt: skip
                    else:
                        return
            if reached < first:  # it cannot even start, and would not the next time
                return
            first = reached + 1

    def _messages(self, first: int, said: IO[bytes]) -> Iterator[dict[str, Any]]:
        reading, writing = os.pipe()
        asked = vars(self.asked) | {"to": writing, "first": first}
        child = subprocess.Popen(
            [sys.executable, "-m", "nsa.verify.gpu_check.worker", json.dumps(asked)],
            stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=(writing,), env=dict(self.environ),
            start_new_session=True,  # Ctrl-C reaches the parent, which ends the child after writing down what it has
        )  # fmt: skip
        os.close(writing)
        why, left = "", False
        try:
            with os.fdopen(reading, "rb", buffering=0) as pipe:
                waiting = b""
                while not left:
                    if not select.select([pipe], [], [], self.silence_s)[0]:
                        why = f"no sign of life for {self.silence_s:.0f} s: it was killed"
                        break
                    read = pipe.read(1 << 16)
                    left = not read
                    *lines, waiting = (waiting + read).split(b"\n")
                    yield from map(json.loads, lines)
        finally:
            _end(child, patience_s=_PATIENCE_S if left else 0.0)
        if child.returncode:
            if not why and child.returncode < 0:
                why = f"the process died of {signal.Signals(-child.returncode).name}"
            yield {"kind": "dead", "why": why}


def _end(child: "subprocess.Popen[bytes]", patience_s: float) -> None:
    """The child and whatever it started; one that is about to leave by itself gets a moment."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=patience_s)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _lines(said: IO[bytes]) -> list[str]:
    said.seek(0)
    return [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]


def _last_words(said: IO[bytes]) -> str:
    """The exception of the last traceback: its first line that is not indented."""
    lines = _lines(said)
    begin = max((n for n, line in enumerate(lines) if line.startswith("Traceback")), default=-1)
    found = next((line for line in lines[begin + 1 :] if not line.startswith((" ", "\t"))), "it died without a word")
    return found[:_LAST_WORDS]
