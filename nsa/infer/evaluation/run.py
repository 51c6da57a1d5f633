"""Runs the evaluations that `nsa eval` was asked for on a loaded model; returns results by task, as JSON values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nsa import names
from nsa.data.rows.specs import RowData, SyntheticData
from nsa.errors import ConfigError, DataError, NSAError
from nsa.infer.evaluation.far_evaluation import evaluate_far_task
from nsa.infer.evaluation.far_tasks import FAR_TASKS
from nsa.infer.evaluation.hay import MOST_CHARACTERS, HayText, built_in_hay, hay_of_file, hay_of_texts
from nsa.infer.evaluation.held_out import (
    bytes_per_token,
    held_out_data,
    held_out_record,
    model_token_scores,
    rows_of,
)
from nsa.infer.evaluation.score_answers import TransformersScorer
from nsa.infer.evaluation.selection import selection_by_layer, selection_record
from nsa.infer.load_model import LoadedModel, ModelSource
from nsa.model.held_out_loss import held_out_loss
from nsa.observe.evaluations import HELD_OUT, SELECTION

TASKS = (HELD_OUT, SELECTION, *FAR_TASKS)
SELECTION_ROWS = 32
"""At most: dense attention is computed beside the model's own."""
SHORTEST = 1024
"""Default length of far tasks for models that were trained on shorter rows: all tasks fit."""
BUILT_IN_HAY = "built-in"

Progress = Callable[[str, int, int | None], None]
"""Called with the task, how much of it is done, and of how much; None if that is not known."""


@dataclass(frozen=True)
class EvaluationRequest:
    """What to evaluate. None: a default that depends on the model."""

    tasks: Sequence[str] | None = None
    """None: all that the model's source allows."""
    lengths: Sequence[int] | None = None
    """Tokens of far tasks, the answer included; default the length of the rows in training."""
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Share of the hay that comes before the answer."""
    limit: int = 20
    """Examples for every length and depth."""
    rows: int | None = 256
    """Rows of held-out data; None: all."""
    seed: int = 0
    data: str | None = None
    """Held-out data; default that of the run."""
    seq_len: int | None = None
    """Row length of held-out data; default as in training."""
    hay: str | None = None
    """Text of far tasks: a file, or `built-in`; default the held-out documents if they are text."""

    def __post_init__(self) -> None:
        unknown = [task for task in self.tasks or () if task not in TASKS]
        if unknown:
            raise ConfigError(f"unknown task {unknown[0]!r}. The tasks are {', '.join(TASKS)}.")
        if any(not 0 <= depth <= 1 for depth in self.depths) or not self.depths:
            raise ConfigError("--depths takes percentages from 0 to 100, e.g. 0,50,100.")
        if any(length < 1 for length in self.lengths or ()) or self.limit < 1:
            raise ConfigError("--lengths and --limit must be 1 or more.")


def evaluate_model(
    loaded: LoadedModel,
    request: EvaluationRequest,
    *,
    progress: Progress = lambda task, done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Results by task. `note` is called with what was left out, and why."""
    results: dict[str, dict[str, Any]] = {}
    data = _find_data(loaded, request, note)
    tasks = request.tasks or TASKS
    if HELD_OUT in tasks and data is not None:
        results[HELD_OUT] = _held_out(loaded, data, request.rows, progress)
    if SELECTION in tasks and data is not None:
        results[SELECTION] = _selection(loaded, data, request.rows, progress)
    far = [task for task in tasks if task in FAR_TASKS]
    if far and loaded.text_tokenizer is None and not request.tasks:
        note("far tasks left out: the model was saved without a tokenizer, and they are text")
        far = []
    if not far:
        return results
    hay = _find_hay(loaded, data, request)
    lengths = request.lengths or (max(SHORTEST, loaded.trained_length),)
    scorer = TransformersScorer(loaded.model)
    total = len(lengths) * len(request.depths) * request.limit
    for task in far:
        cells = evaluate_far_task(
            task,
            scorer,
            lambda text: loaded.encode([text])[0],
            hay,
            lengths=lengths,
            depths=request.depths,
            limit=request.limit,
            seed=request.seed,
            l_sel=loaded.model.config.l_sel,
            chosen_by_layer=lambda: scorer.chosen_by_layer,
            after_example=_TaskProgress(progress, task, total),
        )
        settings = {"hay": hay.name, "seed": request.seed, "examples": request.limit}
        results[task] = {"settings": settings, "cells": [cell.as_record() for cell in cells]}
    return results


def results_folder(source: ModelSource) -> Path:
    """Where results of a model belong: its run folder, or the exported folder itself."""
    path = source.path
    if names.step_of(path.name) is not None:
        return path.parent.parent if path.parent.name == names.CHECKPOINTS else path.parent
    return path if path.is_dir() else path.parent


class _TaskProgress:
    def __init__(self, progress: Progress, task: str, total: int | None) -> None:
        self._progress, self._task, self._total, self.done = progress, task, total, 0

    def __call__(self) -> None:
        self.done += 1
        self._progress(self._task, self.done, self._total)


def _held_out(loaded: LoadedModel, data: RowData, rows: int | None, progress: Progress) -> dict[str, Any]:
    sums = held_out_loss(
        rows_of(data, rows),
        model_token_scores(loaded.model),
        bytes_per_token_V=_bytes_per_token(loaded, data),
        after_batch=_TaskProgress(progress, HELD_OUT, rows),
    )
    if not sums.rows:
        raise DataError(f"{data} holds no row of {data.seq_len} tokens. Give other data with --data, or set --seq-len.")
    return held_out_record(sums, data)


def _bytes_per_token(loaded: LoadedModel, data: RowData) -> Tensor | None:
    if loaded.text_tokenizer is None or isinstance(data, SyntheticData):
        return None
    return bytes_per_token(loaded.text_tokenizer, loaded.model.config.vocab_size)


def _selection(loaded: LoadedModel, data: RowData, rows: int | None, progress: Progress) -> dict[str, Any]:
    most = SELECTION_ROWS if rows is None else min(rows, SELECTION_ROWS)
    after_row = _TaskProgress(progress, SELECTION, most)
    places = {"answer_places": data.make_rows().answer_places} if isinstance(data, SyntheticData) else {}
    found = selection_by_layer(loaded.model, rows_of(data, most), after_row, **places)
    return selection_record(found, str(data), data.seq_len, after_row.done)


def _find_data(loaded: LoadedModel, request: EvaluationRequest, note: Callable[[str], None]) -> RowData | None:
    """The held-out data; None, with a note, if there is none and nobody asked for it."""
    try:
        return held_out_data(loaded, request.data, request.seq_len)
    except NSAError as error:
        if request.data is not None or {HELD_OUT, SELECTION} & set(request.tasks or ()):
            raise
        note(f"held-out loss and selection left out: {error}")
        return None


def _find_hay(loaded: LoadedModel, data: RowData | None, request: EvaluationRequest) -> HayText:
    if request.hay == BUILT_IN_HAY or (request.hay is None and (data is None or isinstance(data, SyntheticData))):
        return built_in_hay()
    if request.hay is not None:
        return hay_of_file(Path(request.hay))
    assert data is not None
    most = -(-MOST_CHARACTERS // 8 // data.seq_len)  # enough for any example, and read in seconds
    rows = rows_of(data, most)
    return hay_of_texts(
        str(data), (loaded.tokenizer.decode(batch.tokens[0], skip_special_tokens=True) for batch in rows)
    )
