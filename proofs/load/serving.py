"""A server of completions under many clients, some of which go away before the end of their answer.

    python -m proofs.load.serving nsa MODEL                   `nsa serve` (run folder, checkpoint or exported folder)
    python -m proofs.load.serving vllm FOLDER --python PY     vLLM's server; PY is the Python of .ci/install-vllm

Each client asks for streamed greedy completions of a few prompts, one after another; every third request is dropped in
the middle by closing the connection. Answers are compared with those that the idle server gave before; vLLM computes
several requests in one batch, whose sums are rounded otherwise, so that a near tie may be decided otherwise there.
Afterwards the server must answer at once again: what was dropped is no longer computed.
"""

import argparse
import http.client
import json
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from proofs.load.process_figures import of_group, process_figures
from tools.compare_generation import VLLM_ENVIRONMENT, ServerProcess, nsa_serve, vllm_serve

PROMPTS = ("The ", "A package is ", "Read the manual before you ", "Files in this folder " * 4)
_TIMEOUT_S = 900.0
_LONG_ONES, _LONGER = 8, 10


@dataclass
class ClientRecord:
    """Times and answers of one client."""

    first_piece_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)
    same: int = 0
    different: int = 0
    dropped: int = 0
    failed: list[str] = field(default_factory=list)


class StreamingClient:
    """Asks one server for streamed completions."""

    def __init__(self, url: str, model: str | None, tokens: int) -> None:
        self._address, self.tokens = urlsplit(url).netloc, tokens
        self._more = {} if model is None else {"model": model}

    def complete(
        self, prompt: str, record: ClientRecord, drop_after: int | None = None, *, tokens: int | None = None
    ) -> str | None:
        """The text, or None if the connection was dropped after this many pieces."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": tokens or self.tokens, "stream": True, **self._more}
        began, pieces = time.monotonic(), list[str]()
        connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"status {answer.status}: {answer.read(200)!r}")
            while line := answer.readline():
                text = line.decode().strip().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                if not pieces:
                    record.first_piece_s.append(time.monotonic() - began)
                pieces.append("".join(choice["text"] for choice in json.loads(text)["choices"]))
                if drop_after is not None and len(pieces) > drop_after:
                    record.dropped += 1
                    return None
        finally:
            connection.close()
        record.answer_s.append(time.monotonic() - began)
        return "".join(pieces)


def put_under_load(client: StreamingClient, clients: int, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Ask from `clients` threads for about this long; returns the figures."""
    alone = ClientRecord()
    expected = {prompt: client.complete(prompt, alone) for prompt in PROMPTS}
    records = [ClientRecord() for _ in range(clients)]
    until = time.monotonic() + seconds

    def ask(number: int) -> None:
        chance, record, count = random.Random(seed * 1000 + number), records[number], number
        while time.monotonic() < until:
            count += 1
            prompt = chance.choice(PROMPTS)
            try:
                text = client.complete(prompt, record, chance.randrange(4) if count % 3 == 0 else None)
            except (OSError, http.client.HTTPException, ValueError) as error:
                record.failed.append(f"{type(error).__name__}: {error}"[:120])
                continue
            if text is not None:
                record.same += text == expected[prompt]
                record.different += text != expected[prompt]

    began = time.monotonic()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    after, dropped = ClientRecord(), ClientRecord()
    again = client.complete(PROMPTS[0], after)
    for _ in range(_LONG_ONES):
        client.complete(PROMPTS[0], dropped, drop_after=1, tokens=_LONGER * client.tokens)
    behind = ClientRecord()
    client.complete(PROMPTS[0], behind)
    return {
        "clients": clients,
        "answers": sum(record.same + record.different for record in records),
        "answers per s": round(sum(record.same + record.different for record in records) / took, 2),
        "as the idle server's": sum(record.same for record in records),
        "dropped by clients": sum(record.dropped for record in records),
        "failed": [text for record in records for text in record.failed],
        "first piece s, median": _median([s for record in records for s in record.first_piece_s]),
        "answer s, median": _median([s for record in records for s in record.answer_s]),
        "idle answer s before, after": [_median(alone.answer_s), _median(after.answer_s)],
        f"answer s behind {_LONG_ONES} dropped of {_LONGER} times the length": _median(behind.answer_s),
        "idle answer is the same after": again == expected[PROMPTS[0]],
    }


def measure_server(
    command: Sequence[str], model: str | None, *, clients: int, seconds: float, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Start a server, put it under load in rounds, stop it; a round's figures include the server's processes."""
    server = ServerProcess(command, env={**os.environ, **VLLM_ENVIRONMENT})
    rows = []
    try:
        client = StreamingClient(server.url, model, tokens)
        for number in range(rounds):
            row = put_under_load(client, clients, seconds, seed=number)
            rows.append({**row, "server": process_figures(of_group(server.process.pid))})
            print(json.dumps(rows[-1]), flush=True)
    finally:
        code = server.stop()
    if code not in (0, -15, 143):
        rows[-1]["failed"].append(f"the server ended with {code}")
    return rows


def _median(values: list[float]) -> float | None:
    return round(median(values), 3) if values else None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", choices=("nsa", "vllm"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--python", default=sys.executable, help="Python that has vLLM")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each round")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.server == "nsa":
        command, model = nsa_serve(options.model), None
    else:
        command, model = vllm_serve(options.python, options.model), str(options.model)
    amounts = {name: getattr(options, name) for name in ("clients", "seconds", "tokens", "rounds")}
    rows = measure_server(command, model, **amounts)
    return 1 if any(row["failed"] or not row["idle answer is the same after"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
