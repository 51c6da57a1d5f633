"""The run of a chaos drill: one launcher with two ranks, or two nodes with one rank each, and its servers.

Processes are found in the process tree below a launcher, since a node numbers its processes by itself.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nsa_train import names
from proofs.drill import inject
from proofs.drill.chaos.schedule import RANKS, ChaosPlan
from proofs.drill.chaos.services import MODULE as SERVICES
from proofs.drill.chaos.services import ServiceControl
from proofs.drill.harness import DrillHarness, DrillProcess
from proofs.drill.inject import FaultKind, PlantedFault
from proofs.drill.node_network import NetworkNode, NodeNetwork
from proofs.drill.object_store import store_environment
from proofs.drill.small_disk import mount_small_disk

_PORT = 29500
_WORKER = "spawn_main"  # in the command line of a process that multiprocessing started
_DISK_MIB, _DISK_MIB_PER_STEP = 64, 0.02


class ChaosCluster:
    def __init__(self, harness: DrillHarness, plan: ChaosPlan, settings: tuple[str, ...], *, nodes: bool) -> None:
        self._harness, self._plan = harness, plan
        self.commands = harness.folder / "commands"
        self.commands.mkdir()
        self.mounted = mount_small_disk(harness, f"{_DISK_MIB + round(_DISK_MIB_PER_STEP * plan.steps)}m")
        self.run_folder = harness.run_folder
        self.services = ServiceControl(harness.folder / "services")
        self.services.folder.mkdir()
        self.nodes: list[NetworkNode] = []
        host, of_services = "127.0.0.1", None
        if nodes:
            network = NodeNetwork(harness.folder, RANKS + 1)
            harness.at_end(network.close)
            *self.nodes, of_services = network.__enter__().nodes
            host = of_services.address
        serving = harness.start(SERVICES, "serve", str(self.services.folder), host, node=of_services)
        harness.wait_for("the addresses of the servers", self.services.started, serving)
        data_url, store_url = self.services.addresses()
        harness.environment |= store_environment(store_url)
        self._settings = (*settings, f"data.path={data_url}")
        self.launchers: dict[int, DrillProcess] = {}

    @property
    def places(self) -> range:
        """Numbers of the launchers."""
        return range(len(self.nodes) or 1)

    def node(self, place: int) -> NetworkNode | None:
        return self.nodes[place] if self.nodes else None

    def launch(self, place: int, *options: str) -> None:
        several = [f"--nodes={len(self.nodes)}@{self.nodes[0].name}:{_PORT}"] if self.nodes else []
        arguments = self._harness.arguments(self._settings)
        fault = PlantedFault(
            kind=FaultKind.CHAOS,
            marker=str(self.commands / "started"),
            seconds=self._plan.pace_s,
            commands=str(self.commands),
            save_every=self._plan.save_every,
        )
        nproc = 1 if self.nodes else RANKS
        words = [inject.MODULE, "launch", fault.to_json(), str(nproc), *arguments, *several, *options]
        self.launchers[place] = self._harness.start(*words, node=self.node(place))

    def place_of_rank(self, rank: int) -> int:
        return rank if self.nodes else 0

    def launcher_pid(self, place: int) -> int | None:
        return next(self._found(place, f"{inject.MODULE}\0launch"), None)

    def rank_pid(self, rank: int) -> int | None:
        """Process id of a rank, on this machine; None while it is not running.

        The number of a rank on a node may change with the order in which nodes meet: there it is that of the node.
        """
        for pid in self._found(self.place_of_rank(rank), f"{inject.MODULE}\0train"):
            if self.nodes or f"\0RANK={rank}\0" in f"\0{_read(pid, 'environ')}":
                return pid
        return None

    def worker_pid(self, rank: int) -> int | None:
        """The prefetch process of a rank."""
        if (pid := self.rank_pid(rank)) is None:
            return None
        return next((child for child in descendants(pid) if _WORKER in _read(child, "cmdline")), None)

    def newest_checkpoint(self) -> Path | None:
        folder = (self.run_folder / names.CHECKPOINTS / names.LATEST).resolve()
        return folder if folder.is_dir() else None

    def _found(self, place: int, words: str) -> Iterator[int]:
        """Processes below a launcher, itself included, with these words in their command line."""
        launcher = self.launchers.get(place)
        if launcher is None or not launcher.running:
            return
        # On a node the first process is nsenter, whose command line ends with that of the launcher.
        for pid in (*(() if self.nodes else (launcher.pid,)), *descendants(launcher.pid)):
            if f"\0-m\0{words}\0" in _read(pid, "cmdline"):
                yield pid


def descendants(pid: int) -> list[int]:
    """All processes below one, parents before children."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()  # the name before it may contain spaces
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    pids, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        pids += below
        todo += below
    return pids


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
