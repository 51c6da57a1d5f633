"""Child processes that send JSON lines over a pipe: a crash, a hang or an exception becomes a reason, not an exit.

An illegal access leaves a GPU's context unusable, and a hang cannot be ended from inside.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from nsa.files import readable

EXIT_GRACE_S = 20.0
_MOST_CHARACTERS = 300
_LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "NSA_")


def clean_environment(*, interpret: bool) -> dict[str, str]:
    """This process's variables without torchrun's and without settings of this package: for one process on one device.

    `interpret`: whether Triton's kernels are interpreted there.
    """
    environment = {
        name: text
        for name, text in os.environ.items()
        if name not in (*_LAUNCHER_VARIABLES, "TRITON_INTERPRET") and not name.startswith(_LAUNCHER_PREFIXES)
    }
    return environment | ({"TRITON_INTERPRET": "1"} if interpret else {})


def child_messages(
    command: Sequence[str], arguments: Mapping[str, Any], environ: Mapping[str, str], output: IO[bytes],
    silence_s: float,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Run `command` with the arguments as JSON, the pipe's descriptor among them as "to"; yield what it writes there.

    If it fails, the last message is {"kind": "exited", "why": …}: killed after `silence_s` without a message, or by
    which signal it died; "" for an exit code other than 0. What it prints goes to `output`.
    """
    reading, writing = os.pipe()
    child = subprocess.Popen(
        [*command, json.dumps({**arguments, "to": writing})],
        stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(writing,), env=dict(environ),
        start_new_session=True,  # Ctrl-C reaches only the parent, which then ends the child
    )  # fmt: skip
    os.close(writing)
    why, left = "", False
    try:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            waiting = b""
            while not left:
                if not readable(pipe, silence_s):
                    why = f"no message for {silence_s:.0f} s: killed"
                    break
                read = pipe.read(1 << 16)
                left = not read
                *lines, waiting = (waiting + read).split(b"\n")
                yield from map(json.loads, lines)
    finally:
        _end(child, grace_s=EXIT_GRACE_S if left else 0.0)
    if child.returncode:
        if not why and child.returncode < 0:
            why = f"the process died of {signal.Signals(-child.returncode).name}"
        yield {"kind": "exited", "why": why}


@contextmanager
def message_writer(descriptor: int) -> Iterator[Callable[..., None]]:
    """In the child: a function that writes its keywords as one line to the pipe, at once."""
    with os.fdopen(descriptor, "w", encoding="utf-8") as pipe:

        def write(**message: Any) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        yield write


def _end(child: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Kill the child and its process group after a grace period."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=grace_s)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def output_lines(output: IO[bytes]) -> list[str]:
    output.seek(0)
    return [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]


def exception_line(output: IO[bytes]) -> str:
    """The exception of the last traceback: its first line that is not indented."""
    lines = output_lines(output)
    begin = max((n for n, line in enumerate(lines) if line.startswith("Traceback")), default=-1)
    message = next(
        (line for line in lines[begin + 1 :] if not line.startswith((" ", "\t"))), "it exited without output"
    )
    return message[:_MOST_CHARACTERS]
