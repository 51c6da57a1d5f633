"""Results of `nsa eval`: written to RUN/evaluations/step{N}.json, read by the report and the model card.

One file per checkpoint. Results of later evaluations are merged into it: a far task's lengths and depths add up if it
was run with the same settings, any other result replaces the one of the same name.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa import __version__
from nsa.errors import OutputError
from nsa.files import file_lock, write_atomic
from nsa_train import names
from nsa_train.record import records

_FORMAT = 1
HELD_OUT = "held_out_loss"
SELECTION = "selection"
AGREEMENT = "agreement"
LAYERS = "layers"
LM_EVAL = "lm_eval/"
"""Results of lm-evaluation-harness are named by this and the task."""

_POSITION = {
    "begin": records.whole, "end": records.whole, "tokens": records.whole, "loss": records.number,
    "standard_error": records.number, "bits_per_byte": records.number, "accuracy": records.amount,
}  # fmt: skip
_HELD_OUT = {
    "data": records.text, "seq_len": records.whole, "rows": records.whole, "tokens": records.whole,
    "loss": records.number, "standard_error": records.number, "bits_per_byte": records.number,
    "accuracy": records.amount, "by_position": records.anything, "model": records.text,
}  # fmt: skip
_COMPARED = {
    "tokens": records.whole, "loss": records.number, "against_loss": records.number, "difference": records.number,
    "difference_standard_error": records.amount, "same_top": records.amount, "divergence": records.amount,
    "divergence_standard_error": records.amount,
}  # fmt: skip
_COMPARED_REQUIRED = ("tokens", "loss", "against_loss", "difference", "same_top", "divergence")
_AGREEMENT = {
    "data": records.text, "seq_len": records.whole, "rows": records.whole, "against": records.text,
    "by_position": records.anything, **_COMPARED,
}  # fmt: skip
_HARM = {
    "layer": records.whole, "kind": records.text, "harm": records.amount, "harm_standard_error": records.amount,
    "gain": records.number, "window_mass": records.amount, "forced_mass": records.amount,
    "scored_mass": records.amount,
}  # fmt: skip
_LAYERS = {
    "data": records.text, "seq_len": records.whole, "rows": records.whole, "against": records.text,
    "divergence": records.amount, "keep_dense": records.wholes, "advised": records.wholes,
    "removed": records.number, "layers": records.anything,
}  # fmt: skip
_LAYER = {
    "layer": records.whole, "queries": records.whole, "hit_rate": records.amount, "chance": records.amount,
    "mass_caught": records.amount, "window_mass": records.amount, "forced_mass": records.amount,
    "scored_mass": records.amount,
}  # fmt: skip
_LAYER_REQUIRED = ("layer", "hit_rate", "mass_caught")
_FACTS = {
    "layer": records.whole, "questions": records.whole, "chance": records.amount, "fact_hit": records.amount,
    "accuracy": records.amount, "accuracy_if_hit": records.amount, "accuracy_if_missed": records.amount,
}  # fmt: skip
_CELL = {
    "length": records.whole, "depth": records.amount, "examples": records.whole, "chance": records.amount,
    "accuracy": records.amount, "accuracy_interval": records.numbers, "exact_match": records.amount,
    "exact_match_interval": records.numbers, "answer_nats": records.number, "needle_hit": records.amount,
    "needle_hit_by_layer": records.numbers, "accuracy_if_hit": records.amount, "accuracy_if_missed": records.amount,
    "against": records.text, "against_accuracy": records.amount, "against_accuracy_interval": records.numbers,
    "against_exact_match": records.amount,
}  # fmt: skip
_CELL_REQUIRED = ("length", "depth", "examples", "accuracy", "exact_match")


@dataclass
class ModelEvaluation:
    """Checked results of one checkpoint; values that are missing or damaged are left out."""

    step: int | None
    model: str = ""
    held_out: dict[str, Any] | None = None
    """data, seq_len, rows, tokens, loss, bits_per_byte, accuracy and by_position: rows of begin, end, …"""
    held_out_against: dict[str, Any] | None = None
    """`held_out` of the reference model, with its name: model."""
    agreement: dict[str, Any] | None = None
    """data, rows, against, tokens, loss, against_loss, difference, same_top, divergence, …, and by_position."""
    layers: dict[str, Any] | None = None
    """divergence, keep_dense, advised, removed, and layers: rows of layer, kind, harm, gain, window_mass, …"""
    far_tasks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Task → rows of length, depth, examples, chance, accuracy, accuracy_interval, exact_match, …"""
    selection: list[dict[str, Any]] = field(default_factory=list)
    """Rows of layer, queries, hit_rate, chance, mass_caught, window_mass, …"""
    selection_against: list[dict[str, Any]] = field(default_factory=list)
    """`selection` of the reference model, if it selects blocks."""
    facts: list[dict[str, Any]] = field(default_factory=list)
    """Rows of layer, questions, chance, fact_hit, accuracy, …; the one without a layer is about any layer."""
    lm_eval: dict[str, dict[str, float]] = field(default_factory=dict)
    """Task → metric → value."""
    unreadable: int = 0


def read_evaluations(run: Path) -> list[ModelEvaluation]:
    """All results below a run folder or an exported model, oldest step first; reading raises nothing."""
    evaluations = []
    for path in (run / names.EVALUATIONS).glob("*.json"):
        step = names.step_of(path.stem)
        if step is not None or path.name == names.evaluation(None):
            evaluations.append(_checked(step, path))
    return sorted(evaluations, key=lambda each: (each.step is not None, each.step or 0))


def evaluation_file(folder: Path, step: int | None) -> Path:
    return folder / names.EVALUATIONS / names.evaluation(step)


def require_mergeable(path: Path) -> None:
    """Raise if there is a file that results cannot be added to; called before an evaluation that takes long."""
    _read(path)


def merge_results(path: Path, *, step: int | None, model: str, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Add results to a file, atomically; several processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.parent / names.LOCK):
        content = _read(path)
        merged = {**content.get("results", {})}
        for name, result in results.items():
            merged[name] = _merged(merged.get(name), {**result, "nsa": __version__, "ts": round(time.time(), 3)})
        content = {"format": _FORMAT, "step": step, "model": model, "results": merged}
        write_atomic(path, json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n")


def _merged(old: Any, new: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(old, dict) or "cells" not in new or old.get("settings") != new.get("settings"):
        return new
    cells = {(cell["length"], cell["depth"]): cell for cell in [*old.get("cells", []), *new["cells"]]}
    return {**new, "cells": [cells[key] for key in sorted(cells)]}


def _read(path: Path) -> dict[str, Any]:
    content, damaged = records.read_section(path)
    if damaged or (content is not None and content.get("format") != _FORMAT):
        raise OutputError(
            f"{path} is not a results file of this version, so results cannot be added to it. Move it away, or name "
            f"another file with --out."
        )
    return content or {}


def checked_results(step: int | None, results: Mapping[str, Any], model: str = "") -> ModelEvaluation:
    """Results as they are written to a file, with every value checked."""
    evaluation = ModelEvaluation(step, model)
    for name, value in results.items():
        result = records.section(value) or {}
        if name == HELD_OUT:
            evaluation.held_out = _positions(evaluation, result, _HELD_OUT, ("loss", "tokens"))
            if (other := records.section(result.get("against"))) is not None:
                evaluation.held_out_against = _positions(evaluation, other, _HELD_OUT, ("loss", "tokens"))
        elif name == AGREEMENT:
            evaluation.agreement = _positions(evaluation, result, _AGREEMENT, _COMPARED_REQUIRED)
        elif name == LAYERS:
            values, damaged = records.fields(result, _LAYERS, required=("divergence",))
            evaluation.unreadable += int(damaged)
            if values is not None:
                values["layers"] = _rows(values.get("layers"), _HARM, ("layer", "harm", "gain"))
            evaluation.layers = values
        elif name == SELECTION:
            evaluation.selection = _rows(result.get("layers"), _LAYER, _LAYER_REQUIRED)
            other = records.section(result.get("against")) or {}
            evaluation.selection_against = _rows(other.get("layers"), _LAYER, _LAYER_REQUIRED)
            facts = records.section(result.get("facts")) or {}
            for rows, required in ((facts.get("layers"), ("layer",)), ([facts.get("any_layer")], ())):
                evaluation.facts += _rows(rows, _FACTS, (*required, "questions", "fact_hit"))
        elif name.startswith(LM_EVAL):
            metrics = records.section(result.get("metrics")) or {}
            checked = {metric: records.number(value) for metric, value in metrics.items()}
            evaluation.lm_eval[name.removeprefix(LM_EVAL)] = {k: v for k, v in checked.items() if v is not None}
        elif cells := _rows(result.get("cells"), _CELL, _CELL_REQUIRED):
            evaluation.far_tasks[name] = sorted(cells, key=lambda cell: (cell["length"], cell["depth"]))
        else:
            evaluation.unreadable += 1
    return evaluation


def _positions(
    evaluation: ModelEvaluation,
    result: Mapping[str, Any],
    checks: Mapping[str, records.Check],
    required: tuple[str, ...],
) -> dict[str, Any] | None:
    """A result with figures by position; None, and counted, if a required figure is missing."""
    values, damaged = records.fields(result, checks, required=required)
    evaluation.unreadable += int(damaged)
    if values is not None:
        of_rows = {**_POSITION, **_COMPARED} if checks is _AGREEMENT else _POSITION
        wanted = _COMPARED_REQUIRED if checks is _AGREEMENT else ("loss",)
        values["by_position"] = _rows(values.get("by_position"), of_rows, ("begin", "end", *wanted))
    return values


def _checked(step: int | None, path: Path) -> ModelEvaluation:
    content, damaged = records.read_section(path)
    if damaged or content is None or content.get("format") != _FORMAT:
        return ModelEvaluation(step, unreadable=1)
    results = records.section(content.get("results")) or {}
    return checked_results(step, results, records.text(content.get("model")) or "")


def _rows(value: Any, checks: Mapping[str, records.Check], required: tuple[str, ...]) -> list[dict[str, Any]]:
    items = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    checked = (records.fields(item, checks, required)[0] for item in items)
    return [row for row in checked if row is not None]
