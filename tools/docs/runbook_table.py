"""The table of health conditions in docs/RUNBOOK.md, from nsa_train.watch.conditions."""

import re
from dataclasses import asdict

from nsa_train.watch.conditions import CONDITIONS, HealthLimits

BEGIN, END = "<!-- conditions: written by python -m tools.docs.regenerate -->", "<!-- end of conditions -->"


def table() -> str:
    limits = {name: f"{value:g}" for name, value in asdict(HealthLimits()).items()}
    rows = ["| condition | level | when | first action |", "|---|---|---|---|"]
    for c in CONDITIONS.values():
        rows.append(f'| <a id="{c.name}"></a>`{c.name}` | {c.level} | {c.rule.format(**limits)} | {c.advice} |')
    return "\n".join([BEGIN, "", *rows, "", END])


def with_table(page: str) -> str:
    """The page with its table replaced."""
    new, count = re.subn(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: table(), page, flags=re.DOTALL)
    assert count == 1, f"{BEGIN!r} … {END!r} occurs {count} times in the runbook"
    return new
