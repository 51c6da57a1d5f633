"""Network access to a running `nsa launch`: real processes, their listening sockets, and an attack."""

import base64
import inspect
import os
import pickle
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from nsa_train import names
from nsa_train.record.heartbeat_record import last_beat
from nsa_train.train.launch import rendezvous
from nsa_train.train.launch.node_address import (
    SECRET,
    interface_of,
)
from nsa_train.train.launch.rendezvous import (
    _LOST_S,
    SEVERAL_NODES,
    _connect_store,
    _serve_store,
    _SeveralNodes,
    _SignedBackend,
)
from tests import fork_server
from tests.nsa_train.train.runs import ROOT, environment, free_port, write_config

WAIT_S = 300
OTHERS_S = 4.0
"""What other listeners get after the first store has answered: those that are no stores never do."""
READ_S = 3.0
"""torch's rendezvous reads its state from the store every second."""


class Launched:
    """`nsa launch` with a small model."""

    def __init__(self, at: Path, *words: str, **variables: str) -> None:
        self.folder = at / "run"
        self.log = (at / "log").open("a")
        words = ["-m", "nsa_train.cli", "launch", *words, str(write_config(at))]
        words += ["train.steps=4900", f"train.out_dir={self.folder}"]
        # The launcher is forked; the agent and the ranks, whose sockets are looked for, are new interpreters.
        self.process = fork_server.start(
            words, cwd=ROOT, env=environment(**variables), stdout=self.log, stderr=self.log
        )

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()  # its ranks die with it
        self.process.wait()
        self.log.close()

    def step(self, rank: int) -> int:
        beat = last_beat(self.folder / names.heartbeat(rank), names.PROGRESS)
        return beat.step if beat else 0

    def wait_for_step(self, step: int, ranks: int = 2) -> None:
        deadline = time.monotonic() + WAIT_S
        while min(self.step(rank) for rank in range(ranks)) < step:
            assert self.process.poll() is None, Path(self.log.name).read_text()
            assert time.monotonic() < deadline, f"step {step} never came"
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


def network_interface() -> dict[str, str]:
    """Interface through which gloo listens to the network, where there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        if name := interface_of(probe.getsockname()[0]):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    pids = [pid]
    for known in pids:
        pids += [child for child, parent in parents.items() if parent == known]
    return pids


def listeners(pid: int) -> set[tuple[str, int]]:
    """Address and port of every TCP socket on which a process or a descendant of it listens."""
    sockets = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == "0A":  # LISTEN
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                sockets[fields[9]] = (socket.inet_ntop(family, b"".join(words)), int(port, 16))
    addresses = set()
    for process in tree(pid):
        with suppress(OSError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    inode = os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
                    if inode in sockets:
                        addresses.add(sockets[inode])
    return addresses


class Bomb:
    """Runs a command in whoever unpickles it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def attack(ports: set[int], marker: Path, key: str) -> int:
    """Put a state into the rendezvous of every store, under a known name and every name it lists; how many had it.

    A listener that is no store never answers, and torch's client waits for ever: processes of their own.
    """
    bomb = base64.b64encode(pickle.dumps(Bomb(marker))).decode()
    attackers = [get_context("fork").Process(target=_attack, args=(port, bomb, key), daemon=True) for port in ports]
    for attacker in attackers:
        attacker.start()
    until = time.monotonic() + WAIT_S
    while any(attacker.is_alive() for attacker in attackers) and time.monotonic() < until:
        if any(attacker.exitcode == 0 for attacker in attackers):
            until = min(until, time.monotonic() + OTHERS_S)
        time.sleep(0.05)
    for attacker in attackers:
        attacker.kill()
        attacker.join()
    return sum(attacker.exitcode == 0 for attacker in attackers)


def _attack(port: int, bomb: str, key: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
    for name in {key, *(known for known in store.list_keys() if "rendezvous" in known)}:
        store.set(name, bomb)


def test_the_listeners_of_a_process_are_found():
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("", 0)) as everywhere:
        assert {("127.0.0.1", here.getsockname()[1]), ("0.0.0.0", everywhere.getsockname()[1])} <= listeners(
            os.getpid()
        )


@pytest.fixture(scope="module")
def one_node(tmp_path_factory):
    with Launched(tmp_path_factory.mktemp("one_node"), "--nproc", "2", **network_interface()) as run:
        run.wait_for_step(2)
        yield run


def test_one_node_listens_on_loopback_only(one_node):
    addresses = listeners(one_node.process.pid)
    assert addresses, "the ranks meet in a store, which listens"
    assert {address for address, _ in addresses if not ip_address(address).is_loopback} == set(), addresses


def test_one_node_unpickles_nothing_that_is_put_into_its_store(one_node, tmp_path):
    marker = tmp_path / "executed"
    rank = last_beat(one_node.folder / names.heartbeat(1)).pid
    os.kill(rank, signal.SIGSTOP)  # the other one waits for it: the run takes no CPU time while it is attacked
    ports = {port for _, port in listeners(one_node.process.pid)}
    assert attack(ports, marker, "torch.rendezvous.nsa"), "no store could be reached: the attack shows nothing"
    time.sleep(READ_S)
    os.kill(rank, signal.SIGCONT)
    one_node.wait_for_step(one_node.step(0) + 2)
    assert not marker.exists(), "code from the network was executed"
    assert one_node.stop() == 10


@pytest.mark.nightly
def test_several_nodes_listen_at_their_address_and_unpickle_only_what_is_signed(tmp_path):
    """Two launchers on one machine stand for two nodes that share the run folder."""
    marker, port = tmp_path / "executed", free_port()
    words = ("--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "known")
    with Launched(tmp_path, *words) as first, Launched(tmp_path, *words) as second:
        first.wait_for_step(2)
        addresses = listeners(first.process.pid) | listeners(second.process.pid)
        assert ("127.0.0.1", port) in addresses or ("::", port) in addresses
        assert attack({port for _, port in addresses}, marker, "torch.rendezvous.known"), "no store could be reached"
        time.sleep(READ_S)
        assert not marker.exists(), "code from the network was executed"
        first.wait_for_step(first.step(0) + 2)
        assert {address for address, _ in addresses} == {"127.0.0.1"}, "the address of the endpoint, and no other"
        secret = first.folder / SECRET
        assert secret.stat().st_mode & 0o077 == 0
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in tree(first.process.pid)]
        assert not [command for command in commands if secret.read_bytes() in command], "other users see command lines"


def test_a_state_is_read_by_nodes_with_the_secret_only():
    backend, stranger = (_SignedBackend(C10dRendezvousBackend(dist.HashStore(), "id"), key) for key in (b"a", b"b"))
    stranger._inner = backend._inner
    assert backend.get_state() is None
    state, token, won = backend.set_state(b"state")
    assert (state, won) == (b"state", True)
    assert backend.get_state() == (b"state", token)
    with pytest.raises(RendezvousStateError):
        stranger.get_state()
    stranger._inner.set_state(b"unsigned", token)
    for ask in (backend.get_state, lambda: backend.set_state(b"next", token)):
        with pytest.raises(RendezvousStateError):
            ask()


def test_a_round_of_a_rendezvous_looks_for_no_source(monkeypatch):
    """`inspect.stack` takes a second of CPU time where many modules are imported."""
    calls = []
    monkeypatch.setattr(inspect, "stack", lambda *_: calls.append(1) or [])
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    params = RendezvousParameters("c10d", f"127.0.0.1:{port}", "run", 1, 1, "127.0.0.1", timeout=30)
    handler = rendezvous._SeveralNodes(params, "127.0.0.1", b"secret", lambda: None, lambda why: None)
    assert handler.next_rendezvous().world_size == 1
    handler.shutdown()
    assert calls == []


def test_events_of_a_rendezvous_are_named_as_by_torch():
    def record() -> tuple[str, str]:
        return rendezvous.method_name(), inspect.stack()[1].function

    def caller() -> tuple[str, str]:
        return record()

    assert rendezvous.dynamic_rendezvous.get_method_name is rendezvous.method_name
    assert caller() == ("caller", "caller")


def _serve(port: int) -> None:
    store = _serve_store("127.0.0.1", port)
    time.sleep(WAIT_S)
    del store


@pytest.mark.timeout(60)
def test_a_program_that_has_the_port_and_never_answers_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousConnectionError, match=f"127.0.0.1:{port} did not answer.*ss -ltnp"):
            _connect_store("127.0.0.1", port, limit_s=0.5)
    store = _serve_store("127.0.0.1")
    _connect_store("127.0.0.1", store.port, limit_s=20.0).set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(("code", "ended"), [(-9, True), (1, True), (10, False), (12, False), (None, False)])
def test_ranks_are_ended_if_those_of_another_node_failed_elsewhere(monkeypatch, code, ended):
    """If the secret is None, a writer without it writes what an agent would write."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setattr(rendezvous, "FAILED_S", 0.0)
    monkeypatch.setattr(rendezvous, "_LOOK_EVERY_S", 0.0)
    reasons: list[str] = []
    params = RendezvousParameters(SEVERAL_NODES, f"127.0.0.1:{free_port()}", "a-run", 2, 2, local_addr="127.0.0.1")
    nodes = [_SeveralNodes(params, "127.0.0.1", b"secret", lambda: None, reasons.append) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for meeting in [pool.submit(node.next_rendezvous) for node in nodes]:
            meeting.result(timeout=120)
    if code is None:
        nodes[1]._failures.set("failed", "0" * 64)
    else:
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="none")
        with suppress(ChildFailedError):
            try:
                raise ChildFailedError("ranks", {1: failure})
            finally:
                nodes[1].shutdown()
    until = time.monotonic() + (120.0 if ended else 1.0)
    while not reasons and time.monotonic() < until:
        assert nodes[0].num_nodes_waiting() == 0
        time.sleep(0.05)
    assert reasons[:1] == (["ranks of another node have failed"] if ended else [])


def test_ranks_that_still_start_are_ended_some_time_after_the_rendezvous_was_lost(monkeypatch):
    """Such ranks would wait for the store of the ranks, which the lost agent served, for minutes."""
    port, ended, seconds = free_port(), [], 0.0
    server = get_context("spawn").Process(target=_serve, args=(port,), daemon=True)
    server.start()
    until = time.monotonic() + WAIT_S
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert time.monotonic() < until
        time.sleep(0.1)
    params = RendezvousParameters(SEVERAL_NODES, f"127.0.0.1:{port}", "a-run", 2, 2, local_addr="127.0.0.1")
    handler = _SeveralNodes(params, "127.0.0.1", b"secret", lambda: None, lambda reason: ended.append(seconds))
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: seconds)
    assert handler.num_nodes_waiting() == 0
    seconds = 10 * _LOST_S
    assert handler.num_nodes_waiting() == 0
    assert ended == [], "the rendezvous is there"
    server.kill()
    server.join()
    for after_s in (READ_S, READ_S + _LOST_S - 1, READ_S + _LOST_S + 1):  # the first finds it lost
        seconds = 10 * _LOST_S + after_s
        assert handler.num_nodes_waiting() == 0
    assert ended == [READ_S + 11 * _LOST_S + 1]
