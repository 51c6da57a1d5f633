"""Results of `nsa eval`: written to RUN/evaluations/step{N}.json, read by the report and the model card.

One file per checkpoint. Results of later evaluations are merged into it: a far task's lengths and depths add up if it
was run with the same settings, any other result replaces the one of the same name.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa import __version__
from nsa.errors import ConfigError, OutputError
from nsa.files import file_lock, write_atomic
from nsa_train import names
from nsa_train.record import record_files, value_checks

_FORMAT = 1
HELD_OUT = "held_out_loss"
SELECTION = "selection"
AGREEMENT = "agreement"
LAYERS = "layers"
COMPARISONS = (AGREEMENT, LAYERS)
"""Tasks that need a model to compare with."""
FAR = ("needle", "needle_multikey", "variable_tracking", "associative_recall")
TASKS = (HELD_OUT, SELECTION, *COMPARISONS, *FAR)
"""Tasks of `nsa eval`, in the order of their results."""
LM_EVAL = "lm_eval/"
"""Results of lm-evaluation-harness are named by this and the task."""

_CHECKS: Mapping[str, value_checks.Check] = {
    **dict.fromkeys(("data", "kind", "model"), value_checks.text),
    **dict.fromkeys(
        ("begin", "end", "examples", "layer", "length", "queries", "questions", "rows", "seq_len",
         "tokens"),
        value_checks.whole,
    ),
    **dict.fromkeys(
        ("against_loss", "answer_nats", "bits_per_byte", "difference", "gain", "loss", "removed", "standard_error"),
        value_checks.number,
    ),
    **dict.fromkeys(
        ("accuracy", "accuracy_if_hit", "accuracy_if_missed", "against_accuracy", "against_exact_match", "chance",
         "depth", "difference_standard_error", "divergence", "divergence_standard_error", "exact_match", "fact_hit",
         "forced_mass", "harm", "harm_standard_error", "hit_rate", "mass_caught", "needle_hit", "same_top",
         "scored_mass", "window_mass"),
        value_checks.amount,
    ),
    **dict.fromkeys(
        ("accuracy_interval", "against_accuracy_interval", "exact_match_interval", "needle_hit_by_layer"),
        value_checks.numbers,
    ),
    **dict.fromkeys(("advised", "keep_dense"), value_checks.wholes),
    **dict.fromkeys(("by_position", "layers"), value_checks.anything),
}  # fmt: skip
"""Checks of the values of all results: a name means the same in each."""
_COMPARED = ("tokens", "loss", "against_loss", "difference", "same_top", "divergence")
_LAYER = ("layer", "hit_rate", "mass_caught")


def require_tasks(tasks: Sequence[str], *, compared: bool) -> None:
    """Raise if a task is unknown, or compares two models and one is given (not `compared`)."""
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ConfigError(
            f"unknown task {unknown[0]!r}. The tasks are {', '.join(TASKS)}. Those of lm-evaluation-harness, such as "
            "hellaswag, have an option of their own: --lm-eval TASKS."
        )
    if not compared and (lonely := [task for task in tasks if task in COMPARISONS]):
        raise ConfigError(
            f"task {lonely[0]} compares two models and one was given. Name the dense model with --against."
        )


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
    """All results below a run folder, oldest step first; reading raises nothing."""
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
    content, damaged = record_files.read_section(path)
    if damaged or (content is not None and content.get("format") != _FORMAT):
        raise OutputError(
            f"{path} is not a results file of this version, so results cannot be added to it. Move it away, or name "
            f"another file with --out."
        )
    return content or {}


def checked_results(step: int | None, results: Mapping[str, Any], model: str = "") -> ModelEvaluation:
    """Results as they are written to a file, with every value checked."""
    evaluation = ModelEvaluation(step, model)

    def figures(result: dict[str, Any], required: tuple[str, ...], rows: str, row_required: tuple[str, ...]) -> Any:
        """Check a result and its rows; None, and counted, if a required figure is missing."""
        values, damaged = value_checks.fields(result, _CHECKS, required)
        evaluation.unreadable += int(damaged)
        return None if values is None else {**values, rows: _rows(values.get(rows), row_required)}

    for name, value in results.items():
        result = value_checks.section(value) or {}
        if name == HELD_OUT:
            held_out = (("loss", "tokens"), "by_position", ("begin", "end", "loss"))
            evaluation.held_out = figures(result, *held_out)
            if (other := value_checks.section(result.get("against"))) is not None:
                evaluation.held_out_against = figures(other, *held_out)
        elif name == AGREEMENT:
            evaluation.agreement = figures(result, _COMPARED, "by_position", ("begin", "end", *_COMPARED))
        elif name == LAYERS:
            evaluation.layers = figures(result, ("divergence",), "layers", ("layer", "harm", "gain"))
        elif name == SELECTION:
            other = value_checks.section(result.get("against")) or {}
            facts = value_checks.section(result.get("facts")) or {}
            evaluation.selection = _rows(result.get("layers"), _LAYER)
            evaluation.selection_against = _rows(other.get("layers"), _LAYER)
            evaluation.facts = _rows(facts.get("layers"), ("layer", "questions", "fact_hit"))
            evaluation.facts += _rows([facts.get("any_layer")], ("questions", "fact_hit"))
        elif name.startswith(LM_EVAL):
            metrics = value_checks.section(result.get("metrics")) or {}
            checked = {metric: value_checks.number(value) for metric, value in metrics.items()}
            evaluation.lm_eval[name.removeprefix(LM_EVAL)] = {k: v for k, v in checked.items() if v is not None}
        elif cells := _rows(result.get("cells"), ("length", "depth", "examples", "accuracy", "exact_match")):
            evaluation.far_tasks[name] = sorted(cells, key=lambda cell: (cell["length"], cell["depth"]))
        else:
            evaluation.unreadable += 1
    return evaluation


def _checked(step: int | None, path: Path) -> ModelEvaluation:
    content, damaged = record_files.read_section(path)
    if damaged or content is None or content.get("format") != _FORMAT:
        return ModelEvaluation(step, unreadable=1)
    results = value_checks.section(content.get("results")) or {}
    return checked_results(step, results, value_checks.text(content.get("model")) or "")


def _rows(value: Any, required: tuple[str, ...]) -> list[dict[str, Any]]:
    items = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    checked = (value_checks.fields(item, _CHECKS, required)[0] for item in items)
    return [row for row in checked if row is not None]
