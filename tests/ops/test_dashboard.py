"""The Grafana dashboard: fresh, every expression parses, every figure it asks for is served, nothing overlaps.

Grafana itself is in no registry here: how it looks is not tested.
"""

import importlib.util
import json
import re
from itertools import combinations

import yaml

from nsa_train.watch import exporter
from tests.ops.test_alert_rules import OPS, promtool

FOLDER = OPS / "grafana"
DASHBOARD = json.loads((FOLDER / "nsa.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_the_dashboard_is_fresh():
    spec = importlib.util.spec_from_file_location("make_dashboard", FOLDER / "make_dashboard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stale = "nsa.json is stale: run `python ops/grafana/make_dashboard.py` and commit the result"
    assert (FOLDER / "nsa.json").read_text(encoding="utf-8") == module.text(), stale


def as_rules(expressions, folder):
    rules = [
        {"record": f"dashboard:expression_{i}", "expr": expr.replace("$__rate_interval", "1m")}
        for i, expr in enumerate(expressions)
    ]
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}, width=10**6))
    return promtool("check", "rules", str(folder / "rules.yml"))


def test_every_expression_parses(tmp_path):
    done = as_rules(EXPRESSIONS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{len(EXPRESSIONS)} rules found" in done.stdout
    assert as_rules(["sum(nsa_step"], tmp_path).returncode != 0


def test_every_figure_is_served_and_every_gauge_is_shown():
    queries = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]
    used = set(re.findall(r"\bnsa_\w+", " ".join([*EXPRESSIONS, *queries])))
    assert used <= exporter.HELP.keys()
    assert {gauge.name for gauge in exporter.GAUGES.values()} <= used


def test_run_and_rank_are_chosen_at_the_top():
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "run", "rank"]
    assert [expr for expr in EXPRESSIONS if "$run" not in expr] == []


def test_panels_have_their_own_place():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for a, b in combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
    assert max(place["x"] + place["w"] for place in places) == 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
