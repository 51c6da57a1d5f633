"""Accuracy of a table's trained models by the length of a row and by the place of the fact, as CSV and as a picture.

    python -m experiments.nsa_vs_dense.depth_map extended_32k --lengths 512,2048,8192,32768

Rows are those that `nsa eval` reads, at each length; a depth is the share of the row before the fact. Cells that the
results file holds from an earlier call are not computed again.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from experiments.nsa_vs_dense.results import RESULTS
from experiments.nsa_vs_dense.tables import StudyRun, read_tables
from nsa_train.data.rows.specs import SyntheticData
from nsa_train.data.rows.synthetic import AnswerPlace
from nsa_train.infer.evaluation.held_out import held_out_data, last_hidden_states, rows_of
from nsa_train.infer.evaluation.selection import right_answers
from nsa_train.infer.load_model import LoadedModel, load_model

DEPTHS = 5
"""Equal parts of a row."""
CELL_WIDTH, CELL_HEIGHT, LEFT, TOP, GAP = 54, 26, 72, 58, 28
TITLE_LETTER = 7


class DepthCell(NamedTuple):
    variant: str
    seed: int
    length: int
    depth: int
    """Number of the part of the row that holds the fact, from 0."""
    questions: int
    accuracy: float


def accuracy_by_depth(run: StudyRun, length: int, rows: int) -> list[DepthCell]:
    """Measure the accuracy of a finished run by depth, over `rows` held-out rows."""
    right_by_depth: dict[int, list[bool]] = defaultdict(list)
    for place, hit in held_out_answers(load_model(run.folder), length, rows):
        right_by_depth[place.fact * DEPTHS // length].append(hit)
    return [
        DepthCell(run.variant, run.seed, length, depth, len(hits), fmean(hits))
        for depth, hits in sorted(right_by_depth.items())
    ]


def held_out_answers(loaded: LoadedModel, length: int, rows: int) -> Iterator[tuple[AnswerPlace, bool]]:
    """The place of every question in held-out rows of this length, and whether the model answers it."""
    data = held_out_data(loaded, None, length)
    if not isinstance(data, SyntheticData):
        raise SystemExit(f"{loaded.source} was not trained on synthetic rows: they alone say where a fact lies.")
    source = data.make_rows()
    for batch in rows_of(data, rows):
        places = source.answer_places(batch.row_ids)
        with torch.inference_mode():
            right = right_answers(loaded.model, batch, places, last_hidden_states(loaded.model, batch))
        yield from zip(places, right, strict=True)


def draw_map(title: str, cells: Sequence[DepthCell]) -> str:
    """SVG: a grid per variant, lengths from left to right, depths from top to bottom; the mean over seeds."""
    by_place: Mapping[tuple[str, int, int], list[float]] = defaultdict(list)
    for cell in cells:
        by_place[cell.variant, cell.length, cell.depth].append(cell.accuracy)
    variants = list(dict.fromkeys(cell.variant for cell in cells))
    lengths = sorted({cell.length for cell in cells})
    grid = CELL_WIDTH * len(lengths)
    parts = [_text(LEFT, 18, title)]
    for part in range(DEPTHS):
        depths = f"{part * 100 // DEPTHS}–{(part + 1) * 100 // DEPTHS} %"
        parts.append(_text(LEFT - 6, TOP + CELL_HEIGHT * part + 17, depths, "end"))
    for place, variant in enumerate(variants):
        left = LEFT + place * (grid + GAP)
        parts.append(_text(left, 38, variant))
        for column, length in enumerate(lengths):
            x = left + CELL_WIDTH * column
            parts.append(_text(x + CELL_WIDTH // 2, TOP - 6, f"{length:,}", "middle"))
            for depth in range(DEPTHS):
                if accuracies := by_place.get((variant, length, depth)):
                    parts.append(_box(x, TOP + CELL_HEIGHT * depth, fmean(accuracies)))
    width = max(LEFT + len(variants) * (grid + GAP), LEFT + TITLE_LETTER * len(title))
    height = TOP + CELL_HEIGHT * DEPTHS + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _box(x: int, y: int, accuracy: float) -> str:
    """White at 0, dark blue at 1, with the figure in it."""
    colour = ",".join(str(round(255 + (full - 255) * accuracy)) for full in (20, 75, 140))
    size = f'width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}"'
    fill = "#fff" if accuracy > 0.5 else "#222"
    figure = _text(x + CELL_WIDTH // 2, y + 17, f"{accuracy:.2f}", "middle", fill)
    return f'<rect x="{x}" y="{y}" {size} fill="rgb({colour})"/>{figure}'


def _text(x: int, y: int, text: str, anchor: str = "start", fill: str = "#222") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'


def read_cells(path: Path) -> list[DepthCell]:
    if not path.exists():
        return []
    with open(path, encoding="utf-8") as file:
        return [_cell_of(row) for row in csv.DictReader(file)]


def _cell_of(row: dict[str, str]) -> DepthCell:
    seed, length, depth, questions = (int(row[name]) for name in ("seed", "length", "depth", "questions"))
    return DepthCell(row["variant"], seed, length, depth, questions, float(row["accuracy"]))


def write_cells(path: Path, cells: Iterable[DepthCell]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(DepthCell._fields)
        rows.writerows((*cell[:-1], f"{cell.accuracy:.5f}") for cell in cells)


def main() -> None:
    tables = read_tables()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=tables)
    parser.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], required=True)
    parser.add_argument("--rows", type=int, default=20, help="rows of each length (default 20)")
    options = parser.parse_args()
    table = tables[options.table]
    file = RESULTS / f"{table.name}_depths.csv"
    cells = read_cells(file)
    known = {(cell.variant, cell.seed, cell.length) for cell in cells}
    for run in table.runs:
        for length in options.lengths:
            if run.finished and (run.variant, run.seed, length) not in known:
                print(f"{run.variant}, seed {run.seed}, {length:,} tokens", flush=True)
                cells += accuracy_by_depth(run, length, options.rows)
                write_cells(file, cells)
    title = f"Accuracy by length of the row and place of the fact ({table.name})"
    (RESULTS / f"{table.name}_depths.svg").write_text(draw_map(title, cells), encoding="utf-8")


if __name__ == "__main__":
    main()
