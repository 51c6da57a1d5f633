"""`nsa serve` over HTTP: the tokens of `nsa generate`, plain and streamed, one model only, and a clean end."""

import json
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server is in the serve extra")

from nsa.errors import ConfigError
from nsa_train.infer import load_model
from nsa_train.listen_address import free_port
from proofs.load.serving import StreamingClient, put_under_load
from tests.nsa_train.train.runs import environment
from tests.trained_runs import write_run
from tools.compare_generation import ServerProcess, nsa_serve

# The second one is read in several chunks.
PROMPTS = ["The ", "Read the manual of the package before you install it. " * 3]


class RunningServer(ServerProcess):
    def __init__(self, model: Path, *words: str) -> None:
        super().__init__(nsa_serve(model, *words), env=environment(HF_HUB_OFFLINE="1"))

    def complete(self, prompt: str, **body) -> dict:
        return json.loads(self.post("/v1/completions", prompt=prompt, **{"temperature": 0, "max_tokens": 24} | body))

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=100) as answer:
            return json.loads(answer.read())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def server(run):
    running = RunningServer(run)
    yield running
    if running.process.poll() is None:
        running.stop(signal.SIGTERM)


@pytest.fixture(scope="module")
def expected(run) -> list[str]:
    loaded = load_model(run, device="cpu")
    return [loaded.generate(prompt, temperature=0, max_new_tokens=24) for prompt in PROMPTS]


def test_it_says_where_it_serves_what_and_that_requests_queue(server, run):
    said = "".join(server.lines)
    assert f"{server.url}/v1" in said
    assert "step10" in said
    assert "one after another" in said
    assert server.url.startswith("http://127.0.0.1:")


def test_it_says_so_once_it_accepts_connections(server):
    listening, said = (
        next(number for number, line in enumerate(server.lines) if words in line)
        for words in ("Uvicorn running on", "serving ")
    )
    assert listening < said


def test_completions_are_the_text_of_generate(server, expected):
    for prompt, text in zip(PROMPTS, expected, strict=True):
        answer = server.complete(prompt)
        assert answer["choices"][0]["text"] == text
        assert answer["usage"] == {
            "completion_tokens": 24, "prompt_tokens": len(prompt), "total_tokens": 24 + len(prompt),
        }  # fmt: skip


def test_streamed_pieces_are_the_same_text(server, expected):
    for prompt, text in zip(PROMPTS, expected, strict=True):
        raw = server.post("/v1/completions", prompt=prompt, temperature=0, max_tokens=24, stream=True).decode()
        *lines, end, nothing = raw.split("\n\n")
        assert (end, nothing) == ("data: [DONE]", "")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        # Transformers' streamer drops an incomplete character at the very end.
        assert text.rstrip("�") == streamed.rstrip("�")
        assert chunks[-1]["usage"]["completion_tokens"] == 24
        assert len(chunks) > 5


def test_clients_that_go_away_leave_the_others_answers_and_the_server_free(server):
    figures = put_under_load(StreamingClient(server.url, None, tokens=12), clients=6, seconds=3.0)
    assert figures["failed"] == []
    assert figures["dropped by clients"] > 0
    assert figures["as the idle server's"] == figures["answers"] > 0
    assert figures["idle answer is the same after"]
    idle, behind = (
        figures["idle answer s before, after"][1],
        figures["answer s behind 8 dropped of 10 times the length"],
    )
    assert behind < 8 * idle + 2  # 80 times the work was dropped


def test_requests_at_once_queue_and_get_their_own_answers(server, expected):
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = server.complete(PROMPTS[number % 2])["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert answers == {number: expected[number % 2] for number in range(6)}


def test_temperature_and_seed_take_effect(server, expected):
    first, again = (server.complete(PROMPTS[0], temperature=1.5, seed=1)["choices"][0]["text"] for _ in range(2))
    assert first == again != expected[0]
    assert server.complete(PROMPTS[0], temperature=1.5, seed=2)["choices"][0]["text"] != first


def test_a_stop_string_of_a_request_ends_it(server):
    text = server.complete("ABC", max_tokens=40)["choices"][0]["text"]
    stop = next(letter for letter in text if letter.isascii() and letter.isprintable())
    answer = server.complete("ABC", max_tokens=40, stop=[stop])
    assert answer["choices"][0]["text"] == text[: text.index(stop) + 1]


def test_no_request_can_name_load_or_unload_a_model(server, run, expected):
    assert server.get("/v1/models")["data"] == [{"id": str(run), "object": "model", "created": 0, "owned_by": "nsa"}]
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.complete("A", model="gpt2")
    assert refused.value.code == 400
    for path in ("/load_model", "/reset"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post(path, model="gpt2")
        assert refused.value.code == 404
    assert server.complete(PROMPTS[0], model=str(run))["choices"][0]["text"] == expected[0]


def test_chat_without_a_template_is_refused_with_the_reason(server):
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert refused.value.code == 400
    assert b"chat template" in refused.value.read()


def test_a_port_in_use_is_named(server):
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"port {port}"):
        free_port("127.0.0.1", port)
    assert free_port("127.0.0.1", 0) > 0


def test_sigterm_finishes_the_request_and_ends_cleanly(server):
    content = json.dumps(dict(prompt="A", temperature=0, max_tokens=300, stream=True)).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as answer:
        answer.readline()  # the answer has begun
        server.process.send_signal(signal.SIGTERM)
        *_, last, _done = (line for line in answer.read().decode().split("\n\n") if line.strip())
    assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] == 300
    assert server.process.wait(100) == 0
    assert "Traceback" not in "".join(server.lines)


def test_a_chat_template_answers_chat(run, tmp_path):
    from nsa_train.convert.export_folder import export_folder

    export_folder(run, tmp_path / "exported")
    (tmp_path / "exported" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}assistant:"
    )
    loaded = load_model(tmp_path / "exported", device="cpu")
    messages = [{"role": "user", "content": "hi"}]
    running = RunningServer(tmp_path / "exported", "--model-endpoints")
    try:
        assert b'"ready"' in running.post(
            "/load_model", model=str(tmp_path / "exported")
        )  # as `transformers chat` asks
        with pytest.raises(urllib.error.HTTPError) as refused:
            running.post("/load_model", model="gpt2")
        assert refused.value.code == 400
        running.post("/reset")
        answer = json.loads(running.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=12))
        assert answer["usage"]["prompt_tokens"] == len(loaded.encode_chat(messages))
        content = answer["choices"][0]["message"]["content"]
    finally:
        assert running.stop(signal.SIGINT) == 0
    from nsa_train.infer import SamplingSettings
    from nsa_train.infer.generate import generate_batch

    settings = SamplingSettings(temperature=0, max_new_tokens=12)
    assert content == generate_batch(loaded, [loaded.encode_chat(messages)], settings).completions[0].text
