"""Rendezvous handlers for torch's elastic agent that listen at one address and unpickle only signed data.

torch's own handlers bind a store to every interface, and c10d unpickles whatever is stored under the rendezvous id,
which any client can list. Here a single node uses loopback without shared state; several nodes sign the state with the
secret of the run. In both cases the agent serves a new store for each start of the ranks, so that ranks neither listen
themselves nor read keys of earlier ranks.
"""

import hmac
import inspect
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from nsa.errors import ExitCode
from nsa_train.train.launch.node_address import LOOPBACK, is_host, split_endpoint

ONE_NODE, SEVERAL_NODES = "nsa-loopback", "nsa-signed"
_TIMEOUT = timedelta(seconds=60)
_LOST_S, FAILED_S = 30.0, 15.0
"""How long ranks may run on after the agent that serves the rendezvous is gone, and after ranks of another node have
failed."""
_ORDERLY = (ExitCode.PREEMPTED, ExitCode.HALTED, ExitCode.REGROUP)
"""Exit codes of ranks that all end at the same step: another node may still be writing the checkpoint."""
_FAILED = "failed"
_LOOK_EVERY_S = 1.0
_ANSWER_S = 15.0
"""How long the store of another agent may take to answer."""
_DIGEST = "sha256"
_DIGEST_BYTES = 32


def method_name(depth: int = 2) -> str:
    """Name of a calling function, in the place of torch's, which searches all modules for the source of every frame.

    torch asks for it twice in every round of a rendezvous, for a log that is off. A round lasted so long on a busy
    machine that nodes kept overwriting each other's state: two of them took two minutes and 37 s of CPU time to meet.
    """
    frame = inspect.currentframe()
    for _ in range(depth):
        frame = frame and frame.f_back
    return frame.f_code.co_name if frame else "no_method_name"


dynamic_rendezvous.get_method_name = method_name


def rendezvous_id(secret: bytes, name: str) -> str:
    """A rendezvous id derived from the secret that does not reveal it."""
    return hmac.digest(secret, b"id " + name.encode(), _DIGEST).hex()[:32]


def register(
    own: str, secret: bytes | None, on_nodes_waiting: Callable[[], None], on_run_over: Callable[[str], None]
) -> None:
    """Register the handlers with the elastic agent of this process.

    on_nodes_waiting: called on one node, again and again, while another one waits to join a running run.
    on_run_over: called with the reason, again and again, if ranks still run `_LOST_S` after the rendezvous was lost, or
    `FAILED_S` after ranks of another node have failed.
    """

    def several(params: RendezvousParameters) -> RendezvousHandler:
        assert secret is not None
        return _SeveralNodes(params, own, secret, on_nodes_waiting, on_run_over)

    rendezvous_handler_registry.register(ONE_NODE, lambda params: _OneNode(params.run_id))
    rendezvous_handler_registry.register(SEVERAL_NODES, several)


def _serve_store(address: str, port: int = 0) -> TCPStore:
    """A store that listens at this address only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=2048)
    bound = listener.getsockname()[1]
    return TCPStore(
        address, bound, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=listener.detach()
    )


class _OneNode(RendezvousHandler):
    """A static rendezvous: this agent is the only one."""

    use_agent_store = True

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return ONE_NODE

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = _serve_store(LOOPBACK)
        where = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore(f"agent/{self._run_id}", self._store), 0, 1, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


class _SeveralNodes(RendezvousHandler):
    """torch's dynamic rendezvous, with a signed state, and stores that listen at this node's address.

    It requires TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: the agents then agree on an address and a free port of the first
    node for the ranks' store, but do not serve it themselves.
    """

    use_agent_store = True

    def __init__(
        self,
        params: RendezvousParameters,
        own: str,
        secret: bytes,
        on_nodes_waiting: Callable[[], None],
        on_run_over: Callable[[str], None],
    ) -> None:
        store = _rendezvous_store(params.endpoint, own)
        self._failures = PrefixStore(f"failures/{params.run_id}", store)
        self._failure = hmac.digest(secret, b"failed " + params.run_id.encode(), _DIGEST)
        self._met, self._looked_at = False, 0.0
        backend = _SignedBackend(C10dRendezvousBackend(store, params.run_id), secret)
        self._inner, self._own = create_handler(store, backend, params), own
        self._ranks_store: TCPStore | None = None
        self._on_nodes_waiting, self._first = on_nodes_waiting, False
        self._on_run_over = on_run_over
        self._over: tuple[float, str] | None = None
        """When to end the ranks, and why."""

    def get_backend(self) -> str:
        return SEVERAL_NODES

    def next_rendezvous(self) -> RendezvousInfo:
        info = self._inner.next_rendezvous()
        self._ranks_store, self._met = None, True
        assert info.bootstrap_store_info is not None
        self._first = info.rank == 0
        if self._first:
            self._ranks_store = _serve_store(self._own, info.bootstrap_store_info.master_port)
        return info

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Always 0, since torch would end the ranks of each node by SIGTERM and start the same command again.

        Here the first node asks its ranks to regroup: all ranks of all nodes save at the same step and exit with a code
        of their own, and each launcher resumes the run. A forged state is ignored.

        If ranks of another node have failed, or the store is gone and with it the ranks of the node that served it, the
        ranks here fail too, with exit codes that this agent must live to record. Ranks that are still starting, or wait
        in a collective that does not notice, would wait for minutes: they are ended after a while.
        """
        now = time.monotonic()
        if self._over is not None:
            if now > self._over[0]:
                self._on_run_over(self._over[1])
            return 0
        try:
            if self._inner.num_nodes_waiting() and self._first:
                self._on_nodes_waiting()
            if now > self._looked_at + _LOOK_EVERY_S:
                self._looked_at = now
                if self._failed_elsewhere():
                    self._over = now + FAILED_S, "ranks of another node have failed"
        except (RendezvousConnectionError, DistError):
            self._over = now + _LOST_S, "the node that serves the rendezvous is gone"
        except RendezvousStateError:
            pass
        return 0

    def _failed_elsewhere(self) -> bool:
        """Whether another agent, with the secret of this run, has reported that its ranks failed."""
        return self._failures.check([_FAILED]) and hmac.compare_digest(
            self._failures.get(_FAILED), self._failure.hex().encode()
        )

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Called when the ranks of this node have ended. If they failed, the other agents are notified."""
        error = sys.exception()  # torch calls this while it raises
        codes = [each.exitcode for each in error.failures.values()] if isinstance(error, ChildFailedError) else []
        if self._met and any(code not in _ORDERLY for code in codes):
            with suppress(DistError):  # the node that serves it is gone
                self._failures.set(_FAILED, self._failure.hex())
        self._ranks_store = None
        return self._inner.shutdown()


class _SignedBackend(RendezvousBackend):
    """Rendezvous state signed with the secret of the run; unsigned state is never unpickled."""

    def __init__(self, inner: RendezvousBackend, secret: bytes) -> None:
        self._inner, self._secret = inner, secret

    @property
    def name(self) -> str:
        return SEVERAL_NODES

    def get_state(self) -> tuple[bytes, Token] | None:
        state = self._inner.get_state()
        return None if state is None else (self._open(state[0]), state[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        answer = self._inner.set_state(self._digest(state) + state, token)
        return None if answer is None else (self._open(answer[0]), answer[1], answer[2])

    def _open(self, signed: bytes) -> bytes:
        digest, state = signed[:_DIGEST_BYTES], signed[_DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(state)):
            raise RendezvousStateError(
                "the state of the rendezvous is not signed with the secret of this run: another program wrote it, or "
                "a node has another run folder. It was not read."
            )
        return state

    def _digest(self, state: bytes) -> bytes:
        return hmac.digest(self._secret, b"state " + state, _DIGEST)


def _rendezvous_store(endpoint: str, own: str) -> TCPStore:
    """Served by the node that has the endpoint's address; if several agents have it, by the first."""
    host, port = split_endpoint(endpoint)
    if is_host(endpoint, own):
        try:
            return _serve_store(own, port)
        except OSError:  # in use: by another agent, which answers at once, or by another program
            return _connect_store(own, port, limit_s=_ANSWER_S)
    return _connect_store(host, port, limit_s=_TIMEOUT.total_seconds() + _ANSWER_S)


def _connect_store(host: str, port: int, limit_s: float) -> TCPStore:
    """A client of a store that another agent serves. Raises if it does not answer in time.

    TCPStore applies its own timeout to the connection only: it would wait forever for an answer of another program that
    has the port.
    """
    answer: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            answer.set_result(TCPStore(host, port, is_master=False, timeout=_TIMEOUT))
        except RuntimeError as error:
            answer.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        return answer.result(limit_s)
    except TimeoutError:
        raise RendezvousConnectionError(
            f"what listens at {host}:{port} did not answer as a rendezvous in {limit_s:.0f} s: another program seems "
            f"to have the port. Find it on that node with `ss -ltnp 'sport = :{port}'` and stop it, or give all nodes "
            f"another port with --rdzv-endpoint"
        ) from None
