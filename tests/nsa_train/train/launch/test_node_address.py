"""Addresses, network interfaces and secrets of `nsa launch` on several nodes."""

import socket

import pytest

from nsa.errors import ConfigError
from nsa_train.train.launch import node_address
from nsa_train.train.launch.node_address import (
    interface_of,
    is_loopback,
    loopback_interface,
    make_secret,
    own_address,
    read_secret,
)


@pytest.mark.parametrize(
    ("endpoint", "listen", "wrong"),
    [
        ("here", None, "HOST:PORT"),
        ("here:http", None, "HOST:PORT"),
        ("no-such-host.invalid:29400", None, "no-such-host"),
        ("127.0.0.1:29400", "0.0.0.0", "--listen 0.0.0.0"),
        ("127.0.0.1:29400", "::", "--listen ::"),
        ("127.0.0.1:29400", "192.0.2.77", "--listen 192.0.2.77"),
        ("127.0.0.1:29400", "eth0", "--listen eth0"),
    ],
)
def test_an_address_that_is_none_or_too_wide_is_refused(monkeypatch, endpoint, listen, wrong):
    monkeypatch.setattr(node_address, "_NAME_WAIT_S", 0.0)
    with pytest.raises(ConfigError, match=wrong):
        own_address(endpoint, listen)


def test_a_name_that_is_loopback_here_is_refused(monkeypatch):
    """Debian resolves the machine's own name to 127.0.1.1: this node would wait where no other can come."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29400))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with pytest.raises(ConfigError, match="--rdzv-endpoint node1"):
        own_address("node1:29400", None)


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == loopback_interface() == "lo"
    assert interface_of("192.0.2.77") is None


def test_a_secret_is_made_once_and_read_by_all(tmp_path):
    first = read_secret(make_secret(tmp_path))
    assert len(first) == 64
    assert read_secret(make_secret(tmp_path)) == first
    assert read_secret(make_secret(tmp_path / "other")) != first


@pytest.mark.parametrize(
    ("host", "safe"),
    [("127.0.0.1", True), ("127.0.0.9", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False),
     ("", False), ("10.1.2.3", False), ("node7", False)],
)  # fmt: skip
def test_loopback_is_told_from_the_rest(host, safe):
    assert is_loopback(host) == safe
