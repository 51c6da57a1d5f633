"""The alert rules: one per condition, fresh, right by promtool, and of one mind with the watchdog's judgement."""

import dataclasses
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nsa_train import names
from nsa_train.watch import run_metrics
from nsa_train.watch.alert_rules import EXPORTER_DOWN, REFRESH, alert_name, rule_file
from nsa_train.watch.conditions import CONDITIONS
from nsa_train.watch.history import RunHistory
from nsa_train.watch.run_metrics import samples
from nsa_train.watch.run_reader import ClockReading
from tests.nsa_train.watch import recorded
from tests.nsa_train.watch.recorded import HEALTHY, UNWELL, Recording
from tests.ops.needs import programs

OPS = Path(__file__).parents[2] / "ops"
RULE_FILE = OPS / "prometheus" / "rules.yml"


def promtool(*words: str, cwd: Path = OPS / "prometheus") -> subprocess.CompletedProcess[str]:
    command = [programs("promtool")["promtool"], *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


def alerts(text: str) -> dict[str, dict]:
    return {rule["alert"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}


def test_the_rule_file_is_fresh():
    assert RULE_FILE.read_text(encoding="utf-8") == rule_file(), f"rules.yml is stale: run `{REFRESH}` and commit it"


def test_every_condition_has_its_alert_and_there_is_no_other():
    found = alerts(rule_file())
    assert found.keys() == {alert_name(name) for name in (*CONDITIONS, EXPORTER_DOWN)}
    for name, condition in CONDITIONS.items():
        rule = found[alert_name(name)]
        assert rule["labels"]["severity"] == condition.level.value
        assert rule["annotations"]["runbook_url"] == f"docs/RUNBOOK.md#{name}"
        assert "{stall" not in rule["annotations"]["summary"]


def test_rules_use_figures_that_are_served():
    used = set(re.findall(r"\bnsa_\w+", " ".join(rule["expr"] for rule in alerts(rule_file()).values())))
    assert used <= run_metrics.served_names()
    assert len(used) > 15


def test_a_drill_shortens_every_span_and_no_figure():
    slow, fast = alerts(rule_file()), alerts(rule_file(speed=30))
    assert fast["NSAThroughputDrop"]["for"] == "20s"
    assert "> 10 and nsa_process_up" in fast["NSAProcessGone"]["expr"]
    assert "nsa_heartbeat_limit_seconds / 30" in fast["NSAHeartbeatStall"]["expr"]
    same = ("NSAGateEntropyCritical", "NSAReadsDiffer", "NSACheckpointOverdue")
    assert [fast[name]["expr"] for name in same] == [slow[name]["expr"] for name in same]


def test_the_shipped_files_are_valid():
    checks = [promtool("check", "config", "prometheus.yml"), promtool("check", "rules", "rules.yml")]
    amtool = programs("amtool")["amtool"]
    words = [amtool, "check-config", str(OPS / "alertmanager" / "alertmanager.yml")]
    checks.append(subprocess.run(words, capture_output=True, text=True, timeout=60))
    for done in checks:
        assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_every_rule_right():
    done = promtool("test", "rules", "rules_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


MUTANTS = {
    "a limit": ("NSAGateEntropyCritical", "< 0.2\n", "< 0.1\n"),
    "a direction": ("NSAGateCollapseCritical", "nsa_gate_collapse_ratio) > 0.2", "nsa_gate_collapse_ratio) < 0.2"),
    "NaN equals itself": ("NSALossNonfinite", "nsa_loss_nats != nsa_loss_nats", "nsa_loss_nats == nsa_loss_nats"),
    "gone is a stall": ("NSAProcessGone", " unless nsa_process_up == 0", ""),
    "no patience": ("NSAThroughputDrop", "for: 600s", "for: 60s"),
    "one alert per rank": (
        "NSALossNonfinite",
        "count by (instance, job, run) (nsa_loss",
        "count by (rank, run) (nsa_loss",
    ),
    "another job": ("NSAExporterDown", 'up{job="nsa"}', "up"),
    "another name": ("NSADataSlow", "alert: NSADataSlow", "alert: NSASlowData"),
}
"""The alert whose tests must fail, and what is changed in the rules."""


@pytest.mark.nightly  # planted bugs
@pytest.mark.parametrize("name", MUTANTS)
def test_promtool_sees_a_mutated_rule(name, tmp_path):
    alert, good, bad = MUTANTS[name]
    # Line breaks of the dump inside an expression are no part of it.
    rules = re.sub(r"\n      (?![a-z_]+: )", " ", RULE_FILE.read_text())
    tests = yaml.safe_load((OPS / "prometheus" / "rules_test.yml").read_text())
    tests["tests"] = [test for test in tests["tests"] if alert in str(test["promql_expr_test"])]
    (tmp_path / "rules_test.yml").write_text(yaml.safe_dump(tests))
    for text, passes in ((rules, True), (rules.replace(good, bad), False)):
        (tmp_path / "rules.yml").write_text(text)
        done = promtool("test", "rules", "rules_test.yml", cwd=tmp_path)
        assert (done.returncode == 0) == passes, done.stderr
        assert passes or "exp:" in done.stderr, f"broken, not mutated: {done.stderr}"


SCRAPE_S, _MOST_SCRAPES = 60, 50
_MUST_LAST = ("gate_entropy_critical", "gate_collapse_critical", "gate_entropy_low", "gate_collapse_high",
              "gate_max_high", "straggler")  # fmt: skip


def scrapes(recording: Recording) -> Iterator[tuple[int, dict[str, float]]]:
    """What the exporter would have served of a recording, every SCRAPE_S, the last time at its end."""
    began = min(log[0].ts for log in recording.beats.values())
    count = min(math.ceil((recording.end - began) / SCRAPE_S), _MOST_SCRAPES)
    things = [(event.ts, event) for event in recording.events]
    things += [(beat.ts, beat) for log in recording.beats.values() for beat in log]
    things.sort(key=lambda pair: pair[0])
    history = RunHistory(facts=recording.facts)
    for number in range(count + 1):
        now = recording.end - (count - number) * SCRAPE_S
        while things and things[0][0] <= now:
            ts, thing = things.pop(0)
            if hasattr(thing, "msg"):
                history.add(thing, ts, recording.ahead_s)
            else:
                history.add_event(thing, ts)
        history.gone = frozenset() if things else recording.gone
        if history.ranks:
            local = set(range(recording.facts.local_world or 1))
            yield number * SCRAPE_S, dict(_series(history, now, local, shift=recording.end - count * SCRAPE_S))


def _series(history: RunHistory, now: float, local: set[int], shift: float) -> Iterator[tuple[str, float]]:
    asked_for = str(CONDITIONS)
    for metric, labels, value in samples(history, ClockReading(now, now), local):
        name = metric.served_name
        if name not in asked_for or labels.get("condition", "") not in asked_for:
            continue
        words = ", ".join(
            f'{key}="{word}"' for key, word in {"run": "a", "instance": "i", "job": "nsa", **labels}.items()
        )
        if name.endswith("timestamp_seconds"):
            value -= shift  # promtool's clock begins at 0
        yield f"{name}{{{words}}}", value


def as_test(recording: Recording, expected: set[str]) -> dict:
    """A promtool test: the series as they were scraped, and what fires at the end."""
    moments = dict(scrapes(recording))
    end = max(moments)
    spelled = {}
    for name in sorted({name for found in moments.values() for name in found}):
        values = (moments.get(at, {}).get(name) for at in range(0, end + 1, SCRAPE_S))
        spelled[name] = " ".join("_" if value is None else _spell(value) for value in values)
    check = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"}) > bool 0',
        "eval_time": f"{end}s",
        "exp_samples": [{"labels": f'{{alertname="{alert_name(name)}"}}', "value": 1} for name in sorted(expected)],
    }
    series = [{"series": name, "values": values} for name, values in spelled.items()]
    return {"interval": f"{SCRAPE_S}s", "input_series": series, "promql_expr_test": [check]}


def _spell(value: float) -> str:
    return (
        "NaN" if math.isnan(value) else "Inf" if value == math.inf else "-Inf" if value == -math.inf else f"{value:.6f}"
    )


def lasting(recording: Recording) -> Recording:
    """The same for six minutes more: rules ask that what is bad stays so."""
    for rank, log in recording.beats.items():
        last = log[-1]
        for i in range(1, 181):
            log.append(dataclasses.replace(last, step=last.step + i, ts=last.ts + recorded.STEP_S * i))
        recording.end = max(recording.end, log[-1].ts + 1)
        assert recording.beats[rank][-1].msg == names.PROGRESS
    return recording


def test_rules_and_watchdog_say_the_same_of_the_same_heartbeats(tmp_path):
    tests = [as_test(HEALTHY[name](), set()) for name in HEALTHY if name not in ("noisy 1", "noisy 2", "noisy 3")]
    for name, makers in UNWELL.items():
        for which, make in enumerate(makers):
            if (name, which) in (("throughput_drop", 1), ("loss_divergence", 2)):
                continue  # hours of it; the first one is the same in minutes
            recording = lasting(make()) if name in _MUST_LAST else make()
            also = {"steps_skipped"} if name == "loss_nonfinite" and which == 2 else set()
            also |= {"gate_entropy_low"} if name == "gate_entropy_critical" else set()  # silenced by Alertmanager
            also |= {"gate_collapse_high"} if name == "gate_collapse_critical" else set()
            tests.append(as_test(recording, {name} | also))
    file = {"rule_files": [str(RULE_FILE)], "evaluation_interval": f"{SCRAPE_S}s", "tests": tests}
    (tmp_path / "replay.yml").write_text(yaml.safe_dump(file, sort_keys=False, width=10**6))
    done = promtool("test", "rules", str(tmp_path / "replay.yml"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert len(tests) > len(CONDITIONS)
