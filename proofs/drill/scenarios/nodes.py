"""Drill scenarios: a node dies, stays away, joins again, or returns with another address; a partition; a slow link."""

import time
from statistics import median

from nsa_train.record.events import LauncherAction, RunEvent
from proofs.drill import artifacts
from proofs.drill.harness import DrillHarness
from proofs.drill.node_cluster import TIMEOUT_S, NodeCluster
from proofs.drill.result import DrillResult

_FAULT_STEP = 15
_AWAY_S = 5.0
_PARTITION_S, _SHORT_CUT_S = 45.0, 5.0
_SLOW_MBIT_PER_S, _SLOW_STEPS = 2.0, 15
_ELASTIC = "2:3"
_REJOIN_STEPS = 160  # the two others still train when the third is back; differences by rounding are still small
_OTHER_ADDRESS = "10.213.0.77"


def node_restarted(harness: DrillHarness, result: DrillResult) -> None:
    """All processes of a node are killed in the middle of a step; the node is back after a few seconds."""
    _killed_and_back(harness, result, node=2)


def rendezvous_host_restarted(harness: DrillHarness, result: DrillResult) -> None:
    """Restart the node at which all others meet."""
    _killed_and_back(harness, result, node=0)


def node_readdressed(harness: DrillHarness, result: DrillResult) -> None:
    """A node is killed and comes back under its name with another address."""
    _killed_and_back(harness, result, node=2, address=_OTHER_ADDRESS)


def rendezvous_host_readdressed(harness: DrillHarness, result: DrillResult) -> None:
    """Bring the node at which all others meet back with another address."""
    _killed_and_back(harness, result, node=0, address=_OTHER_ADDRESS)


def node_power_cut(harness: DrillHarness, result: DrillResult) -> None:
    """A node vanishes without closing a connection: the others wait for it until the timeout of collectives."""
    _killed_and_back(harness, result, node=2, silently=True)


def node_lost(harness: DrillHarness, result: DrillResult) -> None:
    """A node is killed and stays away: with `--nnodes 2:3` the run continues on two nodes."""
    cluster = NodeCluster(harness, _ELASTIC)
    at, restart = _without_last_node(cluster, result)
    cluster.wait_for_end(result)
    cluster.measure(result, at)
    result.left_behind = f"verified checkpoint {restart.step}"
    equal = cluster.compare(result, same_world=False)
    again = cluster.compare_resumed(result, restart.step, ranks=2)
    result.resumed = f"by the launchers on 2 nodes from step {restart.step}: {equal}; {again}"


def node_rejoins(harness: DrillHarness, result: DrillResult) -> None:
    """Lose a node that is back while the two others train: the run continues on three nodes."""
    cluster = NodeCluster(harness, _ELASTIC, _REJOIN_STEPS)
    at, fewer = _without_last_node(cluster, result)
    node = cluster.nodes[2]
    node.boot()
    cluster.launch(node)
    more = cluster.wait_for_restart(fewer.ts, ranks=3)
    cluster.wait_for_end(result)
    cluster.measure(result, at)
    result.left_behind = f"verified checkpoints {fewer.step} and {more.step}"
    equal = cluster.compare(result, same_world=False)
    again = cluster.compare_resumed(result, more.step, ranks=3)
    result.resumed = f"on 2 nodes from step {fewer.step}, on 3 from step {more.step}: {equal}; {again}"


def partition(harness: DrillHarness, result: DrillResult) -> None:
    """A node is unreachable for longer than the timeout of collectives; its processes and connections live on."""
    cluster = NodeCluster(harness)
    cluster.wait_for_step(_FAULT_STEP)
    node, at = cluster.nodes[1], time.time()
    node.unplug()
    _detected(cluster, result, at, within_s=TIMEOUT_S + 30)
    harness.pause(at + _PARTITION_S - time.time())
    node.plug_in()
    _finish(cluster, result, at)


def short_cut(harness: DrillHarness, result: DrillResult) -> None:
    """A node is unreachable for less than the timeout of collectives: the run waits and is not restarted."""
    cluster = NodeCluster(harness)
    cluster.wait_for_step(_FAULT_STEP)
    node, at = cluster.nodes[1], time.time()
    node.unplug()
    harness.pause(_SHORT_CUT_S)
    node.plug_in()
    cluster.wait_for_end(result)
    cluster.measure(result, at)
    result.require_equal("launchers' records", len(artifacts.launcher_verdicts(harness.run_folder)), 0)
    result.detected_by, result.left_behind = "nothing: shorter than parallel.timeout_s", "nothing"
    result.resumed = f"never stopped, {cluster.compare(result, same_world=True)}"


def slow_link(harness: DrillHarness, result: DrillResult) -> None:
    """The link of one node is slow for some steps: the run slows down and is not stopped.

    Nothing names the node, since every rank waits for the slowest; the watchdog's `throughput_drop` compares minutes.
    """
    cluster = NodeCluster(harness)
    cluster.wait_for_step(_FAULT_STEP)
    node, at = cluster.nodes[1], time.time()
    node.limit_rate(_SLOW_MBIT_PER_S)
    cluster.wait_for_step(_FAULT_STEP + _SLOW_STEPS)
    healed_at = time.time()
    node.set_full_rate()
    cluster.wait_for_end(result)
    cluster.measure(result, at)
    usual, slow = _step_times(harness, 0.0, at), _step_times(harness, at, healed_at)
    ratio = median(slow[2:]) / median(usual[2:])
    result.require(ratio > 1.5, f"steps took {ratio:.1f} times as long: the link was not slow enough to prove anything")
    result.require_equal("launchers' records", len(artifacts.launcher_verdicts(harness.run_folder)), 0)
    result.detected_by = f"nobody at once: steps take {ratio:.1f} times as long on all ranks"
    result.left_behind = "nothing"
    result.resumed = f"never stopped, {cluster.compare(result, same_world=True)}"


def _step_times(harness: DrillHarness, begin: float, end: float) -> list[float]:
    return [beat.step_s or 0.0 for beat in artifacts.beats(harness.run_folder) if begin < beat.ts <= end]


def _killed_and_back(
    harness: DrillHarness, result: DrillResult, *, node: int, address: str | None = None, silently: bool = False
) -> None:
    cluster = NodeCluster(harness)
    cluster.wait_for_step(_FAULT_STEP)
    lost = cluster.nodes[node]
    at = cluster.kill(lost, silently=silently)
    harness.pause(_AWAY_S)
    lost.boot(address)
    cluster.launch(lost)
    _detected(cluster, result, at, within_s=TIMEOUT_S + 30 if silently else 30)
    _finish(cluster, result, at)


def _without_last_node(cluster: NodeCluster, result: DrillResult) -> tuple[float, RunEvent]:
    """Kill the last node of an elastic run: when that was, and the start of the two others."""
    cluster.wait_for_step(_FAULT_STEP)
    at = cluster.kill(cluster.nodes[2])
    _detected(cluster, result, at, within_s=30)
    return at, cluster.wait_for_restart(at, ranks=2)


def _detected(cluster: NodeCluster, result: DrillResult, at: float, *, within_s: float) -> None:
    verdict = cluster.wait_for_verdict(at)
    result.detected(f"launcher: {verdict.details.get('why')}", verdict.ts - at, within_s=within_s)
    result.require_equal("the launcher's verdict", verdict.details.get("launcher"), LauncherAction.RESTARTED)


def _finish(cluster: NodeCluster, result: DrillResult, at: float) -> None:
    restart = cluster.wait_for_restart(at)
    cluster.wait_for_end(result)
    cluster.measure(result, at)
    result.left_behind = f"verified checkpoint {restart.step}"
    result.resumed = f"by the launchers from step {restart.step}: {cluster.compare(result, same_world=True)}"
