"""Runs the evaluations that `nsa eval` was asked for on a loaded model; returns results by task, as JSON values.

With a reference model (`--against`), its figures are beside the model's own.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nsa.errors import ConfigError, DataError, NSAError
from nsa_train import names
from nsa_train.data.rows.specs import RowData, SyntheticData
from nsa_train.infer.evaluation.far_evaluation import FarCell, TransformersScorer, evaluate_far_task
from nsa_train.infer.evaluation.far_tasks import (
    FAR_TASKS,
    MOST_CHARACTERS,
    HayText,
    built_in_hay,
    hay_of_file,
    hay_of_texts,
)
from nsa_train.infer.evaluation.held_out import (
    AgreementSums,
    agreement_record,
    agreement_with,
    bytes_per_token,
    held_out_data,
    held_out_record,
    model_token_scores,
    require_same_vocabulary,
    rows_of,
)
from nsa_train.infer.evaluation.layer_harm import harmful_layers, layers_record, passes_over_rows
from nsa_train.infer.evaluation.selection import selection_by_layer, selection_record
from nsa_train.infer.load_model import LoadedModel, ModelSource
from nsa_train.record.evaluations import (
    AGREEMENT,
    COMPARISONS,
    HELD_OUT,
    LAYERS,
    SELECTION,
    TASKS,
    evaluation_file,
    require_tasks,
)
from nsa_train.record.record_files import read_rows
from nsa_train.train.held_out_loss import held_out_loss

_ON_ROWS = {HELD_OUT, SELECTION, *COMPARISONS}
_SELECTION_ROWS = 32
"""Most rows of the task: dense attention is computed beside the model's own."""
_SHORTEST = 1024
"""Default length of far tasks for models that were trained on shorter rows: all tasks fit."""
_BUILT_IN_HAY = "built-in"

_Progress = Callable[[str, int, int | None], None]
"""Callback with the task, how much of it is done, and of how much; None if that is not known."""


@dataclass(frozen=True)
class EvaluationRequest:
    """Tasks to evaluate and their options. None: a default that depends on the model."""

    tasks: Sequence[str] | None = None
    """Tasks to run; None: all that the model's source allows."""
    lengths: Sequence[int] | None = None
    """Tokens of far tasks, the answer included; default the length of the rows in training."""
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Share of the hay that comes before the answer."""
    limit: int = 20
    """Examples for every length and depth."""
    rows: int | None = 256
    """Rows of held-out data; None: all."""
    layer_rows: int = 4
    """Rows for the task `layers`, which reads each twice for every sparse layer."""
    seed: int = 0
    data: str | None = None
    """Held-out data; default that of the run."""
    seq_len: int | None = None
    """Row length of held-out data; default as in training."""
    hay: str | None = None
    """Text of far tasks: a file, or `built-in`; default the held-out documents if they are text."""

    def __post_init__(self) -> None:
        require_tasks(self.tasks or (), compared=True)
        if any(not 0 <= depth <= 1 for depth in self.depths) or not self.depths:
            raise ConfigError("--depths takes percentages from 0 to 100, e.g. 0,50,100.")
        if any(length < 1 for length in self.lengths or ()) or self.limit < 1 or self.layer_rows < 1:
            raise ConfigError("--lengths, --limit and --layer-rows must be 1 or more.")

    def with_reference(self, has_reference: bool) -> Sequence[str]:
        """The tasks to run; raises if one needs a reference model that was not given."""
        require_tasks(self.tasks or (), compared=has_reference)
        return self.tasks or [task for task in TASKS if has_reference or task not in COMPARISONS]


def evaluate_model(
    loaded: LoadedModel,
    request: EvaluationRequest,
    *,
    reference: LoadedModel | None = None,
    progress: _Progress = lambda task, done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Results by task. `reference`: the model to compare with. `note` is called with what was left out, and why."""
    tasks = request.with_reference(reference is not None)
    if reference is not None:
        require_same_vocabulary(loaded.model, reference.model)
    data = _find_data(loaded, request, note)
    results: dict[str, dict[str, Any]] = {}
    if data is not None:
        results |= _RowTasks(loaded, reference, data, request, progress, note).results(tasks)
    far = [task for task in tasks if task in FAR_TASKS]
    if far and loaded.text_tokenizer is None and not request.tasks:
        note("far tasks left out: the model was saved without a tokenizer, and they are text")
        far = []
    if far:
        results |= _far_tasks(loaded, reference, far, data, request, progress)
    return {task: results[task] for task in TASKS if task in results}


def _far_tasks(
    loaded: LoadedModel,
    reference: LoadedModel | None,
    far: Sequence[str],
    data: RowData | None,
    request: EvaluationRequest,
    progress: _Progress,
) -> dict[str, dict[str, Any]]:
    hay = _find_hay(loaded, data, request)
    lengths = request.lengths or (max(_SHORTEST, loaded.trained_length),)
    models = [loaded] if reference is None else [loaded, reference]
    total = len(lengths) * len(request.depths) * request.limit * len(models)
    results = {}
    for task in far:
        after_example = _TaskProgress(progress, task, total)
        scorers = [TransformersScorer(each.model) for each in models]
        own, *others = (
            evaluate_far_task(
                task,
                scorer,
                lambda text: loaded.encode([text])[0],
                hay,
                lengths=lengths,
                depths=request.depths,
                limit=request.limit,
                seed=request.seed,
                l_sel=each.model.config.l_sel,
                selected_by_layer=lambda scorer=scorer: scorer.selected_by_layer,  # type: ignore[misc]
                after_example=after_example,
            )
            for each, scorer in zip(models, scorers, strict=True)
        )
        cells = [cell.as_record() for cell in own]
        if reference is not None:
            for cell, other in zip(cells, others[0], strict=True):
                cell |= _against_cell(other, _name(reference))
        settings = {"hay": hay.name, "seed": request.seed, "examples": request.limit}
        results[task] = {"settings": settings, "cells": cells}
    return results


def _against_cell(cell: FarCell, name: str) -> dict[str, Any]:
    """Outcomes of the reference at the same examples."""
    record = cell.as_record()
    keys = ("accuracy", "accuracy_interval", "exact_match", "exact_match_interval", "answer_nats")
    return {"against": name} | {f"against_{key}": record[key] for key in keys}


@dataclass(frozen=True)
class _RowTasks:
    """Tasks on held-out rows: those of one model, and with a reference those that compare the two."""

    loaded: LoadedModel
    reference: LoadedModel | None
    data: RowData
    request: EvaluationRequest
    progress: _Progress
    note: Callable[[str], None]

    def results(self, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        results: dict[str, dict[str, Any]] = {}
        if self.reference is not None and {HELD_OUT, AGREEMENT} & {*tasks}:
            sums = self._agreement(self.reference)
            other = {"model": _name(self.reference), **held_out_record(sums.reference, self.data)}
            results[HELD_OUT] = held_out_record(sums.own, self.data) | {"against": other}
            results[AGREEMENT] = agreement_record(sums, str(self.data), self.data.seq_len, _name(self.reference))
        elif HELD_OUT in tasks:
            results[HELD_OUT] = self._held_out()
        if self.reference is not None and LAYERS in tasks:
            try:
                results[LAYERS] = self._layers(self.reference)
            except ConfigError as error:
                if LAYERS in (self.request.tasks or ()):
                    raise
                self.note(f"harm of single layers left out: {error}")
        if SELECTION in tasks:
            results[SELECTION] = self._selection(self.loaded)
            if self.reference is not None and (other := self._selection(self.reference))["layers"]:
                results[SELECTION] |= {"against": {"model": _name(self.reference), **other}}
        return {task: result for task, result in results.items() if task in tasks}

    def _held_out(self) -> dict[str, Any]:
        rows = self.request.rows
        sums = held_out_loss(
            rows_of(self.data, rows),
            model_token_scores(self.loaded.model),
            bytes_per_token_V=self._bytes_per_token(),
            after_batch=_TaskProgress(self.progress, HELD_OUT, rows),
        )
        self._require_rows(sums.rows)
        if self.request.data is None and self.request.seq_len is None:
            self._compare_with_training(int(sums.tokens))
        return held_out_record(sums, self.data)

    def _compare_with_training(self, tokens: int) -> None:
        """Note the loss that the run itself reported at this step, which is over other rows unless as many are read."""
        path = self.loaded.source.path
        with suppress(KeyError, ValueError):  # a damaged row
            for row in read_rows(path.parent.parent / names.VAL_CSV)[0]:
                if row["step"] == str(names.step_of(path.name)):
                    self.note(_of_training(float(row["val_loss"]), int(row["tokens"]), tokens))

    def _agreement(self, reference: LoadedModel) -> AgreementSums:
        """Held-out loss of both models and their agreement, in one pass."""
        sums = agreement_with(
            self.loaded.model,
            reference.model,
            rows_of(self.data, self.request.rows),
            bytes_per_token_V=self._bytes_per_token(),
            after_batch=_TaskProgress(self.progress, AGREEMENT, self.request.rows),
        )
        self._require_rows(sums.own.rows)
        return sums

    def _layers(self, reference: LoadedModel) -> dict[str, Any]:
        rows = list(rows_of(self.data, self._at_most(self.request.layer_rows)))
        self._require_rows(len(rows))
        after_pass = _TaskProgress(self.progress, LAYERS, passes_over_rows(self.loaded.model, reference.model))
        harm = harmful_layers(self.loaded.model, reference.model, rows, after_pass)
        return layers_record(harm, str(self.data), self.data.seq_len, len(rows), _name(reference))

    def _selection(self, loaded: LoadedModel) -> dict[str, Any]:
        data, most = self.data, self._at_most(_SELECTION_ROWS)
        after_row = _TaskProgress(self.progress, SELECTION, most)
        places = {"answer_places": data.make_rows().answer_places} if isinstance(data, SyntheticData) else {}
        figures = selection_by_layer(loaded.model, rows_of(data, most), after_row, **places)
        return selection_record(figures, str(data), data.seq_len, after_row.done)

    def _at_most(self, rows: int) -> int:
        return rows if self.request.rows is None else min(self.request.rows, rows)

    def _require_rows(self, rows: int) -> None:
        if not rows:
            raise DataError(
                f"{self.data} holds no row of {self.data.seq_len} tokens. Give other data with --data, or set "
                f"--seq-len."
            )

    def _bytes_per_token(self) -> Tensor | None:
        if self.loaded.text_tokenizer is None or isinstance(self.data, SyntheticData):
            return None
        return bytes_per_token(self.loaded.text_tokenizer, self.loaded.model.config.vocab_size)


def _name(loaded: LoadedModel) -> str:
    return loaded.source.path.name


def results_file(source: ModelSource, *, here: bool = False) -> Path:
    """Default file for the results of a model: in its run folder, or beside an exported folder, which holds a model and
    nothing else: the next export replaces it. With `here` in the current folder, for the model of the package."""
    path = source.path
    if names.step_of(path.name) is not None:
        run = path.parent.parent if path.parent.name == names.CHECKPOINTS else path.parent
        return evaluation_file(run, source.step)
    apart = f"{path.name}_{names.EVALUATIONS}"
    beside = path.with_name(apart) if path.is_dir() else path.parent / names.EVALUATIONS
    return (Path(apart) if here else beside) / names.evaluation(source.step)


class _TaskProgress:
    def __init__(self, progress: _Progress, task: str, total: int | None) -> None:
        self._progress, self._task, self._total, self.done = progress, task, total, 0

    def __call__(self) -> None:
        self.done += 1
        self._progress(self._task, self.done, self._total)


def _of_training(loss: float, tokens: int, tokens_here: int) -> str:
    text = f"training reported a held-out loss of {loss:.3f} nats per token at this step"
    if tokens == tokens_here:
        return f"{text}, over as many tokens"
    return (
        f"{text}, over {tokens:,} tokens of the split; this one is over {tokens_here:,} (--rows; training reads "
        "train.eval_batches times train.batch_size rows)"
    )


def _find_data(loaded: LoadedModel, request: EvaluationRequest, note: Callable[[str], None]) -> RowData | None:
    """The held-out data; None, with a note, if there is none and it was not requested."""
    try:
        return held_out_data(loaded, request.data, request.seq_len)
    except NSAError as error:
        if request.data is not None or _ON_ROWS & set(request.tasks or ()):
            raise
        note(f"tasks on held-out rows left out: {error}")
        return None


def _find_hay(loaded: LoadedModel, data: RowData | None, request: EvaluationRequest) -> HayText:
    if request.hay == _BUILT_IN_HAY or (request.hay is None and (data is None or isinstance(data, SyntheticData))):
        return built_in_hay()
    if request.hay is not None:
        return hay_of_file(Path(request.hay))
    assert data is not None
    most = -(-MOST_CHARACTERS // 8 // data.seq_len)  # enough for any example, and read in seconds
    rows = rows_of(data, most)
    return hay_of_texts(
        str(data), (loaded.tokenizer.decode(batch.tokens[0], skip_special_tokens=True) for batch in rows)
    )
