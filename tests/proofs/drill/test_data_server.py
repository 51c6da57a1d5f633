"""Faults of the drill's data server, seen by the client of a run: each is met, and all are over when it recovers."""

from http.server import BaseHTTPRequestHandler

import pytest

from nsa_train.data.source.http import HttpClient, ReadDeadline, RetryPolicy, ServerUnreachable
from proofs.drill.data_server import DataServer, ServerFault

SHORT = RetryPolicy(connect_timeout_s=1, read_timeout_s=1, attempts=3, backoff_s=0.05, deadline_s=4)
PATIENT = RetryPolicy(connect_timeout_s=1, read_timeout_s=1, attempts=8, backoff_s=0.1, deadline_s=20)


@pytest.fixture
def server(tmp_path):
    data_server = DataServer(tmp_path, count=40)
    yield data_server
    data_server.close()


def read(server: DataServer, policy: RetryPolicy) -> bytes:
    return HttpClient(policy).range(server.url, 100, 200, ReadDeadline(policy))


@pytest.mark.parametrize("fault", [fault for fault in ServerFault if fault is not ServerFault.TRUNCATED])
def test_a_lasting_fault_fails_the_read(server, fault):
    server.fault = fault
    with pytest.raises(ServerUnreachable):
        read(server, SHORT)


@pytest.mark.parametrize("fault", ServerFault)
def test_a_short_fault_is_retried(server, fault, monkeypatch):
    wanted = read(server, SHORT)
    server.fault, answer, met = fault, server._answer, []

    def answer_and_end_the_fault_at_the_third(request: BaseHTTPRequestHandler) -> None:
        met.append(server.fault)
        if len(met) == 3:
            server.fault = None
        answer(request)

    monkeypatch.setattr(server, "_answer", answer_and_end_the_fault_at_the_third)
    assert read(server, PATIENT) == wanted
    assert met == [fault] * 3
