"""Regenerate every page that is written by code: `python -m tools.docs.regenerate`.

python -m tools.docs.regenerate            rewrite the pages that take seconds
python -m tools.docs.regenerate --check    write nothing; exit 1 and list the pages that are stale
python -m tools.docs.regenerate --all      also what compiles kernels: the compile report and the modelled times
"""

import argparse
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from nsa_train.watch.conditions import alert_rules
from tools.docs import (
    draw_attention_map,
    draw_concepts,
    draw_layers,
    plan_pages,
    reference_pages,
    runbook_table,
    setting_pages,
    site_search,
)

ROOT = Path(__file__).parents[2]
SLOW = ("proofs.perf_model.write_predictions", "proofs.compile_report.write")
"""Modules run by --all. Tests compare their tables with the code: tests/tools/{perf_model,compile_report}."""


def _runbook() -> str:
    return runbook_table.with_table((ROOT / "docs" / "RUNBOOK.md").read_text(encoding="utf-8"))


def _dashboard() -> str:
    text: str = runpy.run_path(str(ROOT / "ops" / "grafana" / "make_dashboard.py"))["text"]()
    return text


PAGES: dict[str, Callable[[], str]] = {
    **setting_pages.PAGES,
    "docs/RUNBOOK.md": _runbook,
    "docs/attention_map.svg": draw_attention_map.text,
    "docs/layers_library.svg": draw_layers.library,
    "docs/layers_trainer.svg": draw_layers.trainer,
    "docs/FINDING_PAGES.md": site_search.text,
    **reference_pages.PAGES,
    **draw_concepts.PICTURES,
    **plan_pages.PAGES,
    "ops/prometheus/rules.yml": alert_rules,
    "ops/grafana/nsa.json": _dashboard,
}


def stale(pages: dict[str, str]) -> list[str]:
    """Pages whose file is missing or differs from what the code writes."""
    files = ((name, ROOT / name, text) for name, text in pages.items())
    return [name for name, file, text in files if not file.is_file() or file.read_text(encoding="utf-8") != text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    parser.add_argument("--all", action="store_true", help="also what compiles kernels (about 15 minutes)")
    args = parser.parse_args()
    pages = {name: page() for name, page in PAGES.items()}
    old = stale(pages)
    for name in old:
        print(f"{name} is stale: run python -m tools.docs.regenerate" if args.check else f"wrote {name}")
        if not args.check:
            (ROOT / name).write_text(pages[name], encoding="utf-8")
    if args.check:
        sys.exit(bool(old))
    for module in SLOW if args.all else ():
        subprocess.run([sys.executable, "-m", module], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
