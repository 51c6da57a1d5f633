"""vLLM's OpenAI server with the plugin: many requests at random times, aborted requests, memory over many requests."""

import http.client
import json
import os
import random
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.nsa.vllm.engines import BLOCK, MAX_LEN, export_small_model, random_prompts, transformers_tokens
from tools.compare_generation import VLLM_ENVIRONMENT, ServerProcess, vllm_serve

N_NEW = 24


class VllmServer(ServerProcess):
    def __init__(self, folder: Path, *words: str) -> None:
        self.model = str(folder)
        sizes = ["--block-size", str(BLOCK), "--max-model-len", str(MAX_LEN), "--max-num-seqs", "8"]
        command = vllm_serve(sys.executable, folder, *sizes, "--max-num-batched-tokens", "256", *words)
        super().__init__(command, env={**os.environ, **VLLM_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})

    def body(self, prompt: list[int], n_new: int = N_NEW, **more: object) -> dict[str, object]:
        fixed = dict(model=self.model, temperature=0, ignore_eos=True, return_token_ids=True)
        return {**fixed, "prompt": prompt, "max_tokens": n_new, **more}

    def tokens(self, prompt: list[int], n_new: int = N_NEW) -> list[int]:
        (choice,) = json.loads(self.post("/v1/completions", **self.body(prompt, n_new)))["choices"]
        return choice["token_ids"]

    def abort(self, prompt: list[int]) -> None:
        """Ask for a long answer, and hang up after its first token."""
        at = urlsplit(self.url)
        connection = http.client.HTTPConnection(at.hostname, at.port, timeout=120)
        body = json.dumps(self.body(prompt, 1500, stream=True))
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.getresponse().readline()
        connection.close()

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 60
        while self.metric("num_requests_running") or self.metric("num_requests_waiting"):
            assert time.monotonic() < deadline, "requests are still running"
            time.sleep(0.1)

    def resident_mib(self) -> float:
        """Resident memory of the server and its engine's process."""
        total, parents = 0, {self.process.pid}
        for status in sorted(Path("/proc").glob("[0-9]*/status"), key=lambda path: int(path.parent.name)):
            try:
                fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            except OSError:
                continue  # it has ended
            if int(fields["Pid"]) in parents or int(fields["PPid"]) in parents:
                parents.add(int(fields["Pid"]))
                total += int(fields.get("VmRSS", "0 kB").split()[0])
        return total / 1024


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple]:
    folder = tmp_path_factory.mktemp("exported")
    model = export_small_model(folder)
    server = VllmServer(folder)
    yield server, model
    server.stop()


def answers_at_random_times(server: VllmServer, prompts: list[list[int]], spread_s: float) -> list[list[int]]:
    """Send each request at a random moment, independent of the others."""
    generator = random.Random(0)
    delays = [generator.uniform(0, spread_s) for _ in prompts]

    def ask(number: int) -> list[int]:
        time.sleep(delays[number])
        return server.tokens(prompts[number])

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, range(len(prompts))))


def mixed_prompts(n: int) -> list[list[int]]:
    """Draw prompts of 1 to 1,500 tokens; every third begins like another one."""
    generator = random.Random(1)
    prompts = random_prompts([generator.choice((1, 5, 30, 70, 200, 500, 1500)) for _ in range(n)])
    return [prompts[i - 3][:-2] + prompt[:40] if i % 3 == 2 else prompt for i, prompt in enumerate(prompts)]


def check_requests(served, n: int, spread_s: float) -> None:
    server, model = served
    prompts = mixed_prompts(n)
    hits = server.metric("prefix_cache_hits_total")
    answers = answers_at_random_times(server, prompts, spread_s)
    assert answers == transformers_tokens(model, prompts, N_NEW)
    longest = prompts.index(max(prompts, key=len))  # its prefix is cached by now, however slowly requests arrived
    assert server.tokens(prompts[longest]) == answers[longest]
    assert server.metric("prefix_cache_hits_total") > hits


def test_requests_at_random_times_get_the_answers_they_get_alone(served):
    check_requests(served, 24, 2.0)


@pytest.mark.nightly
def test_two_hundred_requests_at_random_times(served):
    check_requests(served, 200, 20.0)


def test_an_aborted_request_frees_its_pages(served):
    server, _ = served
    for prompt in random_prompts((400, 30, 1100), seed=5):
        server.abort(prompt)
    server.wait_until_idle()
    assert server.metric("kv_cache_usage_perc") == 0


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_memory_is_flat_over_two_thousand_requests(served):
    server, _ = served
    sizes = []
    for group in range(10):
        prompts = random_prompts([random.Random(group).choice((5, 60, 300)) for _ in range(200)], seed=group)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda prompt: server.tokens(prompt, 8), prompts))
        sizes.append(server.resident_mib())
    print("resident MiB after every 200 requests:", [round(size) for size in sizes])
    assert max(sizes[5:]) - sizes[4] < 20


@pytest.mark.nightly
def test_two_tensor_parallel_ranks_give_the_same_tokens(tmp_path):
    options = dict(phi="mlp", phi_pos_emb=True, bias=True, out_bias=True, qk_norm=True)
    model = export_small_model(tmp_path, **options)
    prompts = random_prompts((1, 40, 333, 1200))
    server = VllmServer(tmp_path, "--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    try:
        answers = answers_at_random_times(server, prompts, 1.0)
    finally:
        server.stop()
    assert answers == transformers_tokens(model, prompts, N_NEW)
