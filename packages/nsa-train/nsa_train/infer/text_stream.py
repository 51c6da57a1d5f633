"""Incremental detokenisation: token ids in, text that later tokens cannot change out; stop strings end it."""

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "�"
"""Character that decoders write for bytes that are not UTF-8, also while the last bytes of one are still missing."""
_LONGEST_WINDOW, _CONTEXT = 64, 8


class _TokenDecoding(Protocol):
    """The part of a Transformers tokenizer that turns ids into text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class TextStream:
    """The text of one row while its tokens arrive.

    A character split across tokens is held back until it is complete, and so is text that may be the beginning of a
    stop string. The concatenation of all pieces, `finish` included, is `text`, which ends before the stop string.
    """

    def __init__(self, tokenizer: _TokenDecoding, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []  # the newest tokens: a decoder needs some context, never the whole text
        self._decoded = 0  # characters of these that were taken
        self._held = ""  # taken, but perhaps the beginning of a stop string
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """Append a token; return the text that is certain now and was not before."""
        if self.stopped_by is not None:
            return ""
        self._ids.append(token)
        decoded = self._decode(self._ids)
        # An incomplete character is decoded as one replacement character, which is not final while it is the last.
        complete = decoded[:-1] if decoded.endswith(_REPLACEMENT) else decoded
        fresh, self._decoded = complete[self._decoded :], max(self._decoded, len(complete))
        if len(self._ids) > _LONGEST_WINDOW and complete is decoded:
            self._ids = self._ids[-_CONTEXT:]
            self._decoded = len(self._decode(self._ids))
        return self._release(fresh)

    def finish(self) -> str:
        """The text that was held back; call once, after the last token."""
        if self.stopped_by is not None:
            return ""
        rest = self._held + self._decode(self._ids)[self._decoded :]
        self._held = ""
        self.text += rest
        return rest

    def _release(self, fresh: str) -> str:
        waiting = self._held + fresh
        if matches := [(at, stop) for stop in self._stop if (at := waiting.find(stop)) >= 0]:
            at, self.stopped_by = min(matches)
            certain, self._held = waiting[:at], ""
        else:
            overlap = max((_overlap(waiting, stop) for stop in self._stop), default=0)
            certain, self._held = waiting[: len(waiting) - overlap], waiting[len(waiting) - overlap :]
        self.text += certain
        return certain

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
