"""`nsa chat`: a conversation with a model that has a chat template."""

import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from nsa.errors import ConfigError
from nsa_train.cli.generate import write_text
from nsa_train.cli.model_options import DEVICE, DTYPE, KEY, MODEL, TOKENIZER, open_model
from nsa_train.cli.sigterm import sigterm_as_interrupt


def chat(
    model: Path = MODEL,
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

    **Example:** `nsa chat exported`
    """
    loaded = open_model(model, device=device, dtype=dtype, tokenizer=tokenizer, key_file=key_file)
    if not loaded.tokenizer.chat_template:
        raise ConfigError(
            f"{model} has no chat template: it was trained to continue text, not to answer messages. Use `nsa generate "
            f"{model} --prompt TEXT`, or add a chat template to the tokenizer of an exported folder."
        )

    from nsa_train.infer.generate import SamplingSettings, generate_batch

    settings = SamplingSettings(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    messages: list[dict[str, str]] = []
    with sigterm_as_interrupt():
        for line in _lines():
            messages.append({"role": "user", "content": line})
            ids = loaded.encode_chat(messages)
            result = generate_batch(loaded, [ids], settings, on_text=lambda row, piece: write_text(piece))
            print(flush=True)
            messages.append({"role": "assistant", "content": result.completions[0].text})


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line
