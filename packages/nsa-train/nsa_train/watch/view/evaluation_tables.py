"""Report section of `nsa eval`: held-out loss by position, far tasks by length and depth, lm-evaluation-harness, and
the comparison with a reference model."""

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from nsa_train.record.evaluations import ModelEvaluation
from nsa_train.terminal_text import UNKNOWN
from nsa_train.watch.view.downsample import ChartBucket
from nsa_train.watch.view.formatting import number, plain, share
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
    for title, rows_of, n_texts, columns in _TABLES:
        rows = [(_evaluation_name(each), row) for each in evaluations for row in rows_of(each)]
        all_columns = [(head, [cell(row) for _, row in rows]) for head, cell in columns]
        shown = [(head, cells) for head, cells in all_columns if not head.startswith(_AGAINST) or {*cells} - {UNKNOWN}]
        if rows:
            lines = list(zip([model for model, _ in rows], *(cells for _, cells in shown), strict=True))
            yield title, tuple(head for head, _ in shown), range(n_texts, len(shown)), lines


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
    for row in _harness_rows(evaluation):
        rows[f"lm-eval {plain(row['task'])}, {plain(row['metric'])}"] = number(row["value"])
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


_Row = dict[str, Any]


def _position_rows(evaluation: ModelEvaluation) -> list[_Row]:
    if (held_out := evaluation.held_out) is None:
        return []
    against = evaluation.held_out_against or {"by_position": []}
    others = {row["begin"]: row for row in against["by_position"]}
    pairs = [(row, others.get(row["begin"], {})) for row in held_out["by_position"]]
    return [
        {**row, "against_loss": other.get("loss"), "against_accuracy": other.get("accuracy")}
        for row, other in [*pairs, (held_out, against)]
    ]


def _agreement_rows(evaluation: ModelEvaluation) -> list[_Row]:
    agreement = evaluation.agreement
    return [] if agreement is None else [*agreement["by_position"], agreement]


def _harm_rows(evaluation: ModelEvaluation) -> list[_Row]:
    """Rows of the layers, the most harmful first."""
    layers = [] if evaluation.layers is None else evaluation.layers["layers"]
    parts = ("window", "forced", "scored", "unread")
    return [
        {**row, **dict(zip(parts, mass_parts(row) or (), strict=False))}
        for row in sorted(layers, key=lambda row: (-row["harm"], row["layer"]))
    ]


def _far_rows(evaluation: ModelEvaluation) -> list[_Row]:
    return [{**cell, "task": task} for task, cells in sorted(evaluation.far_tasks.items()) for cell in cells]


def _harness_rows(evaluation: ModelEvaluation) -> list[_Row]:
    return [
        {"task": task, "metric": metric, "value": value}
        for task, metrics in sorted(evaluation.lm_eval.items())
        for metric, value in sorted(metrics.items())
    ]


_Cell = Callable[[_Row], str]


def _cell(text: Callable[[Any], str], name: str, missing: str = UNKNOWN) -> _Cell:
    return lambda row: missing if row.get(name) is None else text(row[name])


def _number(name: str, digits: int = 4) -> _Cell:
    return _cell(lambda value: number(value, digits), name)


def _count(name: str) -> _Cell:
    return _cell("{:,}".format, name)


def _share(name: str) -> _Cell:
    return _cell(share, name)


def _half_interval(name: str) -> _Cell:
    """Half of the 95 % interval, from the standard error of this name."""
    return _cell(lambda error: number(_Z * error, 2), name)


def _interval(name: str) -> _Cell:
    return _cell(lambda ends: f"{share(ends[0])} – {share(ends[1])}" if len(ends) == 2 else UNKNOWN, name)


def _positions(row: _Row) -> str:
    return f"{row['begin']:,}–{row['end'] - 1:,}" if "begin" in row else "all"


def _read_with_window(row: _Row) -> str:
    parts = mass_parts(row)
    return UNKNOWN if parts is None else share(1 - parts[-1])


_SELECTION: tuple[tuple[str, _Cell], ...] = (
    ("layer", _cell(str, "layer")), ("queries", _count("queries")), ("chance", _share("chance")),
    ("hit rate", _share("hit_rate")), ("attention mass caught", _share("mass_caught")),
    ("with window, of all mass", _read_with_window),
)  # fmt: skip
_TABLES: tuple[tuple[str, Callable[[ModelEvaluation], list[_Row]], int, Sequence[tuple[str, _Cell]]], ...] = (
    ("held-out loss by position in the document", _position_rows, 1, (
        ("position", _positions), ("tokens", _count("tokens")), ("nats per token", _number("loss")),
        ("± 95 %", _half_interval("standard_error")), ("bits per byte", _number("bits_per_byte")),
        ("accuracy", _share("accuracy")), ("against: nats per token", _number("against_loss")),
        ("against: accuracy", _share("against_accuracy")),
    )),
    ("agreement by position in the document", _agreement_rows, 1, (
        ("position", _positions), ("tokens", _count("tokens")), ("nats per token", _number("loss")),
        ("against: nats per token", _number("against_loss")), ("difference", _number("difference", 3)),
        ("± 95 %", _half_interval("difference_standard_error")), ("same top token", _share("same_top")),
        ("KL", _number("divergence", 3)), ("± 95 %", _half_interval("divergence_standard_error")),
    )),
    ("layers by harm", _harm_rows, 2, (
        ("layer", _cell(str, "layer")), ("kind", _cell(plain, "kind")), ("harm", _number("harm", 3)),
        ("± 95 %", _half_interval("harm_standard_error")), ("gain", _number("gain", 3)), ("window", _share("window")),
        ("forced blocks", _share("forced")), ("scored blocks", _share("scored")), ("not read", _share("unread")),
    )),
    ("far tasks", _far_rows, 1, (
        ("task", _cell(plain, "task")), ("length", _count("length")), ("depth", _share("depth")),
        ("n", _count("examples")), ("chance", _share("chance")), ("accuracy", _share("accuracy")),
        ("95 % interval", _interval("accuracy_interval")), ("exact", _share("exact_match")),
        ("needle hit", _share("needle_hit")), ("accuracy if hit", _share("accuracy_if_hit")),
        ("against: accuracy", _share("against_accuracy")),
        ("against: 95 % interval", _interval("against_accuracy_interval")),
        ("against: exact", _share("against_exact_match")),
    )),
    ("selection of blocks", lambda evaluation: evaluation.selection, 0, _SELECTION),
    ("selection of blocks by the model compared with", lambda evaluation: evaluation.selection_against, 0, _SELECTION),
    ("facts of synthetic questions in chosen blocks", lambda evaluation: evaluation.facts, 0, (
        ("layer", _cell(str, "layer", "any")), ("questions", _count("questions")), ("chance", _share("chance")),
        ("fact hit", _share("fact_hit")), ("accuracy if hit", _share("accuracy_if_hit")),
        ("accuracy if missed", _share("accuracy_if_missed")),
    )),
    ("lm-evaluation-harness", _harness_rows, 2, (
        ("task", _cell(plain, "task")), ("metric", _cell(plain, "metric")), ("value", _number("value")),
    )),
)  # fmt: skip
"""Title, rows, number of leading columns of text, and heads with their cells."""
