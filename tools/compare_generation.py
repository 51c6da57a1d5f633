"""Greedy tokens of one model by every way of running it: `nsa generate`, Transformers, `nsa serve`, vLLM.

python -m tools.compare_generation RUN_OR_CHECKPOINT [--new-tokens 32] [--lengths 1,100,8000] [--vllm PYTHON]

Prompts are this repository's own documentation, cut to the lengths. `nsa generate` gets them in batches of rows of
different lengths and reads them in chunks; Transformers' `generate` gets them one by one and whole, from an exported
folder; the servers get them over HTTP, vLLM's all at once. PYTHON is the interpreter of the environment that has vLLM
(`.ci/install-vllm` makes one for CPUs). Where two ways part, the table has the position and the margin between the two
tokens' logits, which is rounding if it is tiny.
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 64, 100, 128, 200, 333, 500, 777, 1000, 2000, 3000, 5000, 8000)
LONGEST = 16_384
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # longer than in training, as the other ways allow it too
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "INFO",  # its address is a line of this level
    "VLLM_NO_USAGE_STATS": "1",
}
_START_S = 300.0
_ADDRESS = re.compile(r"(?:Uvicorn running on|[Ss]tarting vLLM .*server.* on) (http://\S+)")


class ServerProcess:
    """A server in a process of its own; it prints its address when it listens."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command,
            env=dict(env or os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that its own children can be killed with it
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_for_address()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def _wait_for_address(self) -> str:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and (self.process.poll() is None or self._reader.is_alive()):
            match = _ADDRESS.search("".join(self.lines))
            if match and any("startup complete" in line for line in self.lines):
                return match[1]
            time.sleep(0.05)
        os.killpg(self.process.pid, signal.SIGKILL)
        raise RuntimeError(f"the server did not start: {''.join(self.lines)}")

    def post(self, path: str, **body: Any) -> bytes:
        content = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            raw: bytes = answer.read()
        return raw

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(120)
        self._reader.join(10)
        return code


def nsa_serve(model: Path, *words: str) -> list[str]:
    """The command that serves a model with `nsa serve` on a free port, with prompts longer than in training."""
    command = [sys.executable, "-m", "nsa_train.cli", "serve", str(model), "--port", "0"]
    return [*command, "--context-length", str(LONGEST), *words]


def vllm_serve(python: str, folder: Path, *words: str) -> list[str]:
    """The command that serves an exported folder with vLLM on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1"]
    return [*command, "--port", str(port), "--dtype", "float32", "--enforce-eager", *words]


@dataclass(frozen=True)
class GreedyAnswer:
    """Greedy tokens after one prompt; a server gives text only, which is encoded again if it differs."""

    text: str
    n_tokens: int
    tokens: list[int] | None = None


@dataclass(frozen=True)
class ReferenceAnswer:
    """Transformers' own answer and, before each new token, the logits that decided it."""

    prompt: str
    prompt_tokens: int
    text: str
    tokens: list[int]
    logits: Any

    @property
    def smallest_margin(self) -> float:
        """Between the likeliest and the second token, over all steps: how close any step was to a tie."""
        best = self.logits.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())

    def compare(self, other: GreedyAnswer, encode: Any) -> str:
        """`identical`, or where the other answer parts from this one and by which margin."""
        tokens = other.tokens
        if tokens is None:
            if other.text == self.text and other.n_tokens == len(self.tokens):
                return "identical"
            tokens = encode(other.text)
        pairs = zip(self.tokens, tokens, strict=False)
        at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(self.tokens), len(tokens)))
        if at == len(self.tokens) == len(tokens):
            return "identical"
        if at >= min(len(self.tokens), len(tokens)):
            return f"**{len(tokens)} tokens instead of {len(self.tokens)}**"
        row = self.logits[at]
        return f"**parts at {at}, margin {float(row[self.tokens[at]] - row[tokens[at]]):.1e}**"


def make_prompts(encode: Any, decode: Any, lengths: Sequence[int]) -> list[str]:
    """Documentation of this repository, cut so that each prompt has the number of tokens asked for."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages).encode("ascii", "ignore").decode()
    ids = encode(text)
    prompts = []
    for number, length in enumerate(lengths):
        begin = number * 97 % max(1, len(ids) - length)
        around = decode(ids[begin : begin + length + 8])
        exact = [cut for cut in range(1, len(around) + 1) if len(encode(around[:cut])) == length] if length < 40 else []
        # A cut inside a word may be encoded otherwise, so a few ends near the wanted one are tried.
        near = len(decode(ids[begin : begin + length]))
        exact = exact or [cut for cut in range(near + 6, near - 7, -1) if len(encode(around[:cut])) == length]
        if not exact:
            raise RuntimeError(f"no cut of the text has exactly {length} tokens. Choose another length.")
        prompts.append(around[: exact[-1]])
    return prompts


def ask_transformers(folder: Path, prompts: Sequence[str], new_tokens: int) -> list[ReferenceAnswer]:
    """`AutoModelForCausalLM.generate` on an exported folder, one prompt at a time, each read in one pass."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import nsa.hf  # noqa: F401 (registers the model)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", verbose=False)
        output = model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        width = inputs["input_ids"].shape[1]
        tokens = output.sequences[0, width:].tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        answers.append(ReferenceAnswer(prompt, width, text, tokens, torch.cat(output.logits)))
    return answers


def ask_nsa_generate(model: Path, prompts: Sequence[str], new_tokens: int) -> list[GreedyAnswer]:
    with tempfile.TemporaryDirectory() as folder:
        words = []
        for number, prompt in enumerate(prompts):
            file = Path(folder) / f"{number}.txt"
            file.write_text(f"{prompt}\n", encoding="utf-8", newline="")  # the command removes this newline
            words += ["--prompt-file", str(file)]
        command = [sys.executable, "-m", "nsa_train.cli", "generate", str(model), *words, "--greedy", "--json"]
        command += ["--max-new-tokens", str(new_tokens), "--batch-size", "5", "--dtype", "fp32"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return [GreedyAnswer(record["text"], record["new_tokens"], record["tokens"]) for record in records]


def ask_nsa_serve(model: Path, prompts: Sequence[str], new_tokens: int) -> list[GreedyAnswer]:
    server = ServerProcess(nsa_serve(model, "--dtype", "fp32"))
    try:
        answers = []
        for prompt in prompts:
            raw = server.post("/v1/completions", prompt=prompt, temperature=0, max_tokens=new_tokens)
            answer = json.loads(raw)
            answers.append(GreedyAnswer(answer["choices"][0]["text"], answer["usage"]["completion_tokens"]))
        return answers
    finally:
        server.stop()


def ask_vllm(python: str, folder: Path, prompts: Sequence[str], new_tokens: int) -> list[GreedyAnswer]:
    """Send all prompts at once, over HTTP."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    server = ServerProcess(
        vllm_serve(python, folder, "--block-size", str(config["l_sel"]), "--max-model-len", str(LONGEST)),
        env={**os.environ, **VLLM_ENVIRONMENT},
    )

    def ask(prompt: str) -> GreedyAnswer:
        body = dict(model=str(folder), prompt=prompt, temperature=0, max_tokens=new_tokens, return_token_ids=True)
        answer = json.loads(server.post("/v1/completions", **body))
        (choice,) = answer["choices"]
        return GreedyAnswer(choice["text"], answer["usage"]["completion_tokens"], choice["token_ids"])

    try:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(ask, prompts))
    finally:
        server.stop(signal.SIGINT)


def table(reference: Sequence[ReferenceAnswer], ways: Mapping[str, Sequence[GreedyAnswer]], encode: Any) -> str:
    header = ["prompt tokens", "Transformers `generate`", *ways, "smallest margin to the second token"]
    lines = [header, ["---"] * len(header)]
    for row, answer in enumerate(reference):
        cells = [answer.compare(answers[row], encode) for answers in ways.values()]
        n_new = f"{len(answer.tokens)} tokens"
        lines.append([f"{answer.prompt_tokens:,}", n_new, *cells, f"{answer.smallest_margin:.1e}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="A run folder or a checkpoint.")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="Prompt tokens, separated by commas.")
    parser.add_argument("--vllm", metavar="PYTHON", help="Also through vLLM's server, with this Python.")
    arguments = parser.parse_args()

    from nsa_train.convert.export_folder import export_folder
    from nsa_train.infer import load_model

    loaded = load_model(arguments.model, device="cpu")

    def encode(text: str) -> list[int]:
        return loaded.encode([text])[0] if text else []

    lengths = [int(length) for length in arguments.lengths.split(",")]
    prompts = make_prompts(encode, loaded.tokenizer.decode, lengths)
    with tempfile.TemporaryDirectory() as folder:
        export_folder(arguments.model, Path(folder) / "exported")
        reference = ask_transformers(Path(folder) / "exported", prompts, arguments.new_tokens)
        ways = {
            "`nsa generate`": ask_nsa_generate(arguments.model, prompts, arguments.new_tokens),
            "`nsa serve`": ask_nsa_serve(arguments.model, prompts, arguments.new_tokens),
        }
        if arguments.vllm:
            ways["vLLM"] = ask_vllm(arguments.vllm, Path(folder) / "exported", prompts, arguments.new_tokens)
    print(table(reference, ways, encode))


if __name__ == "__main__":
    main()
