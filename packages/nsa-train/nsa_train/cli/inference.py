"""Commands that run a trained model: `nsa generate`, `nsa chat`, `nsa serve`."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa.errors import ConfigError
from nsa.files import open_regular
from nsa_train.cli.early_checks import SERVER_PACKAGES, require_chat_template, require_packages
from nsa_train.cli.model_options import DEVICE, DTYPE, KEY, MODEL, PRETRAINED, TOKENIZER, model_name, open_model
from nsa_train.cli.outputs import ProgressLine, print_error, warn_if_exposed
from nsa_train.cli.startup import sigterm_as_interrupt
from nsa_train.terminal_text import printable

if TYPE_CHECKING:
    from nsa_train.infer.generate import BatchResult, Completion, SamplingSettings
    from nsa_train.infer.load_model import LoadedModel

_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def generate(
    model: Path = MODEL,
    pretrained: bool = PRETRAINED,
    prompt: list[str] = typer.Option(
        None, "--prompt", "-p", metavar="TEXT", help="Text to continue; may be repeated. Default: standard input."
    ),
    prompt_file: list[Path] = typer.Option(
        None, "--prompt-file", metavar="FILE", help="UTF-8 file that is one prompt; may be repeated."
    ),
    max_new_tokens: int = typer.Option(200, "--max-new-tokens", "-n", min=1, help="Tokens to generate at most."),
    temperature: float = typer.Option(0.8, min=0.0, help="Below 1 prefers likely tokens, above 1 unlikely ones."),
    top_k: int = typer.Option(None, min=1, help="Sample from the k likeliest tokens only."),
    top_p: float = typer.Option(0.95, help="Sample from the likeliest tokens that together have this probability."),
    greedy: bool = typer.Option(False, "--greedy", help="Always take the likeliest token; same as --temperature 0."),
    seed: int = typer.Option(None, min=0, help="Random seed; without one a seed is drawn and printed at the end."),
    stop: list[str] = typer.Option(None, "--stop", metavar="TEXT", help="End before this text; may be repeated."),
    batch_size: int = typer.Option(8, min=1, help="Prompts generated at once."),
    prefill_chunk: int = typer.Option(
        None, min=1, help="Prompt tokens per forward pass (default: runtime.prefill_chunk of the run)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object per prompt and nothing else on stdout."),
    device: str = DEVICE,
    dtype: str = DTYPE,
    tokenizer: str = TOKENIZER,
    key_file: Path = KEY,
) -> None:
    """Continue prompts with a trained model, streaming the text to the terminal.

    MODEL is a run folder (its newest good checkpoint is used), a checkpoint in it, or a folder written by
    `nsa export hf`. It is verified first, and nothing in it is executed. One prompt is streamed as it is written;
    several are generated together, in batches, and printed one after another. Speed, memory and the seed are printed to
    stderr at the end. Ctrl-C ends with the text made so far.

    **Examples:**

    `nsa generate --pretrained --prompt "Once upon a time"`

    `nsa generate artifacts/cpu_quickstart --prompt "The"`

    `nsa generate artifacts/run/checkpoints/step2000 -p "Once" -p "Install the" --greedy -n 50`

    `nsa generate exported --prompt-file book.txt --stop "Chapter" --json > answer.json`

    `echo "A long time ago" | nsa generate artifacts/run --temperature 0.7 --top-k 40 --seed 1`
    """
    prompts = _prompts(prompt or [], prompt_file or [])

    with sigterm_as_interrupt():
        loaded = open_model(model, device=device, dtype=dtype, tokenizer=tokenizer, key_file=key_file)

        from nsa_train.infer.generate import SamplingSettings

        settings = SamplingSettings(
            max_new_tokens=max_new_tokens,
            temperature=0.0 if greedy else temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=tuple(stop or ()),
            prefill_chunk=prefill_chunk,
        )
        prompts = [_without_last_spaces(loaded, prompt) for prompt in prompts]
        encoded = loaded.encode(prompts)
        _note_untrained_positions(loaded, encoded, settings)
        results = []
        for first in range(0, len(prompts), batch_size):
            batch = slice(first, first + batch_size)
            result = _run_batch(loaded, encoded[batch], prompts[batch], settings, as_json, first, len(prompts))
            results.append(result)
            if result.interrupted:
                break
    print_error(_summary(results))
    if results[-1].interrupted:
        raise typer.Exit(_INTERRUPTED)


def _prompts(texts: Sequence[str], files: Sequence[Path]) -> list[str]:
    prompts = [*texts, *(_read_prompt(path) for path in files)]
    if prompts:
        return prompts
    if sys.stdin.isatty():
        raise ConfigError("no prompt was given. Use --prompt TEXT or --prompt-file FILE, or pipe text into it.")
    return [_decode(sys.stdin.buffer.read(), "standard input")]


def _read_prompt(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return _decode(file.read(), str(path))
    except OSError as error:
        raise ConfigError(
            f"prompt file {path} cannot be read ({error.strerror}). Name a text file, or pipe text into the command."
        ) from error


def _decode(raw: bytes, name: str) -> str:
    """The text without the newline with which editors and `echo` end it, and which is not part of the prompt."""
    try:
        return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text ({error}). Convert it, e.g. with iconv.") from error


def _without_last_spaces(loaded: "LoadedModel", prompt: str) -> str:
    """A prompt without the spaces at its end, if a space begins the next word's token: as a token of its own, a text
    hardly ever has it. Says so on stderr."""
    stripped = prompt.rstrip(" ")
    if stripped and stripped != prompt:
        word, ids = loaded.encode([f"{stripped} a", stripped])
        if len(word) == len(ids) + 1:
            print_error(f"note: continuing {stripped!r}: a space at the end belongs to the word that comes next.")
            return stripped
    return prompt


def _note_untrained_positions(
    loaded: "LoadedModel", encoded: Sequence[Sequence[int]], settings: "SamplingSettings"
) -> None:
    reach, trained = max(map(len, encoded)) + settings.max_new_tokens, loaded.trained_length
    if reach > trained:
        print_error(
            f"note: the model was trained on rows of {trained:,} tokens and prompt and new tokens reach {reach:,}: "
            f"positions from {trained:,} on are new to it, and the text may get worse there."
        )


def _run_batch(
    loaded: "LoadedModel",
    encoded: Sequence[Sequence[int]],
    prompts: Sequence[str],
    settings: "SamplingSettings",
    as_json: bool,
    first: int,
    total: int,
) -> "BatchResult":
    """Generate one batch and print it: a single prompt as it is written, several when all are done."""
    from nsa_train.infer.generate import generate_batch

    streamed = total == 1 and not as_json
    which = f"prompts {first + 1}–{first + len(prompts)} of {total}: " if total > 1 else ""
    counts = [0] * len(prompts)
    with ProgressLine(f"{which}reading the prompt") as progress:

        def on_prefill(done: int, columns: int) -> None:
            progress.update(f"{which}reading the prompt: {done:,} of {columns:,} tokens")

        def on_text(row: int, piece: str) -> None:
            if streamed and not counts[row]:
                progress.stop()
                write_text(prompts[row])  # not before, or the progress line would overwrite it
            counts[row] += len(piece)
            if streamed:
                write_text(piece)
            else:
                progress.update(f"{which}{max(counts):,} characters of text")

        result = generate_batch(loaded, encoded, settings, on_text=on_text, on_prefill=on_prefill)
    for row, (prompt, completion) in enumerate(zip(prompts, result.completions, strict=True)):
        if as_json:
            print(json.dumps(_record(loaded, prompt, completion, result)), flush=True)
        elif streamed:
            write_text("\n" if counts[row] else f"{prompt}\n")
        else:
            print(f"=== {first + row + 1} of {total}", flush=True)
            write_text(prompt + completion.text + "\n")
    return result


def write_text(text: str) -> None:
    """Write generated text to stdout: newlines and tabs as they are, other control characters escaped."""
    safe = "\t".join(printable(part, keep_newlines=True) for part in text.split("\t"))
    sys.stdout.write(safe.encode(sys.stdout.encoding or "utf-8", "replace").decode(sys.stdout.encoding or "utf-8"))
    sys.stdout.flush()


def _record(loaded: "LoadedModel", prompt: str, completion: "Completion", result: "BatchResult") -> dict[str, Any]:
    speeds = _speeds([result])
    return {
        "prompt": prompt,
        "text": completion.text,
        "tokens": completion.tokens,
        "prompt_tokens": completion.prompt_tokens,
        "new_tokens": len(completion.tokens),
        "finish_reason": completion.finish_reason,
        "seed": result.seed,
        "model": str(loaded.source.path),
        "step": loaded.source.step,
        "batch_prefill_tokens_per_s": speeds[0],
        "batch_decode_tokens_per_s": speeds[1],
        "peak_memory_mib": round(result.peak_memory_mib, 1),
    }


def _speeds(results: Sequence["BatchResult"]) -> tuple[float | None, float | None]:
    """Prompt tokens and decoded tokens per second, all rows together; None where nothing was decoded."""
    prefill_s, decode_s = sum(r.prefill_s for r in results), sum(r.decode_s for r in results)
    prompt_tokens, decoded = sum(r.prompt_tokens for r in results), sum(r.decoded_tokens for r in results)
    return (
        round(prompt_tokens / prefill_s, 1) if prefill_s > 0 else None,
        round(decoded / decode_s, 1) if decoded and decode_s > 0 else None,
    )


def _summary(results: Sequence["BatchResult"]) -> str:
    prefill, decode = _speeds(results)
    completions = [completion for result in results for completion in result.completions]
    prompt_tokens, new_tokens = sum(r.prompt_tokens for r in results), sum(r.new_tokens for r in results)
    seeds = {result.seed for result in results if result.seed is not None}
    parts = [
        f"prompt {prompt_tokens:,} tokens" + (f", {prefill:,.0f} tokens/s" if prefill else ""),
        f"new {new_tokens:,} tokens" + (f", {decode:,.1f} tokens/s" if decode else ""),
        f"peak memory {results[-1].peak_memory_mib:,.0f} MiB",
        "ended by " + ", ".join(sorted({completion.finish_reason for completion in completions})),
        *(f"seed {seed}" for seed in sorted(seeds)),
    ]
    return " · ".join(parts)


def chat(
    model: Path = MODEL,
    pretrained: bool = PRETRAINED,
    max_new_tokens: int = typer.Option(400, "--max-new-tokens", "-n", min=1, help="Tokens of an answer at most."),
    temperature: float = typer.Option(0.8, min=0.0, help="0 always takes the likeliest token."),
    seed: int = typer.Option(None, min=0, help="Random seed of every answer."),
    device: str = DEVICE,
    dtype: str = DTYPE,
    tokenizer: str = TOKENIZER,
    key_file: Path = KEY,
) -> None:
    """Talk to a model that has a chat template; others continue text, which is what `nsa generate` is for.

    Every line is a message; the conversation so far is the context. Ends at the end of input (Ctrl-D).

    **Examples:** `nsa chat --pretrained`, `nsa chat exported`
    """
    require_chat_template(model)
    loaded = open_model(model, device=device, dtype=dtype, tokenizer=tokenizer, key_file=key_file)

    from nsa_train.infer.generate import SamplingSettings, generate_batch

    settings = SamplingSettings(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    messages: list[dict[str, str]] = []
    with sigterm_as_interrupt():
        for line in _input_lines():
            messages.append({"role": "user", "content": line})
            ids = loaded.encode_chat(messages)
            result = generate_batch(loaded, [ids], settings, on_text=lambda row, piece: write_text(piece))
            print(flush=True)
            messages.append({"role": "assistant", "content": result.completions[0].text})


def _input_lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line


def serve(
    model: Path = MODEL,
    pretrained: bool = PRETRAINED,
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on; 0 chooses a free one."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; other than loopback, the network can use it."),
    context_length: int = typer.Option(
        None, min=2, help="Tokens of a prompt and its answer together at most. Default: as in training."
    ),
    allowed_host: list[str] = typer.Option(
        [], help="Another name that requests may have in their Host header, e.g. that of a proxy; repeatable."
    ),
    model_endpoints: bool = typer.Option(
        False,
        "--model-endpoints",
        help="Answer /load_model and /reset, as `transformers chat` needs it; neither changes the model.",
    ),
    device: str = DEVICE,
    dtype: str = DTYPE,
    tokenizer: str = TOKENIZER,
    key_file: Path = KEY,
) -> None:
    """Serve a model over HTTP with OpenAI's API (/v1/completions, /v1/chat/completions) until stopped.

    This is the server of Transformers with this one model: requests are answered one after another, in the order of
    their arrival. It has no password and no encryption, and listens on loopback unless --host names another address.
    Requests must name the server as loopback, as --host or as an --allowed-host.

    **Examples:**

    `nsa serve artifacts/cpu_quickstart --port 8000`

    `curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json'
    -d '{"prompt": "The", "max_tokens": 100, "temperature": 0.8, "stream": true}'`
    """
    from nsa_train.listen_address import free_port

    require_packages(*SERVER_PACKAGES)
    free_port(host, port)
    with ProgressLine("loading the server"):
        from nsa_train.infer.serve import serve_model

    loaded = open_model(model, device=device, dtype=dtype, tokenizer=tokenizer, key_file=key_file)
    warn_if_exposed(host, "use the model")
    name = model_name(model)

    def print_address(url: str) -> None:
        origin = name if name != str(model) else loaded.source
        print(f"serving {origin} as model {name!r} at {url}", flush=True)
        print("requests are answered one after another, in the order of their arrival; stop with Ctrl-C", flush=True)

    with suppress(KeyboardInterrupt), sigterm_as_interrupt():
        serve_model(
            loaded,
            name=name,
            host=host,
            port=port,
            context_length=context_length,
            allowed_hosts=allowed_host,
            model_endpoints=model_endpoints,
            on_start=print_address,
        )
