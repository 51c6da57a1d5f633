"""Renders chat templates in a child process with limits on time, memory and length of the text.

A template is a program of whoever wrote the model's folder. Jinja's sandbox, as Transformers uses it, keeps it from
files and from Python's objects; it does not keep it from endless loops and from filling memory.
As a program this file is that child: JSON lines on stdin and stdout. It imports no torch and serves a whole session.
"""

import json
import resource
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from nsa.errors import CheckpointError
from nsa_train.terminal_text import printable
from nsa_train.train.child_messages import last_line, message_sender

_START_S = 120.0
_RENDER_S = 5.0
_RENDER_BYTES = 512 << 20
"""Address space for one text, besides what the child has after its imports."""
_GROWTH, _SPARE_CHARACTERS = 8, 1 << 16
"""A text has at most so many times the characters of template and messages, and these more."""
_MOST_REASON = 300


class ChatTemplate:
    """A chat template and the child process that renders it, started at first use and again after its death.

    May be used by several threads.
    """

    def __init__(self, text: str, *, special_tokens: Mapping[str, Any], source: object) -> None:
        """special_tokens: names and texts that the template may use. source: the folder it came from, for messages."""
        self._text, self._special_tokens, self._source = text, dict(special_tokens), source
        self._child: _RenderProcess | None = None
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation, up to where the answer begins. Further keywords are variables of the template.

        Raises CheckpointError if the template fails, takes too long, or writes far more than it was given.
        """
        arguments = {
            **self._special_tokens,
            **variables,
            # As Transformers does: templates test whether a key is there.
            "conversations": [[{k: v for k, v in message.items() if v is not None} for message in messages]],
            "tools": tools,
            "chat_template": self._text,
            "add_generation_prompt": add_generation_prompt,
        }
        with self._lock:
            if self._child is None or not self._child.alive:
                self._child = _RenderProcess()
            answer = self._child.answer(arguments)
        if "text" in answer:
            return str(answer["text"])
        raise CheckpointError(
            f"the chat template of {self._source} cannot be rendered ({printable(answer['failed'], _MOST_REASON)}). "
            f"Mend chat_template.jinja there, or send messages that it accepts."
        )


class _RenderProcess:
    """The child, seen from the parent."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],  # by its path: importing the package would import torch
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self._end = weakref.finalize(self, _end, self._process, self._errors)
        self._started = False

    @property
    def alive(self) -> bool:
        return self._end.alive

    def answer(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Send arguments to the child and return its answer: `text`, or `failed` with the reason."""
        if not self._started:
            self._started = True
            if "failed" in (message := self._exchange(b"", _START_S)):
                return message
        return self._exchange(json.dumps(arguments).encode() + b"\n", _RENDER_S)

    def _exchange(self, request: bytes, limit_s: float) -> dict[str, Any]:
        """The next message of the child, which is gone if there is none in time."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        expired = threading.Event()

        def kill() -> None:
            expired.set()
            self._process.kill()

        timer = threading.Timer(limit_s, kill)
        timer.start()
        try:
            stdin.write(request)
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:  # it has already exited, and its exit code says why
            line = b""
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            message: dict[str, Any] = json.loads(line)
            return message
        code = self._process.wait()
        why = f"its process was killed by signal {-code}" if code < 0 else last_line(self._errors)
        self._end()
        return {"failed": f"it took more than {limit_s:.0f} s" if expired.is_set() else why}


def _end(process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        assert pipe is not None
        with suppress(BrokenPipeError):  # a request that nobody read is still in the buffer
            pipe.close()


def _main() -> None:
    with message_sender() as send:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + _RENDER_BYTES)
        _limit(resource.RLIMIT_FSIZE, 1 << 20)  # of a traceback on stderr
        send(ready=True)
        for line in sys.stdin:
            # The parent kills a child that is late; this ends one whose parent has died.
            used = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + _RENDER_S) + 2)
            most = _GROWTH * len(line) + _SPARE_CHARACTERS
            try:
                (text,), _ = render_jinja_template(**json.loads(line))
                text.encode()
            except (jinja2.TemplateError, UnicodeEncodeError) as error:  # any other exception ends this process
                send(failed=f"{type(error).__name__}: {error}"[:_MOST_REASON])
            else:
                sizes = f"{len(text):,} characters for a template and messages of {len(line):,}; the limit is {most:,}"
                send(**({"text": text} if len(text) <= most else {"failed": f"it wrote {sizes}"}))


def _limit(kind: int, amount: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


if __name__ == "__main__":
    _main()
