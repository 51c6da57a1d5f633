"""Writes the Grafana dashboard nsa.json: `python ops/grafana/make_dashboard.py`.

Three panels per row. Every expression is filtered by the run and rank selected at the top. A gauge of a heartbeat field
that no panel asks for gets one in the last row.
"""

import json
from pathlib import Path
from typing import Any

from nsa_train.record.heartbeat_record import METRICS, MetricFormat

FILE = Path(__file__).with_name("nsa.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
RANK, RUN = 'run=~"$run", rank=~"$rank"', 'run=~"$run"'
SPAN = "$__rate_interval"

# Title, unit, expressions with the legend of each.
Panel = tuple[str, str, list[tuple[str, str]]]
ROWS: dict[str, list[Panel]] = {
    "Progress": [
        ("Loss (nats per token)", "none", [
            (f'nsa_loss_nats{{{RUN}, rank="0"}}', "{{run}} training"),
            (f"nsa_eval_loss_nats{{{RUN}}}", "{{run}} held out"),
        ]),
        ("Tokens per second, all ranks", "short", [(f'nsa_tokens_per_second{{{RUN}, rank="0"}}', "{{run}}")]),
        ("Step, share of train.steps; held-out accuracy", "percentunit", [
            (f"max by (run) (nsa_step{{{RUN}}}) / max by (run) (nsa_steps_target)", "{{run}}"),
            (f"nsa_eval_accuracy_ratio{{{RUN}}}", "{{run}} held-out accuracy"),
        ]),
        ("Learning rate", "sci", [(f'nsa_learning_rate{{{RUN}, rank="0"}}', "{{run}}")]),
        ("Gradient norm, before clipping", "none", [(f'nsa_grad_norm{{{RUN}, rank="0"}}', "{{run}}")]),
        ("Skipped and non-finite steps", "short", [
            (f'increase(nsa_skipped_steps_total{{{RUN}, rank="0"}}[{SPAN}])', "{{run}} skipped"),
            (f'increase(nsa_nonfinite_steps_total{{{RUN}, rank="0"}}[{SPAN}])', "{{run}} non-finite"),
        ]),
        ("MFU, without recomputation", "percentunit", [(f'nsa_mfu_ratio{{{RUN}, rank="0"}}', "{{run}}")]),
        ("Goodput of an hour: net tokens / (time · median speed)", "percentunit", [
            (f'delta(nsa_tokens_seen{{{RUN}, rank="0"}}[1h]) / 3600 '
             f'/ quantile_over_time(0.5, nsa_tokens_per_second{{{RUN}, rank="0"}}[1h])', "{{run}}"),
        ]),
        ("Tokens per dollar", "short", [(f'nsa_tokens_per_usd{{{RUN}, rank="0"}}', "{{run}}")]),
    ],
    "Gates and selection": [
        ("Gate entropy (1.0986 is uniform, 0.3 low, 0.2 critical), selector loss; nats", "none", [
            (f"nsa_gate_entropy_nats{{{RANK}}}", "{{run}} rank {{rank}}"),
            (f"nsa_selector_loss_nats{{{RANK}}}", "{{run}} rank {{rank}} selector loss"),
        ]),
        ("Collapsed gates, largest gate", "percentunit", [
            (f"nsa_gate_collapse_ratio{{{RANK}}}", "{{run}} rank {{rank}} collapsed"),
            (f"nsa_gate_max_ratio{{{RANK}}}", "{{run}} rank {{rank}} largest"),
        ]),
        ("Share of each branch", "percentunit", [(f"nsa_gate_share_mean_ratio{{{RANK}}}", "{{run}} {{branch}}")]),
        ("Share of each branch, by layer", "percentunit", [
            (f'nsa_gate_share_ratio{{{RUN}, rank="0"}}', "{{run}} layer {{layer}} {{branch}}"),
        ]),
        ("Keys per query, selected branch", "short", [
            (f"nsa_selection_keys_mean{{{RANK}}}", "{{run}} mean"),
            (f"nsa_selection_keys_max{{{RANK}}}", "{{run}} largest"),
        ]),
        ("Queries at maximum keys; counted / predicted reads", "percentunit", [
            (f"nsa_selection_at_max_ratio{{{RANK}}}", "{{run}} at maximum"),
            (f"nsa_reads_counted{{{RANK}}} / nsa_reads_predicted{{{RANK}}}", "{{run}} reads"),
        ]),
    ],
    "Machine": [
        ("Memory", "bytes", [(f"nsa_memory_bytes{{{RANK}}}", "{{run}} rank {{rank}} {{kind}}")]),
        ("Wait for data", "s", [(f"nsa_data_wait_seconds{{{RANK}}}", "{{run}} rank {{rank}}")]),
        ("Forward time by rank; step time", "s", [
            (f"nsa_forward_seconds{{{RANK}}}", "{{run}} rank {{rank}}"),
            (f"nsa_step_seconds{{{RANK}}}", "{{run}} step"),
        ]),
    ],
    "Liveness": [
        ("Heartbeat age and limit", "s", [
            (f"time() - nsa_heartbeat_timestamp_seconds{{{RANK}}}", "{{run}} rank {{rank}}"),
            (f"nsa_heartbeat_limit_seconds{{{RANK}}}", "{{run}} rank {{rank}} limit"),
        ]),
        ("State", "short", [(f"nsa_run_state{{{RANK}}} == 1", "{{run}} rank {{rank}} {{state}}")]),
        ("Restarts, rollbacks, lost steps", "short", [
            (f"nsa_restarts_total{{{RUN}}}", "{{run}} restarts"),
            (f"nsa_rollbacks_total{{{RUN}}}", "{{run}} rollbacks"),
            (f"nsa_lost_steps_total{{{RUN}}}", "{{run}} lost steps"),
        ]),
        ("Steps since the last checkpoint", "short", [
            (f"max by (run) (nsa_step{{{RUN}}}) - max by (run) (nsa_last_checkpoint_step)", "{{run}}"),
            (f"nsa_checkpoint_interval_steps{{{RUN}}}", "{{run}} interval"),
        ]),
        ("Age of the last checkpoint", "s", [
            (f"time() - nsa_last_checkpoint_timestamp_seconds{{{RUN}}}", "{{run}}"),
        ]),
        ("Health findings", "short", [(f"nsa_findings{{{RUN}}} > 0", "{{run}} {{condition}}")]),
    ],
}  # fmt: skip
_UNITS = {MetricFormat.SHARE: "percentunit", MetricFormat.DURATION: "s"}
FIRING = 'ALERTS{alertstate="firing", alertname=~"NSA.*", run=~"$run|"}'


def dashboard() -> dict[str, Any]:
    panels = [_panel("Firing alerts", "short", [(FIRING, "{{alertname}} {{run}} {{rank}}")], "table", (0, 0, 24, 6))]
    top = 6
    for title, row in {**ROWS, "Other metrics": _other_panels()}.items():
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _place(0, top, 24, 1)}
        )
        for i, (name, unit, targets) in enumerate(row):
            panels.append(_panel(name, unit, targets, "timeseries", (i % 3 * 8, top + 1 + i // 3 * 8, 8, 8)))
        top += 1 + -(-len(row) // 3) * 8
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": "nsa-runs", "title": "NSA runs", "tags": ["nsa"], "schemaVersion": 39, "editable": True,
        "refresh": "30s", "time": {"from": "now-6h", "to": "now"}, "timezone": "browser",
        "templating": {"list": [
            {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
            _variable("run", "label_values(nsa_step, run)"),
            _variable("rank", 'label_values(nsa_step{run=~"$run"}, rank)'),
        ]},
        "panels": panels,
    }  # fmt: skip


def _other_panels() -> list[Panel]:
    shown = "".join(expr for row in ROWS.values() for _, _, targets in row for expr, _ in targets)
    return [
        (
            metric.about,
            _UNITS.get(metric.format, "short"),
            [(f"{metric.gauge.name}{{{RANK}}}", "{{run}} rank {{rank}}")],
        )
        for metric in METRICS.values()
        if metric.gauge is not None and f"{metric.gauge.name}{{" not in shown
    ]


def _panel(
    title: str, unit: str, targets: list[tuple[str, str]], kind: str, place: tuple[int, int, int, int]
) -> dict[str, Any]:
    instant = {"format": "table", "instant": True} if kind == "table" else {}
    return {
        "type": kind, "title": title, "datasource": SOURCE, "gridPos": _place(*place),
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend, **instant}
            for i, (expr, legend) in enumerate(targets)
        ],
    }  # fmt: skip


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "label": name, "type": "query", "datasource": SOURCE, "refresh": 2, "multi": True,
        "includeAll": True, "current": {"text": "All", "value": "$__all"}, "sort": 3,
        "query": {"query": query, "refId": name}, "definition": query,
    }  # fmt: skip


def _place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def text() -> str:
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
