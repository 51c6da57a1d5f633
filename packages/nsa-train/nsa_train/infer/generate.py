"""Text generation from prompts in a batch, over Transformers' `generate`: streaming, stop strings, speed and memory.

B batch · S prompt columns, padded on the left
"""

import resource
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from nsa.errors import ConfigError

if TYPE_CHECKING:
    from nsa_train.infer.load_model import LoadedModel

_LOWEST_TEMPERATURE = 1e-6
"""Below it the logits of a confident model, divided by it, are infinite in fp32."""
_TEMPERATURES = f"0 (greedy), or {_LOWEST_TEMPERATURE:g} or more"
_REPLACEMENT = "�"
"""Character that decoders write for bytes that are not UTF-8, also while the last bytes of one are still missing."""
_LONGEST_WINDOW, _CONTEXT = 64, 8
_FinishReason = Literal["end", "stop", "length", "interrupted"]
"""end: the model ended the document; stop: a stop string; length: max_new_tokens; interrupted: Ctrl-C."""


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of generation. The default samples, because the likeliest tokens of a small model repeat themselves."""

    max_new_tokens: int = 200
    temperature: float = 0.8
    """Logits are divided by this; 0 always takes the likeliest token (greedy)."""
    top_k: int | None = None
    top_p: float | None = 0.95
    seed: int | None = None
    """Seed of sampling; None draws one, which the result records."""
    stop: tuple[str, ...] = ()
    """Text ends before the first of these."""
    prefill_chunk: int | None = None
    """Prompt tokens per forward pass; None uses the model's (runtime.prefill_chunk of its run)."""

    def __post_init__(self) -> None:
        limits = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "temperature": (self.temperature == 0 or self.temperature >= _LOWEST_TEMPERATURE, _TEMPERATURES),
            "top_k": (self.top_k is None or self.top_k >= 1, "1 or more"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0, up to 1"),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "0 or more, below 2**63"),
            "stop": (all(self.stop), "texts that are not empty"),
            "prefill_chunk": (self.prefill_chunk is None or self.prefill_chunk >= 1, "1 or more"),
        }
        for name, (holds, allowed) in limits.items():
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: it must be {allowed}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def sampling_arguments(self) -> dict[str, Any]:
        """Arguments of Transformers' `GenerationConfig`; a value that is not set switches the filter off."""
        if self.greedy:
            return {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k or 0, "top_p": self.top_p}


@dataclass(frozen=True)
class Completion:
    """Continuation of one prompt."""

    text: str
    tokens: list[int] = field(repr=False)
    """The new tokens, the end-of-document token and those of a stop string included."""
    prompt_tokens: int
    finish_reason: _FinishReason


@dataclass(frozen=True)
class BatchResult:
    """The completions of a batch, in the order of its prompts, and what they took."""

    completions: list[Completion]
    seed: int | None
    """Seed that was used; None if nothing was sampled."""
    prefill_s: float
    """Seconds until the first new token of every row."""
    decode_s: float
    peak_memory_mib: float
    """Peak memory of this process since it started; on a GPU, of its allocations there."""

    @property
    def interrupted(self) -> bool:
        return any(completion.finish_reason == "interrupted" for completion in self.completions)

    @property
    def prompt_tokens(self) -> int:
        return sum(completion.prompt_tokens for completion in self.completions)

    @property
    def new_tokens(self) -> int:
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def decoded_tokens(self) -> int:
        """New tokens without the first of each row, which prefill gives."""
        return sum(max(0, len(completion.tokens) - 1) for completion in self.completions)


class TextStream:
    """Incremental detokenisation of one row: token ids in, text that later tokens cannot change out.

    A character split across tokens is held back until it is complete, and so is text that may be the beginning of a
    stop string. The concatenation of all pieces, `finish` included, is `text`, which ends before the stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
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


class _RowTokens(BaseStreamer):
    """Streamer that keeps the tokens and the text of every row as they come; it knows which rows have ended."""

    def __init__(
        self, tokenizer: Any, rows: int, end_ids: set[int], stop: Sequence[str], on_text: Callable[[int, str], None]
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.reasons: list[_FinishReason | None] = [None] * rows
        self.texts = [TextStream(tokenizer, stop) for _ in range(rows)]
        self.first_token_at: float | None = None
        self._end_ids, self._on_text = end_ids, on_text
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """The prompts at first, then one token per row."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        for row, token in enumerate(value.tolist()):
            if self.reasons[row] is None:  # ended rows get padding
                self._push(row, token)

    def _push(self, row: int, token: int) -> None:
        self.tokens[row].append(token)
        if token in self._end_ids:
            return self._end(row, "end")
        text = self.texts[row]
        if piece := text.push(token):
            self._on_text(row, piece)
        if text.stopped_by is not None:
            self._end(row, "stop")

    def _end(self, row: int, reason: _FinishReason) -> None:
        self.reasons[row] = reason
        if rest := self.texts[row].finish():
            self._on_text(row, rest)

    def end(self) -> None:
        self.end_all("length")

    def end_all(self, reason: _FinishReason) -> None:
        """Rows that have not ended end here, for this reason."""
        for row, ended in enumerate(self.reasons):
            if ended is None:
                self._end(row, reason)


class _StopAtText(StoppingCriteria):
    """Ends the rows whose text contains a stop string, as `_RowTokens` finds it: exact for any tokenizer."""

    def __init__(self, rows: _RowTokens) -> None:
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ended = [reason == "stop" for reason in self._rows.reasons]
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)


def silence_transformers() -> None:
    """Silence Transformers' reminders on stderr, which would stand in the text of a command."""
    logging.set_verbosity_error()


def generate_batch(
    loaded: "LoadedModel",
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    *,
    on_text: Callable[[int, str], None] = lambda row, piece: None,
    on_prefill: Callable[[int, int], None] = lambda done, total: None,
) -> BatchResult:
    """Continue prompts, given as token ids, in one batch. Ctrl-C ends it with what was made so far.

    on_text: called with the row and each new piece of its text. on_prefill: with the prompt columns done and their
    number, after every chunk.
    """
    model = loaded.model
    ids_BS, mask_BS = _left_padded(prompts, loaded.pad_id, model.device)
    rows = _RowTokens(loaded.tokenizer, len(prompts), loaded.end_ids, settings.stop, on_text)
    seed = None if settings.greedy else settings.seed if settings.seed is not None else secrets.randbits(32)
    chunk = settings.prefill_chunk or loaded.prefill_chunk
    with _seeded(seed, model.device), _counted(model, ids_BS.shape[1], on_prefill), torch.inference_mode():
        began = time.perf_counter()
        try:
            model.generate(
                input_ids=ids_BS,
                attention_mask=mask_BS,
                streamer=rows,
                stopping_criteria=StoppingCriteriaList([_StopAtText(rows)]),
                max_new_tokens=settings.max_new_tokens,
                eos_token_id=sorted(loaded.end_ids) or None,
                pad_token_id=loaded.pad_id,
                prefill_chunk_size=chunk if ids_BS.shape[1] > chunk else None,
                **settings.sampling_arguments(),
            )
        except KeyboardInterrupt:
            rows.end_all("interrupted")
        ended = time.perf_counter()
    first = rows.first_token_at or ended
    completions = [
        Completion(text.text, tokens, len(prompt), reason or "length")
        for text, tokens, prompt, reason in zip(rows.texts, rows.tokens, prompts, rows.reasons, strict=True)
    ]
    return BatchResult(completions, seed, first - began, ended - first, _peak_memory_mib(model.device))


def _left_padded(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    ids = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Sample with this seed, and leave the random state of the caller as it was."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def _counted(model: torch.nn.Module, total: int, on_prefill: Callable[[int, int], None]) -> Iterator[None]:
    """Report prompt columns as forward passes take them."""
    done = 0

    def count(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        nonlocal done
        if done < total:
            done += kwargs["input_ids"].shape[1]
            on_prefill(min(done, total), total)

    hook = model.register_forward_hook(count, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _peak_memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
