"""The alert rules: one per condition, fresh, and right by promtool."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from nsa_train.watch import exporter
from nsa_train.watch.conditions import _EXPORTER_DOWN, _REFRESH, CONDITIONS, HealthLimits, _alert_name, alert_rules
from tests.ops.needs import programs

OPS = Path(__file__).parents[2] / "ops"
RULE_FILE = OPS / "prometheus" / "rules.yml"


def promtool(*words: str, cwd: Path = OPS / "prometheus") -> subprocess.CompletedProcess[str]:
    command = [programs("promtool")["promtool"], *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


def alerts(text: str) -> dict[str, dict]:
    return {rule["alert"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}


def test_the_rule_file_is_fresh():
    assert RULE_FILE.read_text(encoding="utf-8") == alert_rules(), f"rules.yml is stale: run `{_REFRESH}` and commit it"


def test_every_condition_has_its_alert_and_there_is_no_other():
    rules = alerts(alert_rules())
    assert rules.keys() == {_alert_name(name) for name in (*CONDITIONS, _EXPORTER_DOWN)}
    for name, condition in CONDITIONS.items():
        rule = rules[_alert_name(name)]
        assert rule["labels"]["severity"] == condition.level.value
        assert rule["annotations"]["runbook_url"] == f"docs/RUNBOOK.md#{name}"
        assert "{stall" not in rule["annotations"]["summary"]


def test_rules_use_figures_that_are_served():
    used = set(re.findall(r"\bnsa_\w+", " ".join(rule["expr"] for rule in alerts(alert_rules()).values())))
    assert used <= exporter.HELP.keys()
    assert used == {"nsa_findings", "nsa_rank_findings"}


def test_a_drill_alerts_sooner_and_limits_are_named():
    slow, fast = alerts(alert_rules()), alerts(alert_rules(HealthLimits(gone_s=15), speed=30))
    assert (slow["NSAGateEntropyLow"]["for"], fast["NSAGateEntropyLow"]["for"]) == ("300s", "10s")
    assert "gone for 15 s" in fast["NSAProcessGone"]["annotations"]["summary"]
    assert all(fast[name]["expr"] == rule["expr"] for name, rule in slow.items())


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
    "a direction": ("NSADataSlow", "> 0", "< 0"),
    "no rank": ("NSAStraggler", "or on (instance, job, run)", "unless on (instance, job, run)"),
    "two alerts for one": ("NSAStraggler", "or on (instance, job, run)", "or"),
    "no waiting time": ("NSAStraggler", "for: 300s", "for: 60s"),
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
    tests["tests"] = [test for test in tests["tests"] if alert in str(test)]
    (tmp_path / "rules_test.yml").write_text(yaml.safe_dump(tests))
    for text, passes in ((rules, True), (rules.replace(good, bad), False)):
        (tmp_path / "rules.yml").write_text(text)
        done = promtool("test", "rules", "rules_test.yml", cwd=tmp_path)
        assert (done.returncode == 0) == passes, done.stderr
        assert passes or "exp:" in done.stderr, f"broken, not mutated: {done.stderr}"
