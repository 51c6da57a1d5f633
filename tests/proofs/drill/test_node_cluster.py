"""Nodes in network namespaces: when their scenarios run, and one fault on three real nodes (nightly)."""

import threading

import pytest

from nsa.errors import ConfigError
from nsa_train.record.events import LauncherAction
from proofs.drill import artifacts, suite
from proofs.drill.harness import DrillHarness
from proofs.drill.node_cluster import NodeCluster
from proofs.drill.result import DrillResult
from proofs.drill.suite import NODE_SCENARIOS, SCENARIOS, choose


@pytest.mark.nightly  # four starts of three ranks
@pytest.mark.timeout(900)
def test_a_killed_node_returns_with_another_address_and_no_step_is_lost(tmp_path, permitted):
    result = DrillResult("a node is killed")
    with DrillHarness(tmp_path, threading.Event()) as harness:
        cluster = NodeCluster(harness, "2", steps=50, count=2)
        cluster.wait_for_step(12)
        node = cluster.nodes[1]
        at = cluster.kill(node)
        node.boot("10.213.0.77")
        cluster.launch(node)  # without --resume: it joins a run that the other node resumes
        verdict = cluster.wait_for_verdict(at)
        cluster.wait_for_end(result)
        cluster.measure(result, at)
        starts = cluster.wait_for_restart(at)
    assert result.unmet == []
    assert verdict.details["launcher"] == LauncherAction.RESTARTED
    assert starts.details["world"] == 2
    assert starts.step in (10, 20, 30, 40)
    assert result.repeated_steps is not None
    assert result.continued_s is not None
    assert len(artifacts.step_history(harness.run_folder)) == 50


def test_scenarios_of_nodes_are_run_only_when_asked_for(monkeypatch):
    monkeypatch.setattr(suite, "unshare_options", lambda: ())
    assert choose([]) == list(SCENARIOS)
    assert choose([], nodes=True) == list(NODE_SCENARIOS)
    assert choose(["node_lost", "sigterm"]) == ["sigterm", "node_lost"]


def test_scenarios_of_nodes_are_refused_where_namespaces_are(monkeypatch):
    def refuse() -> None:
        raise ConfigError("no namespaces here")

    monkeypatch.setattr(suite, "unshare_options", refuse)
    assert choose(["sigterm"]) == ["sigterm"]
    for wanted in ({"wanted": [], "nodes": True}, {"wanted": ["slow_link"]}):
        with pytest.raises(ConfigError, match="no namespaces here"):
            choose(**wanted)
