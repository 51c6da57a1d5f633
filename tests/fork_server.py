"""Python programs started by fork from a process that has imported torch, the engine and Transformers already.

Importing them takes a new interpreter up to 6 s of CPU time, a fork takes 0.05 s. The programs are processes of their
own, with their own arguments, environment, folder, files, signals and exit code. What they import is not as in a new
interpreter, nor is what is read from the environment while torch is imported: such tests start `sys.executable`.

`run` and `start` are for tests, one server per test process. `command_for` is for shell scripts and launchers: as a
program with a socket and words this file starts them on the server and ends as they do; if it is killed, so are they.
"""

import array
import atexit
import contextlib
import functools
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[1]
READY_S = 500.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PRELOADED = (
    "nsa_train.train.run", "nsa_train.cli.main", "nsa_train.infer.load_model", "nsa.hf.modeling", "transformers",
    "torch.utils.tensorboard", "torch.distributed.checkpoint", "torch.distributed.launcher.api", "torch._dynamo",
)  # fmt: skip


@dataclass
class ForkRequest:
    words: list[str]
    """What follows `python`: a file, -m and a module, or -c and a program; then the arguments."""
    folder: str
    variables: dict[str, str]
    new_session: bool = True
    ignored_signals: list[int] = field(default_factory=list)
    ends_with_client: bool = False
    """Kill it when whoever asked for it closes the connection."""


class ForkedProcess:
    """One program; the part of `subprocess.Popen` that tests use."""

    def __init__(self, server: str, request: ForkRequest, files: tuple[int, int, int]) -> None:
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        self._words = request.words
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(server)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        message = json.dumps(asdict(request)).encode()
        self._connection.sendmsg([len(message).to_bytes(4, "big")], rights)
        self._connection.sendall(message)
        self._answer = self._connection.makefile("r")
        self.pid = int(self._answer.readline())

    def poll(self) -> int | None:
        if self.returncode is None and self._ended(0):
            self._read_status()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._ended(timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._read_status()
        assert self.returncode is not None
        return self.returncode

    def _ended(self, timeout: float | None) -> bool:
        # Not select.select, which refuses file numbers above 1,023.
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    def _read_status(self) -> None:
        status, cpu_s = self._answer.readline().split()
        self.returncode = os.waitstatus_to_exitcode(int(status))
        sys.audit("tests.fork_server", self._words, float(cpu_s))  # tools/gate_times.py counts them
        self._answer.close()
        self._connection.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    words: list[str],
    *,
    cwd: Path | str,
    env: Mapping[str, str],
    stdin: IO[Any] | int | None = None,
    stdout: IO[Any] | int | None = None,
    stderr: IO[Any] | int | None = None,
    start_new_session: bool = True,
    ignored_signals: tuple[int, ...] = (),
) -> ForkedProcess:
    """Start `python *words`; each file is open, the number of one, subprocess.PIPE, or else /dev/null."""
    request = ForkRequest(words, str(cwd), dict(env), start_new_session, list(ignored_signals))
    ours: dict[str, IO[str]] = {}
    files: list[int] = []
    with contextlib.ExitStack() as stack:
        for name, file in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
            if file == subprocess.PIPE:
                reader, writer = os.pipe()
                ours[name] = open(writer, "w") if name == "stdin" else open(reader)  # noqa: SIM115
                files.append(reader if name == "stdin" else writer)
                stack.callback(os.close, files[-1])
            elif file is None:
                files.append(stack.enter_context(open(os.devnull, "r+b")).fileno())
            else:
                files.append(file if isinstance(file, int) else file.fileno())
        process = ForkedProcess(_socket(), request, (files[0], files[1], files[2]))
    vars(process).update(ours)
    return process


def run(
    words: list[str],
    *,
    cwd: Path | str,
    env: Mapping[str, str],
    input: str = "",
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, *words], capture_output=True, text=True)`. A timeout ends its whole session."""
    file = functools.partial(tempfile.TemporaryFile, "w+", errors="replace")
    with file() as stdin, file() as out, file() as err:
        stdin.write(input)
        stdin.seek(0)
        process = start(words, cwd=cwd, env=env, stdin=stdin, stdout=out, stderr=err)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired as late:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            err.seek(0)
            raise subprocess.TimeoutExpired(words, timeout, stderr=err.read()) from late
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def command_for(*words: str) -> str:
    """A command of a shell that starts `python *words` and what is added to it on the server."""
    return shlex.join([sys.executable, "-S", "-E", __file__, _socket(), *words])


@functools.cache
def _socket() -> str:
    """Start the server of this process; it ends with it."""
    folder = tempfile.mkdtemp(prefix="nsa-fork-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    from proofs import import_path  # a client of the server is this file alone

    path = f"{folder}/socket"
    # A run inside this test process leaves USR1 and USR2 ignored, which a child would inherit.
    words = ["env", "--default-signal", sys.executable, "-m", "tests.fork_server"]
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("NSA_", "TORCHELASTIC"))}
    server = subprocess.Popen(
        [*words, path],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
    )
    atexit.register(server.wait)
    assert server.stdin is not None
    atexit.register(server.stdin.close)  # it runs before `wait`, and the server ends when it reads the end
    deadline = time.monotonic() + READY_S
    while not Path(path).exists():
        assert server.poll() is None, f"the fork server ended with {server.returncode}"
        assert time.monotonic() < deadline, "the fork server did not start"
        time.sleep(0.02)
    return path


def _receive(connection: socket.socket) -> tuple[ForkRequest, list[int]]:
    head, files, _, _ = socket.recv_fds(connection, 4, 3)
    size, message = int.from_bytes(head, "big"), b""
    while len(message) < size:
        message += connection.recv(size - len(message))
    return ForkRequest(**json.loads(message)), files


def _serve(path: str) -> ForkRequest:
    """Fork a process per request until stdin ends; returns in each forked process, with its request."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen()
    os.rename(f"{path}.new", path)
    running: dict[int, socket.socket] = {}
    clients: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([0, woken, listener, *clients], [], [])
        for client in clients.keys() & set(ready):
            os.kill(clients.pop(client), signal.SIGKILL)  # it still runs, or is still to be waited for
        if woken in ready:
            os.read(woken, 4096)
            for pid, connection in list(running.items()):
                ended, status, usage = os.wait4(pid, os.WNOHANG)
                if ended:
                    del running[pid]
                    clients.pop(connection, None)
                    with contextlib.suppress(OSError), connection:  # the test may have ended
                        connection.sendall(f"{status} {usage.ru_utime + usage.ru_stime}\n".encode())
        if listener in ready:
            connection, _ = listener.accept()
            request, files = _receive(connection)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (connection, listener, *running.values()):
                    each.close()
                os.close(woken)
                os.close(wake)
                _become(request, files)
                return request
            running[pid] = connection
            if request.ends_with_client:
                clients[connection] = pid
            for file in files:
                os.close(file)
            connection.sendall(f"{pid}\n".encode())
        if 0 in ready:
            sys.exit()


def become(request: ForkRequest, files: list[int]) -> NoReturn:
    """Run the program in this process, which was forked for it."""
    _become(request, files)
    _run_to_the_end(request.words)


def _become(request: ForkRequest, files: list[int]) -> None:
    import random

    import numpy

    if request.new_session:
        os.setsid()
    for number in request.ignored_signals:
        signal.signal(number, signal.SIG_IGN)
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.variables)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    first = request.words[0]
    sys.path[0] = {"-m": request.folder, "-c": ""}.get(first, os.path.dirname(os.path.abspath(first)))
    random.seed()
    numpy.random.seed()


def _preload() -> None:
    import gc
    import importlib

    import typer.main

    for name in _PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # a plain install
            importlib.import_module(name)
    # Built from the annotations of all commands: here, not in every process.
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(importlib.import_module("nsa_train.cli.main").app)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy every page


def _run_to_the_end(words: list[str]) -> NoReturn:
    """Run as an interpreter does, up to its exit handlers. Objects are not deleted one by one: that takes a second
    here."""
    import runpy
    import threading
    import types

    code = 0
    try:
        if words[0] == "-c":  # in a module of its own: the names of this one are not those of the program
            sys.argv = ["-c", *words[2:]]
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:  # noqa: BLE001 - the code of the server must not run here
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _forward(server: str, words: list[str]) -> int:
    """Run on the server with the files of this process; its signals are passed on, and its end is this process's."""
    if words[0].startswith("-") and words[0] not in ("-m", "-c"):
        os.execv(sys.executable, [sys.executable, *words])
    request = ForkRequest(words, os.getcwd(), dict(os.environ), new_session=False, ends_with_client=True)
    process = ForkedProcess(server, request, (0, 1, 2))
    for number in _FORWARDED:
        signal.signal(number, lambda number, frame: process.send_signal(number))
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if sys.argv[2:]:
        sys.exit(_forward(sys.argv[1], sys.argv[2:]))
    _preload()
    _run_to_the_end(_serve(sys.argv[1]).words)
