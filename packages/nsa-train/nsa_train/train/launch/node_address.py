"""Network addresses that `nsa launch` listens on, and the rendezvous secret that the nodes of a run share. No torch.

A single node listens on loopback. Of several nodes, each listens at one address: that of `--listen`, or the one of its
route to the rendezvous endpoint.
"""

import fcntl
import secrets
import socket
import struct
import sys
import time
from contextlib import suppress
from ipaddress import ip_address
from os import O_CREAT, O_EXCL, O_WRONLY, close, write
from os import open as open_descriptor
from pathlib import Path

from nsa.errors import ConfigError

LOOPBACK = "127.0.0.1"
SECRET = ".rendezvous_secret"
_SECRET_BYTES = 32
_SECRET_WAIT_S = 20.0
_NAME_WAIT_S = 60.0  # a cluster may know the name of a node only once that node has started
_SIOCGIFADDR = 0x8915


def split_endpoint(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"--rdzv-endpoint {endpoint} is not HOST:PORT. Give the name or address of one node and a port that is "
            f"free there, the same on all nodes."
        )
    return host.strip("[]"), int(port)


def own_address(endpoint: str, listen: str | None) -> str:
    """The address at which this node listens."""
    if listen is not None:
        return _checked(listen)
    host, port = split_endpoint(endpoint)
    for address in _addresses(host, port):
        with (
            suppress(OSError),
            socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((address, port))  # sends nothing, only chooses a route
            own = str(probe.getsockname()[0])
            if ip_address(own).is_loopback and not is_loopback(host):
                raise ConfigError(
                    f"--rdzv-endpoint {endpoint} is {address} on this node, which the other nodes cannot reach. Give "
                    f"its address in place of its name, or --listen ADDRESS."
                )
            return own
    raise ConfigError(f"--rdzv-endpoint {endpoint} cannot be reached from this node. Check the name and the network.")


def is_host(endpoint: str, own: str) -> bool:
    """Whether this node serves the store of the rendezvous."""
    host, port = split_endpoint(endpoint)
    return own in _addresses(host, port) or host in (socket.gethostname(), socket.getfqdn())


def interface_of(address: str) -> str | None:
    """The name of the network interface with this IPv4 address; None if unknown."""
    if sys.platform != "linux" or ":" in address:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def loopback_interface() -> str:
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


def make_secret(run_folder: Path) -> Path:
    """The file with the secret of this run, written by the first node. Readable by its owner only."""
    path = run_folder / SECRET
    run_folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = open_descriptor(path, O_WRONLY | O_CREAT | O_EXCL, 0o600)
    except FileExistsError:
        return path
    try:
        write(descriptor, secrets.token_hex(_SECRET_BYTES).encode())
    finally:
        close(descriptor)
    return path


def read_secret(path: Path) -> bytes:
    """Waits until the first node has written it."""
    until = time.monotonic() + _SECRET_WAIT_S
    while len(secret := path.read_bytes()) < 2 * _SECRET_BYTES:
        if time.monotonic() > until:
            raise ConfigError(f"{path} is incomplete. Remove it and start all nodes again.")
        time.sleep(0.1)
    return secret


def _checked(listen: str) -> str:
    try:
        wildcard = ip_address(listen).is_unspecified
        with socket.socket(socket.AF_INET6 if ":" in listen else socket.AF_INET) as probe:
            probe.bind((listen, 0))
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"--listen {listen} is not an address of this node ({error}). `ip address` lists them."
        ) from None
    if wildcard:
        raise ConfigError(
            f"--listen {listen} means every address of this node. Give the one that the other nodes can reach."
        )
    return listen


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on this address."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _addresses(host: str, port: int) -> list[str]:
    until = time.monotonic() + _NAME_WAIT_S
    while True:
        try:
            return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except (socket.gaierror, UnicodeError) as error:  # a label of a name may have 63 characters
            problem = error
        if time.monotonic() > until or isinstance(problem, UnicodeError):
            raise ConfigError(f"--rdzv-endpoint {host}:{port}: {host} has no address here ({problem}). Check the name.")
        time.sleep(min(1.0, max(0.0, until - time.monotonic())))
