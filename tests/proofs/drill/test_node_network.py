"""Nodes in network namespaces: separate hosts for every process in them, invisible outside, gone with their owner."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nsa.errors import ConfigError
from proofs import import_path
from proofs.drill import node_network
from proofs.drill.node_network import NetworkNode, NodeNetwork, unshare_options
from tests.proofs.drill.test_suite import processes_with, wait_until

ROOT = Path(__file__).parents[3]
SERVE = """
import socket
listener = socket.create_server(("", 5000))
print("listening", flush=True)
while True:
    client, peer = listener.accept()
    client.sendall(peer[0].encode())
    client.close()
"""
ASK = "import socket, sys; print(socket.create_connection((sys.argv[1], 5000), timeout=3).recv(99).decode())"


def run(node: NetworkNode, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = node.command([sys.executable, "-c", program, *words])
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def serve(node: NetworkNode) -> subprocess.Popen[str]:
    process = subprocess.Popen(node.command([sys.executable, "-c", SERVE]), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


@pytest.fixture
def asked_again():
    """The answer of `unshare_options` is kept for the process."""
    unshare_options.cache_clear()
    yield
    unshare_options.cache_clear()


@pytest.fixture
def network(tmp_path, permitted):
    with NodeNetwork(tmp_path, 2) as nodes:
        yield nodes


def test_nodes_reach_each_other_by_name_and_nothing_else(network):
    first, second = network.nodes
    serve(first)
    assert run(second, ASK, "node0").stdout.strip() == second.address
    names = run(second, "import socket; print(socket.gethostname(), socket.getfqdn(), len(socket.if_nameindex()))")
    assert names.stdout.split() == ["node1", "node1", "2"]  # loopback and the link
    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]
        asked = run(second, f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=3)")
    assert "ConnectionRefusedError" in asked.stderr
    asked = run(second, "import socket; socket.create_connection(('192.0.2.1', 80), timeout=3)")
    assert "Network is unreachable" in asked.stderr


def test_the_machine_sees_none_of_it(tmp_path, permitted):
    hosts, links = Path("/etc/hosts").read_bytes(), socket.if_nameindex()
    with NodeNetwork(tmp_path, 2):
        assert socket.if_nameindex() == links
        assert Path("/etc/hosts").read_bytes() == hosts
        mounts = Path("/proc/mounts").read_text()
        assert str(tmp_path) not in mounts


def test_an_unplugged_node_is_silent_and_comes_back(network):
    first, second = network.nodes
    serve(first)
    first.unplug()
    assert "Error" in run(second, ASK, "node0").stderr
    first.plug_in()

    def answers() -> bool:
        return run(second, ASK, "node0").stdout.strip() == second.address

    wait_until(answers, "the link does not carry again", timeout_s=60)  # the kernel brings it up in its own time


def test_a_killed_node_ends_its_processes_and_boots_with_another_address(network):
    first, second = network.nodes
    server = serve(first)
    first.kill()
    assert server.wait(60) == -signal.SIGKILL
    assert not first.running
    first.boot("10.213.0.99")
    serve(first)
    assert run(second, "import socket; print(socket.gethostbyname('node0'))").stdout.strip() == "10.213.0.99"
    assert run(second, ASK, "node0").stdout.strip() == second.address


def test_a_slow_link_is_slow_until_it_is_not(network):
    first, second = network.nodes
    send = """
import socket, sys, time
listener = socket.create_server(("", 6000))
print("listening", flush=True)
while True:
    client, _ = listener.accept()
    client.sendall(bytes(500_000))
    client.close()
"""
    fetch = """
import socket, sys, time
began, link = time.monotonic(), socket.create_connection((sys.argv[1], 6000), timeout=20)
while link.recv(1 << 16):
    pass
print(time.monotonic() - began)
"""
    sender = subprocess.Popen(first.command([sys.executable, "-c", send]), stdout=subprocess.PIPE, text=True)
    assert sender.stdout is not None
    sender.stdout.readline()
    first.limit_rate(4)  # 4 Mbit in a second
    slow = float(run(second, fetch, "node0").stdout)
    first.set_full_rate()
    assert slow > 0.5
    wait_until(lambda: float(run(second, fetch, "node0").stdout) < slow / 2, "the link stays slow", timeout_s=60)


def test_killing_the_owner_ends_its_nodes(tmp_path, permitted):
    program = (
        "import sys, time; from pathlib import Path; from proofs.drill.node_network import NodeNetwork\n"
        "network = NodeNetwork(Path(sys.argv[1]), 2).__enter__()\n"
        "import subprocess; subprocess.Popen(network.nodes[0].command(['sleep', sys.argv[2]]))\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    naps = f"611.{os.getpid()}"
    environment = {**os.environ, "PYTHONPATH": import_path()}
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), naps], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        wait_until(lambda: processes_with(f"sleep\0{naps}"), "no process on the node")
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: not processes_with(f"sleep\0{naps}"), "a process of a node lives on", 10)
    wait_until(lambda: not processes_with(str(tmp_path)), "the first process of a node lives on", 10)


def test_what_is_missing_is_named(monkeypatch, asked_again):
    monkeypatch.setattr("shutil.which", lambda program, path=None: None if program == "tc" else "/bin/true")
    with pytest.raises(ConfigError, match="iproute2"):
        unshare_options()


def test_a_refusal_of_the_kernel_is_an_error_with_a_fix(monkeypatch, permitted, asked_again):
    monkeypatch.setattr(node_network, "_NODE", ("--net", "--no-such-namespace"))
    with pytest.raises(ConfigError, match="Run it as root"):
        unshare_options()
