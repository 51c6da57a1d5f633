"""Decode speed and time to first token in vLLM: our model beside vLLM's own Llama of the same size.

    FOLDER/bin/python -m tools.bench_vllm --batches 1,8,32 --contexts 2k,8k,32k [--layers 4] [--json FILE]

FOLDER is an environment with vLLM (`.ci/install-vllm FOLDER`). Each model has an engine in a process of its own; they
take turns, so that other load on the machine affects both. The shape is the 125M one with fewer layers (fp32, random
weights). Every row of a batch has a prompt of its own, so that no row reads another one's pages from the processor's
cache; later rounds find the prompts in the prefix cache.

decode: tokens per second of the whole batch, from the median engine step in which every row gets one token.
first token: seconds, for a prompt not cached.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nsa.token_counts import parse_lengths, spell
from tools.compare_generation import VLLM_ENVIRONMENT

Json = dict[str, Any]
ENVIRONMENT = {
    **VLLM_ENVIRONMENT,
    "VLLM_CPU_KVCACHE_SPACE": "6",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
ANSWER = "MEASURED "
VOCABULARY = 32_000


class EngineProcess:
    """One model in an engine of its own; measures what it is asked to."""

    def __init__(self, folder: Path, max_len: int, batch: int) -> None:
        command = [sys.executable, "-m", "tools.bench_vllm", "--engine", str(folder), str(max_len), str(batch)]
        self.process = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.measure(kind="ready")

    def measure(self, **request: Any) -> float:
        """Let the process run only during this call: threads of an idle engine can wait for work by spinning."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                self.process.send_signal(signal.SIGSTOP)
                return float(line.removeprefix(ANSWER))
        raise RuntimeError(f"the engine ended with code {self.process.wait()}")

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.close()
        self.process.wait(60)


def serve_requests(folder: str, max_len: int, batch: int) -> None:
    """The other side of `EngineProcess`."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=64,
        max_model_len=max_len,
        max_num_seqs=batch,
        max_num_batched_tokens=2048,
        distributed_executor_backend="uni",
    )

    engine = llm.llm_engine

    def run(prompts: list[list[int]], n_new: int) -> tuple[float, list[float]]:
        """Seconds in total, and of each step in which every row got a token that was not its first."""
        sampling = SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        steps, all_begun = [], False
        while engine.has_unfinished_requests():
            before = time.perf_counter()
            outputs = engine.step()
            if all_begun and len(outputs) == len(prompts):
                steps.append(time.perf_counter() - before)
            all_begun = all_begun or len(outputs) == len(prompts)
        return time.perf_counter() - begin, steps

    def ids(n: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, VOCABULARY, (n,), generator=generator).tolist()

    for line in sys.stdin:
        request = json.loads(line)
        answer = 0.0
        if request["kind"] == "first":
            answer, _ = run([ids(request["context"], request["seed"])], 1)
        elif request["kind"] == "decode":
            prompts = [ids(request["context"], -1 - row) for row in range(request["batch"])]
            run(prompts, 1)  # fills the prefix cache; rows that wait for others would end before those begin
            answer = statistics.median(run(prompts, 1 + request["tokens"])[1])
        print(f"{ANSWER}{answer}", flush=True)


def save_models(folder: Path, layers: int, max_len: int) -> dict[str, Path]:
    import torch
    from transformers import LlamaForCausalLM

    from nsa.hf import NSAConfig, NSAForCausalLM
    from tools.bench_generation import llama

    torch.manual_seed(0)
    config = NSAConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, max_position_embeddings=max_len)
    NSAForCausalLM(config).save_pretrained(folder / "nsa")
    theirs: LlamaForCausalLM = llama(layers)
    theirs.save_pretrained(folder / "llama")
    return {name: folder / name for name in ("nsa", "llama")}


def compare(engines: dict[str, EngineProcess], options: argparse.Namespace) -> list[Json]:
    cells: list[Json] = []

    def add(cell: Json) -> None:
        cells.append(cell)
        figures = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in cell.items())
        print(figures, flush=True)

    for context in options.contexts:
        first = {
            name: min(engine.measure(kind="first", context=context, seed=round_) for round_ in range(options.rounds))
            for name, engine in engines.items()
        }
        ratio = first["llama"] / first["nsa"]
        add({"measured": "first token", "context": spell(context), **_named(first, "s"), "ratio": ratio})
        for batch in options.batches:
            times: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(options.rounds):
                for name, engine in engines.items():
                    request = dict(kind="decode", context=context, batch=batch, tokens=options.tokens)
                    times[name].append(engine.measure(**request))
            best = {name: batch / min(values) for name, values in times.items()}
            cell = {"measured": "decode", "context": spell(context), "batch": batch, **_named(best, "tokens_per_s")}
            add(cell | {"ratio": best["nsa"] / best["llama"]})
    return cells


def _named(values: dict[str, float], unit: str) -> Json:
    return {f"{name}_{unit}": value for name, value in values.items()}


def main() -> None:
    if sys.argv[1:2] == ["--engine"]:
        return serve_requests(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--contexts", type=parse_lengths, default=parse_lengths("2k,8k,32k"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="generated per row")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    max_len = max(options.contexts) + 64 * (1 + options.tokens // 64 + 1)
    with tempfile.TemporaryDirectory() as folder:
        models = save_models(Path(folder), options.layers, max_len)
        engines = {name: EngineProcess(path, max_len, max(options.batches)) for name, path in models.items()}
        try:
            cells = compare(engines, options)
        finally:
            for engine in engines.values():
                engine.stop()
    if options.json:
        options.json.write_text(
            json.dumps({"layers": options.layers, "cells": cells}, indent=2) + "\n", encoding="utf-8"
        )
    return None


if __name__ == "__main__":
    main()
