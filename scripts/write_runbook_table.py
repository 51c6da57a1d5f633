"""Write the table of conditions into docs/RUNBOOK.md (or the file given), from nsa.observe.watch.conditions."""

import re
import sys
from dataclasses import asdict
from pathlib import Path

from nsa.observe.watch.conditions import CONDITIONS, HealthLimits

BEGIN, END = "<!-- conditions: written by scripts/write_runbook_table.py -->", "<!-- end of conditions -->"


def table() -> str:
    limits = {name: f"{value:g}" for name, value in asdict(HealthLimits()).items()}
    rows = ["| condition | level | when | first thing to do |", "|---|---|---|---|"]
    for c in CONDITIONS.values():
        rows.append(f'| <a id="{c.name}"></a>`{c.name}` | {c.level} | {c.rule.format(**limits)} | {c.advice} |')
    return "\n".join([BEGIN, "", *rows, "", END])


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "RUNBOOK.md")
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: table(), text, flags=re.DOTALL))
