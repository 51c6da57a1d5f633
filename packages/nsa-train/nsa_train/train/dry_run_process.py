"""Runs the dry run of preflight in a child process with a limit on memory and time.

The parent sums up the memory of the child and its descendants and kills them above the limit; the child asks the
kernel to be the first victim of an out-of-memory kill. A child that dies, for whatever reason, becomes a failed attempt
with that reason. As a program this module is that child: a request on stdin, JSON lines on stdout; it ends when stdin
is closed, so it does not outlive its parent.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from nsa.files import readable, remove_scratch_of
from nsa_train.config.schema import RunConfig
from nsa_train.planning.hardware import GIB, HardwareDevice, HardwareTarget
from nsa_train.planning.host_memory import process_memory
from nsa_train.planning.preflight_facts import DryRun, DryRunAttempt
from nsa_train.train.child_messages import last_line, message_sender

_POLL_S = 0.05
_EXIT_WAIT_S = 10.0
_PARTS = ("data", "model", "step", "checkpoint")


@dataclass(frozen=True)
class DryRunLimits:
    memory_bytes: int
    """Limit for the child and its descendants together."""
    time_s: float


@dataclass(frozen=True)
class DryRunRequest:
    """The arguments of `dry_run`, as JSON on the child's stdin."""

    config: dict[str, Any]
    vocab_size: int
    target: dict[str, Any]
    fetch_remote: bool
    no_data: str | None = None
    no_real_step: str | None = None

    @classmethod
    def of(cls, config: RunConfig, vocab_size: int, target: HardwareTarget, **more: Any) -> "DryRunRequest":
        return cls(config.model_dump(mode="json"), vocab_size, asdict(target), **more)

    def run_config(self) -> RunConfig:
        return RunConfig.model_validate(self.config)

    def hardware(self) -> HardwareTarget:
        return HardwareTarget(**{**self.target, "device": HardwareDevice(**self.target["device"])})


@dataclass
class _DryRunProgress:
    """What the child has reported so far."""

    attempts: dict[str, DryRunAttempt] = field(default_factory=dict)
    result: DryRun | None = None

    def read(self, line: bytes, log: Callable[[str], None]) -> None:
        message = json.loads(line)
        if "log" in message:
            log(message["log"])
        elif "done" in message:
            self.attempts[message["done"]] = DryRunAttempt(**message["attempt"])
        else:
            result = message["result"]
            self.result = DryRun(**{part: DryRunAttempt(**result[part]) for part in _PARTS}, step_s=result["step_s"])

    def died(self, why: str) -> DryRun:
        """The part that was being tried has failed; those after it were not tried."""
        failed = next(part for part in _PARTS if part not in self.attempts)
        rest = DryRunAttempt(not_tried=f"the dry run ended before it: see the rule {failed}")
        known = {**self.attempts, failed: DryRunAttempt(problem=why)}
        data, model, step, checkpoint = (known.get(part, rest) for part in _PARTS)
        return DryRun(data, model, step, checkpoint)


def dry_run_in_child(request: DryRunRequest, limits: DryRunLimits, log: Callable[[str], None]) -> DryRun:
    """The dry run's result, even if its process dies; its progress goes to `log`."""
    progress = _DryRunProgress()
    with tempfile.TemporaryFile() as errors:
        # A session of its own, so that its prefetching process can be killed with it.
        child = subprocess.Popen(
            [sys.executable, "-m", "nsa_train.train.dry_run_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            why = _follow(child, request, limits, progress, log)
            if why is None and progress.result is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_EXIT_WAIT_S)  # its exit code and what it prints say why
        finally:
            _kill(child)
            remove_scratch_of(child.pid, Path(request.run_config().train.out_dir))
        if progress.result is not None:
            return progress.result
        return progress.died(why or _exit_reason(child.returncode, errors))


def _follow(
    child: subprocess.Popen[bytes],
    request: DryRunRequest,
    limits: DryRunLimits,
    progress: _DryRunProgress,
    log: Callable[[str], None],
) -> str | None:
    """Read the child's messages until it closes its output; returns why it must be killed before that, or None."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:  # it has already exited; its exit code says more
        return None
    deadline, output, text = time.monotonic() + limits.time_s, child.stdout.fileno(), b""
    while True:
        if readable(output, _POLL_S):
            read = os.read(output, 65536)
            if not read:
                return None
            *lines, text = (text + read).split(b"\n")
            for line in lines:
                progress.read(line, log)
        if (used := process_memory(child.pid)) > limits.memory_bytes:
            return (
                f"the dry run was ended when it held {used / GIB:.2f} GiB: its limit is the "
                f"{limits.memory_bytes / GIB:.2f} GiB that this machine can spare"
            )
        if time.monotonic() > deadline:
            return f"the dry run was ended because it had not finished within {limits.time_s:.0f} s (--timeout)"


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and all processes of its session."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # the buffered request has no reader any more
            pipe.close()


def _exit_reason(code: int, errors: IO[bytes]) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        guess = ": the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
        return f"the process of the dry run was killed by {name}{guess}"
    return f"the process of the dry run ended with exit code {code}: {last_line(errors)}"


def _main() -> None:
    Path("/proc/self/oom_score_adj").write_text("1000")
    request = DryRunRequest(**json.loads(sys.stdin.buffer.readline()))
    config, target = request.run_config(), request.hardware()
    with message_sender() as send:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        from nsa_train.train.dry_run import dry_run

        result = dry_run(
            config,
            request.vocab_size,
            target,
            fetch_remote=request.fetch_remote,
            log=lambda text: send(log=text),
            done=lambda part, attempt: send(done=part, attempt=asdict(attempt)),
            no_data=request.no_data,
            no_real_step=request.no_real_step,
        )
        send(result=asdict(result))


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _main()
