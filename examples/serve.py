"""Serve a model over OpenAI's HTTP API, ask it with OpenAI's client, stop it.

pip install 'nsa-train[hf,serve]'

    python serve.py              the small model that comes with nsa-train
    python serve.py MODEL        a run folder, or a folder of `nsa export hf`
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import openai

from nsa_train.shipped import PRETRAINED

PROMPT = "Once upon a time"


def ask(client: openai.OpenAI, name: str) -> None:
    began = time.perf_counter()
    answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=60, temperature=0.5, seed=1)
    print(f"\nanswer after {time.perf_counter() - began:.2f} s: {answer.choices[0].text!r}")
    print(f"{answer.usage.prompt_tokens} tokens of prompt, {answer.usage.completion_tokens} of answer")

    began, pieces = time.perf_counter(), []
    for part in client.completions.create(model=name, prompt=PROMPT, max_tokens=60, temperature=0, stream=True):
        if part.choices and part.choices[0].text:
            pieces.append((time.perf_counter() - began, part.choices[0].text))
    text = "".join(piece for _, piece in pieces)
    print(f"streamed, first piece after {pieces[0][0]:.2f} s, last after {pieces[-1][0]:.2f} s: {text!r}")

    try:
        client.completions.create(model=name, prompt=PROMPT, max_tokens=0)
    except openai.BadRequestError as error:
        print(f"max_tokens=0 is refused: {error.message}")


def chat(client: openai.OpenAI, name: str, question: str) -> None:
    """Ask in the form of a chat, which needs a model with a chat template."""
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model=name, messages=messages, max_tokens=60, temperature=0)
    print(f"{question} {answer.choices[0].message.content}")


def serve(model: Path) -> int:
    """Serve until the questions are answered; returns the exit code of the server."""
    command = [sys.executable, "-m", "nsa_train.cli", "serve", model, "--port", "0"]  # 0: a free port, which it prints
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            print(line, end="")
            if line.startswith("serving "):
                client = openai.OpenAI(base_url=line.split()[-1], api_key="none")
                ask(client, str(model))
                if model == PRETRAINED:
                    chat(client, str(model), "What do cows eat?")
                break
    finally:
        server.send_signal(signal.SIGTERM)  # requests being answered are finished
        code = server.wait()
    return code


if __name__ == "__main__":
    code = serve(Path(sys.argv[1]) if sys.argv[1:] else PRETRAINED)
    print(f"the server ended with exit code {code}")
    sys.exit(code)
