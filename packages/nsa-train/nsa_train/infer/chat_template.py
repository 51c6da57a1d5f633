"""Renders chat templates in a child process with limits on time, memory and length of the text.

A template is a program by the author of the model's folder. Jinja's sandbox, as Transformers uses it, keeps it from
files and from Python's objects; it does not keep it from endless loops and from filling memory.
As a program this file is that child: JSON lines on stdin and stdout. It imports no torch and serves a whole session.
"""

import json
import resource
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa.child_process import ChildFailed, ChildProcess, message_sender
from nsa.errors import CheckpointError
from nsa_train.terminal_text import printable

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
        self._child: ChildProcess | None = None
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
            answer = self._answer(arguments)
        if "text" in answer:
            return str(answer["text"])
        raise CheckpointError(
            f"the chat template of {self._source} cannot be rendered ({printable(answer['failed'], _MOST_REASON)}). "
            f"Mend chat_template.jinja there, or send messages that it accepts."
        )

    def _answer(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """`text`, or `failed` with the reason; a child that is late or has died is replaced at the next text."""
        try:
            if self._child is None or not self._child.alive:
                # By its path: importing the package would import torch.
                self._child = ChildProcess("its process", ("-P", __file__))
                self._receive(self._child, _START_S)
            self._child.send(**arguments)
            return self._receive(self._child, _RENDER_S)
        except ChildFailed as error:
            assert self._child is not None
            self._child.close()
            return {"failed": str(error)}

    @staticmethod
    def _receive(child: ChildProcess, limit_s: float) -> dict[str, Any]:
        message = child.receive(limit_s)
        if message is None:
            raise ChildFailed(child.failure() or "its process ended without an answer")
        return message


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
