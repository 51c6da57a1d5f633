"""Addresses that a server listens on: a free port, and the address in a URL."""

import socket

from nsa.errors import ConfigError


def free_port(host: str, port: int) -> int:
    """The port, or a free one for 0; raises if nothing can listen there."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            bound_port: int = probe.getsockname()[1]
            return bound_port
    except (OSError, UnicodeError) as error:  # a label of a name may have 63 characters
        raise ConfigError(
            f"cannot listen on {host}, port {port} ({getattr(error, 'strerror', error)}). Choose another --port (0 for "
            f"a free one) or --host."
        ) from error


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
