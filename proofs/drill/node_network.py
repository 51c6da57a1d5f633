"""Several "nodes" on one machine: network, process, mount and host-name namespaces connected by a virtual bridge.

Each node has its own address, host name and processes; all share the file system, and `/etc/hosts` in them lists their
names. Links can be unplugged and slowed down (`tc tbf`), nodes killed and booted again, with another address if wanted.
The machine's own network is neither changed nor used. Works as root or, where user namespaces are permitted, as an
ordinary user. Every process ends when the process that made the network ends, even if it is killed.

As a program (`python -m proofs.drill.node_network NAME HOSTS`) it is the first process of a node: it sets the host
name, mounts HOSTS as `/etc/hosts` and waits until its stdin is closed; with it die all processes of the node.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

from nsa.errors import ConfigError, NSAError
from proofs import with_checkout

_PROGRAMS = {"unshare": "util-linux", "nsenter": "util-linux", "mount": "mount", "ip": "iproute2", "tc": "iproute2"}
_NOT_IN_EVERY_PATH = "/usr/sbin:/sbin"
_NODE = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_AS_ROOT_INSIDE = ("--user", "--map-root-user")
_BRIDGE, _LINK = "bridge0", "eth0"
_HOSTS = Path("/etc/hosts")
_SUBNET = "10.213.0"
_WAIT_S = 20.0


class NodeNetworkError(NSAError):
    """A command that sets up a node or its link failed."""


@cache
def unshare_options() -> tuple[str, ...]:
    """Options of `unshare` with which this user may make namespaces; raises `ConfigError` if there are none."""
    if missing := sorted({package for program, package in _PROGRAMS.items() if _path(program) is None}):
        raise ConfigError(
            f"nodes in network namespaces need the programs {', '.join(_PROGRAMS)}, and some are missing here. Install "
            f"{' '.join(missing)} (Debian's names; Linux only)."
        )
    refused = ""
    for options in ((), _AS_ROOT_INSIDE) if os.geteuid() == 0 else (_AS_ROOT_INSIDE,):
        command = [_program("unshare"), *options, *_NODE, _program("mount"), "--bind", str(_HOSTS), str(_HOSTS)]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return options
        refused = tried.stderr.strip()
    raise ConfigError(
        f"this process may not make network namespaces ({refused}): nodes on one machine need them. Run it as root, or "
        f"permit user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0); a "
        f"container needs the capability SYS_ADMIN (docker run --privileged)."
    )


class NetworkNode:
    """One node. Use `NodeNetwork` to make it."""

    def __init__(self, network: "NodeNetwork", number: int) -> None:
        self._network, self._boots = network, 0
        self.name, self.address = f"node{number}", f"{_SUBNET}.{10 + number}"
        self._process: subprocess.Popen[str] | None = None
        self._pid = 0
        self.plugged = True

    def boot(self, address: str | None = None) -> None:
        """Start the node, with another address if one is given, and plug it in."""
        assert self._process is None, f"{self.name} is running"
        self._boots += 1
        self.address, self.plugged = address or self.address, True
        self._network.write_hosts()
        program = [sys.executable, "-m", "proofs.drill.node_network", self.name, str(self._network.hosts)]
        self._process = _start([*self._network.inside, _program("unshare"), *_NODE, *program], self.name)
        self._pid = _only_child(self._process.pid)
        self._network.ip(
            f"link add {self._port} type veth peer name {_LINK} netns {self._pid}",
            f"link set {self._port} master {_BRIDGE} up",
        )
        _ip(
            self._enter("--net"),
            "link set lo up",
            f"address add {self.address}/24 dev {_LINK}",
            f"link set {_LINK} up",
        )

    @property
    def running(self) -> bool:
        return self._process is not None

    def command(self, words: Sequence[str]) -> list[str]:
        """The command that runs these words on the node."""
        assert self._process is not None, f"{self.name} is not running"
        inside = self._enter("--net", "--uts", "--mount", "--pid")
        return [*inside, f"--wd={Path.cwd()}", *words]

    def kill(self, *, silently: bool = False) -> None:
        """Kill every process of the node at once, as a reboot does.

        The kernel closes their connections, which the other nodes see at once; `silently` unplugs the node first, as a
        power cut does, and they see nothing.
        """
        if silently:
            self.unplug()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            _end(self._process)
            self._process = None

    def unplug(self) -> None:
        """Lose every packet from and to this node; connections stay open."""
        self._network.ip(f"link set {self._port} down")
        self.plugged = False

    def plug_in(self) -> None:
        self._network.ip(f"link set {self._port} up")
        self.plugged = True

    def limit_rate(self, mbit_per_s: float) -> None:
        """Limit the speed of the link in both directions."""
        limit = ["root", "tbf", "rate", f"{mbit_per_s:g}mbit", "burst", "32kbit", "latency", "400ms"]
        for inside, link in ((self._network.inside, self._port), (self._enter("--net"), _LINK)):
            _run([*inside, _program("tc"), "qdisc", "replace", "dev", link, *limit])

    def set_full_rate(self) -> None:
        for inside, link in ((self._network.inside, self._port), (self._enter("--net"), _LINK)):
            _run([*inside, _program("tc"), "qdisc", "del", "dev", link, "root"])

    @property
    def _port(self) -> str:
        """The bridge's end of the link: a new name for each boot, since the kernel removes the old one in its time."""
        return f"{self.name}-{self._boots}"

    def _enter(self, *namespaces: str) -> list[str]:
        return self._network.enter(self._pid, *namespaces)


class NodeNetwork:
    """A bridge and nodes on it, booted on entry; leaving the block ends all their processes.

    folder: for the shared `/etc/hosts` of the nodes.
    """

    def __init__(self, folder: Path, count: int = 3) -> None:
        self._options = unshare_options()
        folder.mkdir(parents=True, exist_ok=True)
        self.hosts = folder / "hosts"
        self.nodes = [NetworkNode(self, number) for number in range(count)]
        self._bridge: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        program = ["sh", "-c", "echo ready; exec cat"]
        self._bridge = _start([_program("unshare"), *self._options, "--net", *program], "the bridge")
        try:
            self.ip("link set lo up", f"link add {_BRIDGE} type bridge", f"link set {_BRIDGE} up")
            for node in self.nodes:
                node.boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
        if self._bridge is not None:
            _end(self._bridge)
            self._bridge = None

    @property
    def inside(self) -> list[str]:
        """Prefix of commands that run in the namespace of the bridge."""
        assert self._bridge is not None, "the network is down"
        return self.enter(self._bridge.pid, "--net")

    def enter(self, pid: int, *namespaces: str) -> list[str]:
        user = ("--user", "--preserve-credentials") if self._options else ()
        return [_program("nsenter"), f"--target={pid}", *user, *namespaces]

    def ip(self, *commands: str) -> None:
        """Commands of ip(8) in the namespace of the bridge."""
        _ip(self.inside, *commands)

    def write_hosts(self) -> None:
        """Rewrite the file in place: it is mounted in the nodes."""
        names = [f"{node.address} {node.name}" for node in self.nodes]
        text = "\n".join(["127.0.0.1 localhost", *names, ""]).encode()
        with open(os.open(self.hosts, os.O_WRONLY | os.O_CREAT, 0o644), "wb", buffering=0) as file:
            file.write(text)
            file.truncate()


def _path(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=_NOT_IN_EVERY_PATH)


def _program(program: str) -> str:
    path = _path(program)
    assert path is not None, "unshare_options() has found it"
    return path


def _start(command: list[str], what: str) -> subprocess.Popen[str]:
    """Start a process that prints a line when it is ready and ends when its stdin is closed."""
    process = subprocess.Popen(
        command,
        env=with_checkout(dict(os.environ)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    if not process.stdout.readline():
        _, errors = process.communicate()
        raise NodeNetworkError(f"{what} could not be started ({' '.join(command)}): {errors.strip()}")
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _only_child(pid: int) -> int:
    """The process that `unshare --fork` has started."""
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until:
        if children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(children[0])
        time.sleep(0.01)
    raise NodeNetworkError(f"process {pid} (unshare) has no child")


def _ip(inside: list[str], *commands: str) -> None:
    _run([*inside, _program("ip"), "-batch", "-"], "\n".join(commands))


def _run(command: list[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NodeNetworkError(f"{' '.join(command)} failed ({text}): {done.stderr.strip()}")


def _be_a_node(name: str, hosts: str) -> None:
    socket.sethostname(name)
    subprocess.run([_program("mount"), "--bind", hosts, str(_HOSTS)], check=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans of the node leave no zombies
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _be_a_node(sys.argv[1], sys.argv[2])
