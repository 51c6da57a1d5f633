"""Malformed and hostile HTTP requests to `nsa serve`: a 4xx status at once, never 500, and a server that goes on."""

import http.client
import json
import signal
import socket
import time
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="the server is in the serve extra")

from nsa_train.convert.export_folder import export_folder
from nsa_train.infer.request_guard import HostList
from tests.nsa_train.train.runs import environment
from tests.trained_runs import write_run
from tools.compare_generation import ServerProcess, nsa_serve

CONTEXT = 512
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
DEEP = "[" * 100_000
TEMPLATE = """\
{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{% if messages[0].content == 'loop' %}
{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{% endif %}
{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}assistant:"""

BAD_COMPLETIONS = {
    "no prompt": {},
    "empty prompt": {"prompt": ""},
    "prompt null": {"prompt": None},
    "prompt list": {"prompt": ["a", "b"]},
    "prompt tokens": {"prompt": [1, 2]},
    "prompt number": {"prompt": 7},
    "half of a character": {"prompt": "a\ud800b"},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens negative": {"max_tokens": -5},
    "max_tokens text": {"max_tokens": "many"},
    "max_tokens fraction": {"max_tokens": 1.5},
    "max_tokens bool": {"max_tokens": True},
    "max_tokens huge": {"max_tokens": 10**30},
    "max_tokens beyond the context": {"max_tokens": CONTEXT},
    "temperature negative": {"temperature": -1},
    "temperature tiny": {"temperature": 1e-300},
    "temperature text": {"temperature": "hot"},
    "temperature list": {"temperature": [1]},
    "top_p 0": {"top_p": 0},
    "top_p above 1": {"top_p": 1.01},
    "top_p negative": {"top_p": -0.1},
    "seed negative": {"seed": -1},
    "seed huge": {"seed": 2**64},
    "seed text": {"seed": "x"},
    "stop empty": {"stop": ""},
    "stop with an empty text": {"stop": ["a", ""]},
    "stop number": {"stop": 3},
    "stop of numbers": {"stop": [1, 2]},
    "stop long": {"stop": "a" * 5000},
    "stop many": {"stop": ["a"] * 200},
    "stop nested": {"stop": [["a"]]},
    "n 2": {"n": 2},
    "n 0": {"n": 0},
    "best_of": {"best_of": 3},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 5},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty -1": {"frequency_penalty": -1},
    "frequency_penalty huge": {"frequency_penalty": 1e30},
    "stream text": {"stream": "yes"},
    "suffix number": {"suffix": 1},
    "unknown field": {"ignore_eos": True},
    "unknown field of half a character": {"\ud800": True},
    "suffix of half a character": {"suffix": "\ud800"},
    "stop of half a character": {"stop": "\ud800"},
    "unknown model": {"model": "gpt2"},
    "model of half a character": {"model": "\ud800\n"},
    "model number": {"model": 5},
    "watermark": {"generation_config": json.dumps({"watermarking_config": {"bias": 2.5}})},
    "beams": {"generation_config": json.dumps({"num_beams": 10**6})},
    "cache": {"generation_config": json.dumps({"cache_implementation": "static"})},
    "new tokens in the config": {"max_tokens": None, "generation_config": json.dumps({"max_new_tokens": 10**9})},
    "repetition_penalty": {"generation_config": json.dumps({"repetition_penalty": 0})},
    "top_k": {"generation_config": json.dumps({"top_k": -4})},
    "config no JSON": {"generation_config": "{"},
    "config list": {"generation_config": "[1]"},
    "config object": {"generation_config": {"top_k": 3}},
}
BAD_CHATS = {
    "no messages": {"messages": None},
    "empty messages": {"messages": []},
    "messages text": {"messages": "hi"},
    "messages of text": {"messages": ["hi"]},
    "message without role": {"messages": [{"content": "hi"}]},
    "role unknown": {"messages": [{"role": "root", "content": "hi"}]},
    "content number": {"messages": [{"role": "user", "content": 5}]},
    "content nested": {"messages": [{"role": "user", "content": [{"type": "text", "text": ["a"]}]}]},
    "audio part": {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA"}}]}]},
    "image part": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http:"}}]}]},
    "half of a character": {"messages": [{"role": "user", "content": "\udfff"}]},
    "refused by the template": {"messages": [{"role": "system", "content": "x"}]},
    "audio": {"audio": {"voice": "alloy", "format": "wav"}},
    "modalities": {"modalities": ["text", "audio"]},
    "n 2": {"n": 2},
    "logprobs": {"logprobs": True},
    "tools text": {"tools": "all"},
    "tools of text": {"tools": ["all"]},
    "tool_calls": {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
    "tool_calls of text": {"messages": [*HI, {"role": "assistant", "tool_calls": ["f"]}]},
    "logit_bias token": {"logit_bias": {"999999": 1}},
    "logit_bias name": {"logit_bias": {"x": 1}},
    "logit_bias huge": {"logit_bias": {"1": 1e9}},
    "response_format": {"response_format": {"type": "json_schema"}},
    "another template": {"chat_template_kwargs": {"chat_template": "{{ 'a' * 9 }}"}},
    "tokenize": {"chat_template_kwargs": {"tokenize": False}},
    "kwargs list": {"chat_template_kwargs": [1]},
    "max_tokens 0": {"max_tokens": 0},
    "max_completion_tokens 0": {"max_completion_tokens": 0},
    "temperature negative": {"temperature": -0.5},
    "watermark": {"generation_config": json.dumps({"watermarking_config": {}})},
}  # fmt: skip
RAW_BODIES = {
    "empty": b"",
    "no JSON": b"{",
    "list": b"[]",
    "text": b'"x"',
    "null": b"null",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": 1e999}',
    "long number": b'{"prompt": "a", "max_tokens": ' + b"9" * 10_000 + b"}",
    "deep list": b'{"prompt": ' + DEEP[:10_000].encode() + b"}",
    "twice": b'{"prompt": "a", "prompt": "b"}',
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "form": b"prompt=a",
}


class GuardedServer(ServerProcess):
    def __init__(self, *command: str) -> None:
        super().__init__(command, env=environment(HF_HUB_OFFLINE="1"))
        self.address = urlsplit(self.url).netloc

    def send(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict]:
        """The status and the JSON of the answer."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.address, timeout=60)
        try:
            connection.request(method, path, raw, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")
        finally:
            connection.close()

    def refusal(self, path: str, body: object, **headers: str) -> dict:
        """The error of a request that must be refused."""
        status, answer = self.send("POST", path, body, **headers)
        assert 400 <= status < 500, (status, answer)
        assert answer["error"].keys() == {"message", "type", "param", "code"}
        assert answer["error"]["type"] == "invalid_request_error"
        return {"status": status, **answer["error"]}

    def require_answers(self) -> None:
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
            status, answer = self.send("POST", path, {**body, "max_tokens": 3, "temperature": 0})
            assert (status, answer.get("usage", {}).get("completion_tokens")) == (200, 3), answer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    export_folder(write_run(tmp_path_factory.mktemp("run")), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    running = GuardedServer(*nsa_serve(folder, "--context-length", str(CONTEXT), "--allowed-host", "Proxy.example"))
    yield running
    code = running.stop(signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in "".join(running.lines)


@pytest.mark.parametrize("stream", [False, True])
def test_malformed_completions_are_refused(server, stream):
    for name, fields in BAD_COMPLETIONS.items():
        refusal = server.refusal(
            COMPLETIONS, {"prompt": "a", "max_tokens": 2, "stream": stream, **fields} if fields else {}
        )
        assert refusal["status"] == 400, (name, refusal)
    server.require_answers()


@pytest.mark.parametrize("stream", [False, True])
def test_malformed_chats_are_refused(server, stream):
    for name, fields in BAD_CHATS.items():
        refusal = server.refusal(CHAT, {"messages": HI, "max_tokens": 2, "stream": stream, **fields})
        assert refusal["status"] == 400, (name, refusal)
    server.require_answers()


def test_bodies_that_are_no_request_are_refused(server):
    for path in (COMPLETIONS, CHAT):
        for name, raw in RAW_BODIES.items():
            assert server.refusal(path, raw)["status"] == 400, (path, name)
    server.require_answers()


def test_harmless_fields_of_openais_clients_are_accepted(server):
    more = dict(n=1, user="me", presence_penalty=0, stop=["é", "\n\n"], seed=1, top_p=0.9, stream_options=None)
    assert (
        server.send("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 2, "logprobs": None, "echo": False, **more})[0]
        == 200
    )
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": calls}]
    config = json.dumps({"do_sample": True, "max_new_tokens": 3, "top_k": 5, "transformers_version": "5.0"})
    chat = dict(messages=messages, logit_bias={"65": 2}, chat_template_kwargs={"enable_thinking": False}, **more)
    status, answer = server.send(
        "POST", CHAT, {**chat, "generation_config": config, "response_format": {"type": "text"}}
    )
    assert (status, answer["usage"]["completion_tokens"] <= 3) == (200, True)


def test_a_prompt_that_the_context_cannot_hold_is_refused_at_once(server):
    began = time.monotonic()
    for size in (CONTEXT, 20_000, 1_000_000, 30_000_000):
        for path, body in (
            (COMPLETIONS, {"prompt": "a" * size}),
            (CHAT, {"messages": [{"role": "user", "content": "a" * size}]}),
        ):
            refusal = server.refusal(path, body)
            assert (refusal["status"], refusal["code"]) == (413 if size > 50_000 else 400, "context_length_exceeded")
    server.require_answers()
    assert time.monotonic() - began < 60
    # What fits is answered, up to the end of the context and no further.
    status, answer = server.send("POST", COMPLETIONS, {"prompt": "a" * (CONTEXT - 5), "temperature": 0})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 5)


def test_a_body_without_a_length_is_counted(server):
    with socket.create_connection(server.address.split(":"), timeout=60) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        for _ in range(100):
            connection.sendall(b"4000\r\n" + b"a" * 0x4000 + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(4096).split()[1] == b"413"
    server.require_answers()


def test_hosts_that_are_not_this_server_are_refused(server):
    port = server.address.partition(":")[2]
    for path in ("/health", "/v1/models"):
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "[::1",
            "10.1.2.3",
        ):
            assert server.send("GET", path, Host=host)[0] == 421, host
        for host in ("localhost", f"LOCALHOST:{port}", "127.0.0.1", "[::1]:80", "localhost.", f"proxy.example:{port}"):
            assert server.send("GET", path, Host=host)[0] == 200, host
    assert server.refusal(COMPLETIONS, {"prompt": "a"}, Host="evil.example")["status"] == 421
    assert server.refusal(COMPLETIONS, {"prompt": "a"}, Origin="http://evil.example")["status"] == 403
    assert server.refusal(COMPLETIONS, {"prompt": "a"}, Origin="null")["status"] == 403
    assert server.send("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1}, Origin=server.url)[0] == 200


def test_a_server_on_every_interface_may_be_addressed_by_any_address_and_no_foreign_name():
    everywhere, one = HostList("0.0.0.0"), HostList("192.0.2.7", ["nsa.lan"])
    assert everywhere.allows("192.0.2.1:8000")
    assert everywhere.allows("[2001:db8::1]")
    assert everywhere.allows(socket.gethostname())
    assert not everywhere.allows("evil.example")
    assert one.allows("192.0.2.7:80")
    assert one.allows("NSA.lan")
    assert not one.allows("192.0.2.8")


def test_other_endpoints_are_off(server):
    for path in (
        "/load_model",
        "/reset",
        "/v1/audio/transcriptions",
        "/v1/responses",
        "/v1/systemone",
        "/docs",
        "/openapi.json",
    ):
        assert server.refusal(path, {"model": "gpt2"})["status"] == 404, path
    assert server.send("GET", COMPLETIONS)[0] == 405
    assert server.send("DELETE", "/v1/models")[0] == 405


def test_a_template_without_end_is_refused_and_others_are_answered(server):
    assert "5 s" in server.refusal(CHAT, {"messages": [{"role": "user", "content": "loop"}]})["message"]
    server.require_answers()


def test_connections_that_end_early_leave_the_server_free(server):
    host, port = server.address.split(":")
    body = json.dumps({"prompt": "a", "max_tokens": 400, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for cut in (len(head) // 2, len(head), len(head) + 5, len(head) + len(body)):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall((head + body)[:cut])
            if cut == len(head) + len(body):
                assert connection.recv(100)
    server.require_answers()
