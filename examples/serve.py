"""Serve a model over OpenAI's HTTP API, ask it with OpenAI's client, stop it.

pip install 'nsa-train[train,serve]'

    python serve.py              trains a byte model for a few steps first: a minute of one core
    python serve.py MODEL        a run folder, or a folder of `nsa export hf`
"""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import openai

from nsa_train.shipped import CORPUS

NSA = [sys.executable, "-m", "nsa_train.cli"]  # the command `nsa` of this interpreter


def train_a_little(folder: Path) -> Path:
    """Train with the shipped config of a small byte model, straight from the shipped text; returns the run folder."""
    subprocess.run([*NSA, "init", folder, "--config", "cpu_quickstart"], check=True, stdout=subprocess.DEVNULL)
    data = ["data.dataset=local", f"data.path={CORPUS}", "data.held_out=0.05"]
    steps = [
        "train.steps=60",
        "train.log_every=20",
        "train.eval_every=60",
        "train.eval_batches=2",
        "train.save_every=60",
    ]
    subprocess.run([*NSA, "train", folder / "config.yaml", *data, *steps], check=True)
    return folder / "run"


def ask(address: str, name: str) -> None:
    client = openai.OpenAI(base_url=address, api_key="none")
    began = time.perf_counter()
    answer = client.completions.create(model=name, prompt="The ", max_tokens=60, temperature=0.8, seed=1)
    print(f"\nanswer after {time.perf_counter() - began:.2f} s: {answer.choices[0].text!r}")
    print(f"{answer.usage.prompt_tokens} tokens of prompt, {answer.usage.completion_tokens} of answer")

    began, pieces = time.perf_counter(), []
    for part in client.completions.create(model=name, prompt="The ", max_tokens=60, temperature=0, stream=True):
        if part.choices and part.choices[0].text:
            pieces.append((time.perf_counter() - began, part.choices[0].text))
    text = "".join(piece for _, piece in pieces)
    print(f"streamed, first piece after {pieces[0][0]:.2f} s, last after {pieces[-1][0]:.2f} s: {text!r}")

    try:
        client.completions.create(model=name, prompt="The ", max_tokens=0)
    except openai.BadRequestError as error:
        print(f"max_tokens=0 is refused: {error.message}")


def serve(model: Path) -> int:
    """Serve until the questions are answered; returns the exit code of the server."""
    command = [*NSA, "serve", model, "--port", "0"]  # 0: a free port, which it prints
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            print(line, end="")
            if line.startswith("serving "):
                ask(line.split()[-1], str(model))
                break
    finally:
        server.send_signal(signal.SIGTERM)  # requests being answered are finished
        code = server.wait()
    return code


if __name__ == "__main__":
    if sys.argv[1:]:
        code = serve(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            code = serve(train_a_little(Path(folder)))
    print(f"the server ended with exit code {code}")
    sys.exit(code)
