"""Report section of `nsa eval`: held-out loss by position, far tasks by length and depth, lm-evaluation-harness, and
the comparison with a reference model."""

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from nsa_train.record.evaluations import ModelEvaluation
from nsa_train.watch.view.downsample import ChartBucket
from nsa_train.watch.view.formatting import UNKNOWN, number, plain, share
from nsa_train.watch.view.html_page import chart_figure, table
from nsa_train.watch.view.layer_chart import layer_advice, layer_svg, mass_parts
from nsa_train.watch.view.svg_chart import ChartLine, SvgChart

_MOST_LINES = 6
_STYLES = tuple(f"c{place + 1}" for place in range(_MOST_LINES))
_Z = 1.96  # 95 %
_AGAINST = "against"
"""How heads of columns about a reference model begin."""
_NONE = '<p class="quiet">No results yet. <code>nsa eval RUN</code> adds them.</p>'


def evaluation_section(evaluations: Sequence[ModelEvaluation]) -> str:
    """HTML of all results; figures show the newest steps."""
    parts = []
    if figures := [chart for chart in (_loss_chart(evaluations), _far_chart(evaluations)) if chart is not None]:
        parts.append(f'<div class="charts">{"".join(map(chart_figure, figures))}</div>')
    parts += [part for each in evaluations if each.layers is not None for part in _layer_figure(each)]
    for title, heads, numbers, rows in result_tables(evaluations):
        parts += [f"<h3>{title}</h3>", table(("model", *heads), rows, numbers=[place + 1 for place in numbers])]
    return "\n".join(parts) or _NONE


def result_tables(
    evaluations: Sequence[ModelEvaluation],
) -> Iterator[tuple[str, tuple[str, ...], range, list[tuple[str, ...]]]]:
    """Title, heads, places of numbers among them, and rows, whose first cell names the model.

    Columns about a reference model are left out if no row has one.
    """
    for title, heads, numbers, rows_of in _TABLES:
        if rows := [row for each in evaluations for row in rows_of(each)]:
            unused = [
                place
                for place, head in enumerate(heads, 1)
                if head.startswith(_AGAINST) and all(row[place] == UNKNOWN for row in rows)
            ]
            cells = [tuple(cell for place, cell in enumerate(row) if place not in unused) for row in rows]
            shown = tuple(head for place, head in enumerate(heads, 1) if place not in unused)
            yield title, shown, range(numbers.start, numbers.stop - len(unused)), cells


def evaluation_summary(evaluation: ModelEvaluation) -> dict[str, str]:
    """Figures of a model card as text, by result; far tasks by length."""
    rows = {}
    if (held_out := evaluation.held_out) is not None:
        per_byte = held_out.get("bits_per_byte")
        rows[f"held-out loss of {held_out['tokens']:,} tokens"] = f"{number(held_out['loss'])} nats per token" + (
            "" if per_byte is None else f", {number(per_byte)} bits per byte"
        )
        if (accuracy := held_out.get("accuracy")) is not None:
            rows[f"held-out accuracy of {held_out['tokens']:,} tokens"] = share(accuracy)
    for task, cells in sorted(evaluation.far_tasks.items()):
        for length in sorted({cell["length"] for cell in cells}):
            chosen = [cell for cell in cells if cell["length"] == length]
            examples = sum(cell["examples"] for cell in chosen) or 1
            accuracy, exact = (
                math.fsum(cell[name] * cell["examples"] for cell in chosen) / examples
                for name in ("accuracy", "exact_match")
            )
            rows[f"{plain(task)}, {length:,} tokens"] = (
                f"accuracy {share(accuracy)} (chance {share(chosen[0].get('chance'))}), exact match {share(exact)}, "
                f"{examples:,} examples"
            )
    for _, task, metric, value in _harness_rows(evaluation):
        rows[f"lm-eval {task}, {metric}"] = value
    return rows


def _evaluation_name(evaluation: ModelEvaluation) -> str:
    return "model" if evaluation.step is None else f"step {evaluation.step:,}"


def _loss_chart(evaluations: Sequence[ModelEvaluation]) -> SvgChart | None:
    drawn = [each for each in evaluations if each.held_out and each.held_out["by_position"]][-_MOST_LINES:]
    lines, last = [], 1.0
    for evaluation, style in zip(drawn, _STYLES, strict=False):
        assert evaluation.held_out is not None
        points = []
        for row in evaluation.held_out["by_position"]:
            middle, half = (row["begin"] + row["end"]) / 2, _Z * (row.get("standard_error") or 0.0)
            points.append(ChartBucket(middle, row["loss"] - half, row["loss"] + half, row["loss"], 1, 0))
            last = max(last, middle)
        lines.append(ChartLine(_evaluation_name(evaluation), points, style))
    if not lines:
        return None
    unit = "nats per token, with 95 % intervals"
    return SvgChart("held-out loss by position", unit, lines, (0.0, last), x_unit="position", from_zero=False)


def _far_chart(evaluations: Sequence[ModelEvaluation]) -> SvgChart | None:
    """Accuracy by length of the newest evaluation that has far tasks, mean over depths."""
    newest = next((each for each in reversed(evaluations) if each.far_tasks), None)
    if newest is None:
        return None
    lines, last = [], 1.0
    for (task, cells), style in zip(sorted(newest.far_tasks.items()), _STYLES, strict=False):
        points = []
        for length in sorted({cell["length"] for cell in cells}):
            values = [cell["accuracy"] for cell in cells if cell["length"] == length]
            mean = math.fsum(values) / len(values)
            points.append(ChartBucket(length, min(values), max(values), mean, len(values), 0))
            last = max(last, length)
        lines.append(ChartLine(plain(task), points, style))
    unit = f"accuracy of {_evaluation_name(newest)}; bands span the depths"
    return SvgChart("far tasks", unit, lines, (0.0, last), x_unit="tokens", format=share)


def _position_rows(evaluation: ModelEvaluation) -> list[tuple[str, ...]]:
    held_out = evaluation.held_out
    if held_out is None:
        return []
    against = evaluation.held_out_against or {"by_position": []}
    others = {row["begin"]: row for row in against["by_position"]}
    rows = [
        (_evaluation_name(evaluation), _positions_text(row), *_loss_cells(row, others.get(row["begin"], {})))
        for row in held_out["by_position"]
    ]
    return [*rows, (_evaluation_name(evaluation), "all", *_loss_cells(held_out, against))]


def _positions_text(row: dict[str, Any]) -> str:
    return f"{row['begin']:,}–{row['end'] - 1:,}"


def _loss_cells(row: dict[str, Any], other: dict[str, Any]) -> tuple[str, ...]:
    return (f"{row['tokens']:,}" if "tokens" in row else UNKNOWN, number(row["loss"]), _interval(row, "standard_error"),
            number(row.get("bits_per_byte")), share(row.get("accuracy")), number(other.get("loss")),
            share(other.get("accuracy")))  # fmt: skip


def _interval(row: dict[str, Any], name: str) -> str:
    """Half of the 95 % interval, from the standard error of this name."""
    return UNKNOWN if row.get(name) is None else number(_Z * row[name], 2)


def _agreement_rows(evaluation: ModelEvaluation) -> list[tuple[str, ...]]:
    if evaluation.agreement is None:
        return []
    rows = [(_positions_text(row), row) for row in evaluation.agreement["by_position"]]
    return [
        (
            *(_evaluation_name(evaluation), where, f"{row['tokens']:,}", number(row["loss"])),
            *(number(row["against_loss"]), number(row["difference"], 3), _interval(row, "difference_standard_error")),
            *(share(row["same_top"]), number(row["divergence"], 3), _interval(row, "divergence_standard_error")),
        )
        for where, row in [*rows, ("all", evaluation.agreement)]
    ]


def _harm_rows(evaluation: ModelEvaluation) -> list[tuple[str, ...]]:
    """Rows of the layers, the most harmful first."""
    layers = [] if evaluation.layers is None else evaluation.layers["layers"]
    return [
        (
            *(_evaluation_name(evaluation), str(row["layer"]), plain(row.get("kind", UNKNOWN))),
            *(number(row["harm"], 3), _interval(row, "harm_standard_error"), number(row["gain"], 3)),
            *(share(part) for part in mass_parts(row) or (None,) * 4),
        )
        for row in sorted(layers, key=lambda row: (-row["harm"], row["layer"]))
    ]


def _layer_figure(evaluation: ModelEvaluation) -> list[str]:
    assert evaluation.layers is not None
    if not evaluation.layers["layers"]:
        return []
    picture = base64.b64encode(layer_svg(evaluation.layers).encode()).decode()
    advice = f"{_evaluation_name(evaluation)}: {layer_advice(evaluation.layers)}"
    return [
        f'<figure><img alt="mass read and harm by layer" src="data:image/svg+xml;base64,{picture}"></figure>',
        f"<p>{escape(advice)}</p>",
    ]


def _far_rows(evaluation: ModelEvaluation) -> list[tuple[str, ...]]:
    return [
        (
            *(_evaluation_name(evaluation), plain(task), f"{cell['length']:,}", share(cell["depth"])),
            *(f"{cell['examples']:,}", share(cell.get("chance")), share(cell["accuracy"])),
            *(_interval_text(cell.get("accuracy_interval")), share(cell["exact_match"])),
            *(share(cell.get("needle_hit")), share(cell.get("accuracy_if_hit"))),
            *(share(cell.get("against_accuracy")), _interval_text(cell.get("against_accuracy_interval"))),
            share(cell.get("against_exact_match")),
        )
        for task, cells in sorted(evaluation.far_tasks.items())
        for cell in cells
    ]


def _selection_rows(evaluation: ModelEvaluation) -> list[tuple[str, ...]]:
    return _of_selection(evaluation, evaluation.selection)


def _selection_against_rows(evaluation: ModelEvaluation) -> list[tuple[str, ...]]:
    return _of_selection(evaluation, evaluation.selection_against)


def _of_selection(evaluation: ModelEvaluation, rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            *(_evaluation_name(evaluation), str(row["layer"]), f"{row['queries']:,}" if "queries" in row else UNKNOWN),
            *(share(row.get("chance")), share(row["hit_rate"]), share(row["mass_caught"]), _read_with_window(row)),
        )
        for row in rows
    ]


def _read_with_window(row: dict[str, Any]) -> str:
    parts = mass_parts(row)
    return UNKNOWN if parts is None else share(1 - parts[-1])


def _fact_rows(evaluation: ModelEvaluation) -> list[tuple[str, ...]]:
    names = ("chance", "fact_hit", "accuracy_if_hit", "accuracy_if_missed")
    return [
        (
            *(_evaluation_name(evaluation), str(row.get("layer", "any")), f"{row['questions']:,}"),
            *(share(row.get(name)) for name in names),
        )
        for row in evaluation.facts
    ]


def _interval_text(interval: Sequence[float] | None) -> str:
    return UNKNOWN if interval is None or len(interval) != 2 else f"{share(interval[0])} – {share(interval[1])}"


def _harness_rows(evaluation: ModelEvaluation) -> list[tuple[str, ...]]:
    return [
        (_evaluation_name(evaluation), plain(task), plain(metric), number(value))
        for task, metrics in sorted(evaluation.lm_eval.items())
        for metric, value in sorted(metrics.items())
    ]


_SELECTION_HEADS = ("layer", "queries", "chance", "hit rate", "attention mass caught", "with window, of all mass")
_TABLES: tuple[tuple[str, tuple[str, ...], range, Callable[[ModelEvaluation], list[tuple[str, ...]]]], ...] = (
    ("held-out loss by position in the document",
     ("position", "tokens", "nats per token", "± 95 %", "bits per byte", "accuracy", "against: nats per token",
      "against: accuracy"),
     range(1, 8),
     _position_rows),
    ("agreement by position in the document",
     ("position", "tokens", "nats per token", "against: nats per token", "difference", "± 95 %", "same top token", "KL",
      "± 95 %"),
     range(1, 9),
     _agreement_rows),
    ("layers by harm",
     ("layer", "kind", "harm", "± 95 %", "gain", "window", "forced blocks", "scored blocks", "not read"),
     range(2, 9),
     _harm_rows),
    ("far tasks",
     ("task", "length", "depth", "n", "chance", "accuracy", "95 % interval", "exact", "needle hit", "accuracy if hit",
      "against: accuracy", "against: 95 % interval", "against: exact"),
     range(1, 13),
     _far_rows),
    ("selection of blocks",
     _SELECTION_HEADS, range(6), _selection_rows),
    ("selection of blocks by the model compared with", _SELECTION_HEADS, range(6), _selection_against_rows),
    ("facts of synthetic questions in chosen blocks",
     ("layer", "questions", "chance", "fact hit", "accuracy if hit", "accuracy if missed"), range(6), _fact_rows),
    ("lm-evaluation-harness", ("task", "metric", "value"), range(2, 3), _harness_rows),
)  # fmt: skip
