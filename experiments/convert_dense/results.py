"""Compare every stage of the conversion with the dense model: loss gap, agreement, and a table of all.

    python -m experiments.convert_dense.results

Writes FOLDER/results/NAME.json per model (`nsa eval MODEL --against dense`, on the same held-out rows; a model whose
file exists is left out) and prints the table. Healed models are also compared with the dense model that was trained
on the same further tokens: `dense_more`.
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from experiments.convert_dense.run import FOLDER, LONG, stages

ROWS = 24
_HEAD = """\
| model | loss | gap to the dense model | same top token | KL | gap beyond 2,048 tokens |
|---|---|---|---|---|---|"""


def compared_models(folder: Path) -> list[str]:
    """Stages after the dense model that leave a model behind."""
    names = [stage.name for stage in stages(folder, folder) if stage.done]
    return names[names.index("dense") + 1 :] if "dense" in names else []


def evaluate(folder: Path, name: str, rows: int) -> dict[str, Any]:
    """The agreement with the dense model."""
    path = folder / "results" / f"{name}.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        data = ["--data", str(folder / "set"), "--seq-len", str(LONG), "--rows", str(rows)]
        words = ["nsa", "eval", str(folder / name), "--against", str(folder / "dense"), *data, "--out", str(path)]
        done = subprocess.run([*words, "--tasks", "agreement", "--json"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    agreement: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]["agreement"]
    return agreement


def table_row(name: str, agreement: dict[str, Any]) -> str:
    late = [part for part in agreement["by_position"] if part["begin"] >= LONG // 2]
    tokens = sum(part["tokens"] for part in late)
    beyond = sum(part["difference"] * part["tokens"] for part in late) / tokens if tokens else float("nan")
    error = 1.96 * (agreement["difference_standard_error"] or 0)
    return (
        f"| `{name}` | {agreement['loss']:.4f} | {agreement['difference']:+.4f} ± {error:.4f} | "
        f"{agreement['same_top']:.1%} | {agreement['divergence']:.4f} | {beyond:+.4f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"of experiments.convert_dense.run ({FOLDER})")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"held-out rows of {LONG:,} tokens (default {ROWS})")
    options = parser.parse_args()
    print(_HEAD, flush=True)
    for name in compared_models(options.folder):
        print(table_row(name, evaluate(options.folder, name, options.rows)), flush=True)


if __name__ == "__main__":
    main()
