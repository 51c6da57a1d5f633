"""Child processes of ours that exchange JSON lines with their parent: a crash, a hang or an exception becomes a reason.

An illegal access leaves a GPU's context unusable, memory above a limit would end the parent, and a hang cannot be ended
from inside. The child gets JSON lines on stdin and answers with JSON lines on stdout; all else that it prints is kept.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Self

from nsa.errors import NSAError
from nsa.files import readable

_EXIT_S = 20.0  # how long a child may take to exit once it has closed its output
_WATCH_S = 0.05
_MOST_CHARACTERS = 300


class ChildFailed(NSAError):
    """A child process died, took too long or broke a limit; the text says which."""

    returncode: int | None = None
    """Of the child, if it died; the negative of the signal's number if one killed it."""


class ChildTimeout(ChildFailed):
    """A child process sent nothing for too long."""


class ChildProcess:
    """A child process, seen from its parent. The end of the block, or of this object, kills it and its descendants."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        """`name`: what failed, in messages. `command`: arguments of this interpreter, e.g. ("-m", "package.module")."""
        self._name = name
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env=environ,
            start_new_session=True,  # so that its descendants can be killed with it, and Ctrl-C is left to the parent
        )
        self.pid = self._process.pid
        self._unread = b""
        self._close = weakref.finalize(self, _end, self._process, self._output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self._close.alive

    def close(self) -> None:
        self._close()

    def send(self, **message: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has already exited, and its exit code says why
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, silence_s: float, watch: Callable[[], str | None] = lambda: None) -> dict[str, Any] | None:
        """Return the next message, None at the end of the child's output.

        Raises `ChildFailed` after `silence_s` without a message, or with the reason that `watch` gives to end the
        child; it is called every few milliseconds.
        """
        assert self._process.stdout is not None
        deadline, stdout = time.monotonic() + silence_s, self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if (why := watch()) is not None:
                raise ChildFailed(f"{self._name} was ended {why}")
            if time.monotonic() > deadline:
                raise ChildTimeout(f"{self._name} sent no message for {silence_s:.0f} s")
            if readable(stdout, _WATCH_S):
                read = os.read(stdout, 1 << 16)
                if not read:
                    return None
                self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def messages(
        self,
        *,
        silence_s: float = float("inf"),
        limit_s: float = float("inf"),
        watch: Callable[[], str | None] = lambda: None,
    ) -> Iterator[dict[str, Any]]:
        """Yield messages until the child exits. Raises `ChildFailed` as `receive` does, after `limit_s` in all, and if
        the child died or its exit code is not 0."""
        deadline = time.monotonic() + limit_s

        def late_or_watched() -> str | None:
            return f"after {limit_s:.0f} s" if time.monotonic() > deadline else watch()

        while (message := self.receive(silence_s, late_or_watched)) is not None:
            yield message
        if why := self.failure():
            error = ChildFailed(why)
            error.returncode = self._process.returncode
            raise error

    def failure(self) -> str | None:
        """Why the child, which has closed its output, failed; None if it did not."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        code = self._process.poll()
        if code is None:
            return f"{self._name} closed its output and did not exit"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            guess = ": the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
            return f"{self._name} was killed by {name}{guess}"
        return f"{self._name} ended with exit code {code}: {self._last_exception()}" if code else None

    def output_lines(self) -> list[str]:
        """Lines that the child printed, without empty ones."""
        self._output.seek(0)
        return [line for line in self._output.read().decode(errors="replace").splitlines() if line.strip()]

    def _last_exception(self) -> str:
        """The exception of the last traceback: its first line that is not indented; without one the last line."""
        lines = self.output_lines()
        begin = max((n for n, line in enumerate(lines) if line.startswith("Traceback")), default=len(lines) - 2)
        lines = [line for line in lines[max(0, begin + 1) :] if not line.startswith((" ", "\t"))]
        return (lines or ["it printed no reason"])[0][:_MOST_CHARACTERS]


def _end(process: "subprocess.Popen[bytes]", output: IO[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, output):
        assert pipe is not None
        with suppress(BrokenPipeError):  # an unread request is still in the buffer
            pipe.close()


@contextmanager
def message_sender() -> Iterator[Callable[..., None]]:
    """Function for the child that sends its keyword arguments. What libraries print to stdout goes to stderr."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)

        def send(**message: object) -> None:
            out.write(json.dumps(message) + "\n")

        yield send


def answer_parent(act: Callable[..., None]) -> None:
    """Call `act`, in the child, with a function that sends messages and the keywords of one request.

    The process and its descendants end with their parent, which then closes stdin.
    """
    request = json.loads(sys.stdin.readline())
    with message_sender() as send:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        act(send, **request)


def _end_with_parent() -> None:
    while os.read(0, 1 << 16):
        pass
    os.killpg(0, signal.SIGKILL)
