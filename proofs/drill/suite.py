"""The drill's scenarios in order, and the suite that runs them in parallel."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from nsa.errors import ConfigError, NSAError
from proofs.drill.harness import DrillHarness, NotObserved, UndisturbedRuns
from proofs.drill.node_network import unshare_options
from proofs.drill.result import DrillResult
from proofs.drill.scenarios import (
    checkpoints,
    data,
    disk,
    launchers,
    nodes,
    numbers,
    pace,
    processes,
    refusals,
    services,
    stops,
)


@dataclass(frozen=True)
class DrillScenario:
    title: str
    run: Callable[[DrillHarness, DrillResult], None]


SCENARIOS = {
    "nan_gradient": DrillScenario("NaN gradient", numbers.nan_gradient),
    "hung_rank": DrillScenario("hung rank", pace.hung_rank),
    "killed_rank": DrillScenario("killed rank", processes.killed_rank),
    "killed_trainer": DrillScenario("killed trainer", processes.killed_trainer),
    "stalled_data": DrillScenario("stalled data", data.stalled_data),
    "full_disk": DrillScenario("full disk", disk.full_disk),
    "corrupt_shard": DrillScenario("corrupt shard", data.corrupt_shard),
    "gate_collapse": DrillScenario("gate collapse", numbers.gate_collapse),
    "slow_rank": DrillScenario("slow rank", pace.slow_rank),
    "stale_halt": DrillScenario("stale halt file", processes.stale_halt),
    "sigterm": DrillScenario("SIGTERM", processes.sigterm),
    "sigterm_twice": DrillScenario("SIGTERM twice", stops.sigterm_twice),
    "sighup": DrillScenario("SIGHUP", stops.sighup),
    "halt_mid_run": DrillScenario("halt file in the middle of a run", stops.halt_mid_run),
    "clock_jump": DrillScenario("clock jumps by an hour, both ways", stops.clock_jump),
    "killed_agent": DrillScenario("killed agent", launchers.killed_agent),
    "killed_launcher": DrillScenario("killed launcher", launchers.killed_launcher),
    "out_of_memory": DrillScenario("out of memory", launchers.out_of_memory),
    "crash_loop": DrillScenario("data server gone: crash loop", launchers.crash_loop),
    "busy_port": DrillScenario("rendezvous port in use", launchers.busy_port),
    "killed_saving": DrillScenario("killed during saves", checkpoints.killed_saving),
    "failed_writer": DrillScenario("background writer fails", checkpoints.failed_writer),
    "damaged_checkpoint": DrillScenario("damaged newest checkpoints", checkpoints.damaged_checkpoint),
    "malicious_checkpoint": DrillScenario("code in a checkpoint", checkpoints.malicious_checkpoint),
    "other_config": DrillScenario("checkpoint of another config", checkpoints.other_config),
    "other_world_size": DrillScenario("checkpoint of another world size", checkpoints.other_world_size),
    "gradient_spike": DrillScenario("gradient spike", numbers.gradient_spike),
    "replica_drift": DrillScenario("flipped bit in a replica", numbers.replica_drift),
    "data_server_errors": DrillScenario("errors of the data server", services.data_server_errors),
    "object_store_errors": DrillScenario("object store answers 503", services.object_store_errors),
    "wrong_store_secret": DrillScenario("wrong secret of the object store", services.wrong_store_secret),
    "metric_sink_down": DrillScenario("metric tracker unreachable", services.metric_sink_down),
    "bad_yaml": DrillScenario("broken config file", refusals.bad_yaml),
    "toy_config": DrillScenario("toy config for 50,000 steps", refusals.toy_config),
    "two_runs": DrillScenario("two runs in one folder", refusals.two_runs),
    "healthy": DrillScenario("none: 500 steps, noise", pace.healthy),
}

NODE_SCENARIOS = {
    "node_restarted": DrillScenario("node killed, back", nodes.node_restarted),
    "node_power_cut": DrillScenario("power cut of a node, back", nodes.node_power_cut),
    "node_readdressed": DrillScenario("node killed, back with another address", nodes.node_readdressed),
    "rendezvous_host_restarted": DrillScenario("rendezvous host killed, back", nodes.rendezvous_host_restarted),
    "rendezvous_host_readdressed": DrillScenario(
        "rendezvous host killed, back with another address", nodes.rendezvous_host_readdressed
    ),
    "node_lost": DrillScenario("node killed, stays away", nodes.node_lost),
    "node_rejoins": DrillScenario("node killed, back later", nodes.node_rejoins),
    "partition": DrillScenario("node unreachable for 45 s", nodes.partition),
    "short_cut": DrillScenario("node unreachable for 5 s", nodes.short_cut),
    "slow_link": DrillScenario("slow link of a node", nodes.slow_link),
}
"""Need network namespaces (`node_network`); not part of the drill unless asked for."""


def choose(wanted: Iterable[str], *, nodes: bool = False) -> list[str]:
    """The requested scenarios in the suite's order; if none is named, all of one machine, or all of several nodes."""
    names, known = list(wanted), {**SCENARIOS, **NODE_SCENARIOS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--only {unknown[0]}: there is no such scenario. Choose among {', '.join(known)}.")
    chosen = [name for name in known if name in names] or list(NODE_SCENARIOS if nodes else SCENARIOS)
    if any(name in NODE_SCENARIOS for name in chosen):
        unshare_options()
    return chosen


def scenario(name: str) -> DrillScenario:
    return SCENARIOS.get(name) or NODE_SCENARIOS[name]


class DrillSuite:
    """Runs `jobs` scenarios at a time. Leaving the block ends every process that it started."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._folder, self._stop_event = folder, threading.Event()
        self._undisturbed = UndisturbedRuns(folder / "calm", self._stop_event)
        self._pool = ThreadPoolExecutor(jobs)

    def __enter__(self) -> "DrillSuite":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_event.set()
        self._pool.shutdown(cancel_futures=True)

    def run(self, names: Iterable[str]) -> Iterator[tuple[str, DrillResult]]:
        """Yield results in the order in which scenarios finish."""
        running = {self._pool.submit(self._run, name): name for name in names}
        for future in as_completed(running):
            yield running[future], future.result()

    def _run(self, name: str) -> DrillResult:
        chosen, began = scenario(name), time.monotonic()
        result = DrillResult(chosen.title)
        try:
            with DrillHarness(self._folder / name, self._stop_event, self._undisturbed) as harness:
                chosen.run(harness, result)
        except (NotObserved, NSAError, OSError) as problem:
            result.unmet.append(str(problem))
        result.took_s = time.monotonic() - began
        return result
