"""`nsa eval`: held-out loss by position, far tasks and lm-evaluation-harness on a trained model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa.errors import ConfigError
from nsa.token_counts import parse_count, parse_lengths
from nsa_train.cli.early_checks import MODEL_PACKAGES, find_model, require_packages
from nsa_train.cli.model_options import DEVICE, DTYPE, KEY, MODEL, PRETRAINED, TOKENIZER, open_model, open_reference
from nsa_train.cli.outputs import print_error, print_json, print_line, require_writable_file
from nsa_train.record.evaluations import merge_results, require_mergeable, require_tasks

if TYPE_CHECKING:
    from nsa_train.infer.evaluation.run import EvaluationRequest
    from nsa_train.infer.load_model import LoadedModel

_TASKS_HELP = (
    "held_out_loss, selection, needle, needle_multikey, variable_tracking, associative_recall; with --against also "
    "agreement and layers (default: all)."
)
_AGAINST_HELP = "Compare with this model: the dense folder that was converted, or anything that MODEL may be."
_LENGTHS_HELP = "Tokens of far tasks (default: the training length, at least 1k)."
_HAY_HELP = "Text around far tasks: a file, or built-in (default: the held-out documents)."
_LM_EVAL_HELP = "Tasks of lm-evaluation-harness instead; more options are passed to it."
_OUT_HELP = (
    "Results file (default: RUN/evaluations/stepN.json, EXPORTED_evaluations/stepN.json, or for --pretrained "
    "./pretrained_evaluations/)."
)
_WIDEST = 1000
HARNESS_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def evaluate(
    context: typer.Context,
    model: Path = MODEL,
    pretrained: bool = PRETRAINED,
    tasks: str = typer.Option(None, "--tasks", metavar="A,B", help=_TASKS_HELP),
    lengths: str = typer.Option(None, "--lengths", metavar="1k,4k", help=_LENGTHS_HELP),
    depths: str = typer.Option("0,25,50,75,100", "--depths", metavar="0,50,100", help="Where the answer lies, in %."),
    limit: int = typer.Option(None, "--limit", min=1, help="Examples for every length and depth (default 20)."),
    rows: int = typer.Option(256, "--rows", min=0, help="Rows for the held-out loss; 0: all there are."),
    against: Path = typer.Option(None, "--against", metavar="DENSE", callback=find_model, help=_AGAINST_HELP),
    layer_rows: int = typer.Option(4, "--layer-rows", min=1, help="Rows for the task layers."),
    seed: int = typer.Option(0, "--seed", min=0, help="Random seed of far tasks."),
    data: str = typer.Option(None, "--data", help="Held-out data (default: the run's own): a prepared set, or files."),
    seq_len: str = typer.Option(None, "--seq-len", metavar="4k", help="Row length of held-out data."),
    hay: str = typer.Option(None, "--hay", help=_HAY_HELP),
    lm_eval: str = typer.Option(None, "--lm-eval", metavar="TASKS", help=_LM_EVAL_HELP),
    out: Path = typer.Option(None, "--out", help=_OUT_HELP),
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON and nothing else on stdout."),
    device: str = DEVICE,
    dtype: str = DTYPE,
    tokenizer: str = TOKENIZER,
    key_file: Path = KEY,
) -> None:
    """Evaluate a trained model: held-out loss by position, far tasks, or tasks of lm-evaluation-harness.

    With --against DENSE it evaluates another model too, and reports how far the two agree and which sparse layers cause
    the difference.

    Accuracy of a far task: how often the right answer is more likely than the other candidates; chance is printed
    beside it. Exact match: how often greedy decoding gives it. Results are added to a JSON file beside the checkpoint,
    which `nsa report` shows.

    **Examples:**

    `nsa eval artifacts/run`

    `nsa eval artifacts/run --tasks needle,variable_tracking --lengths 4k,16k --depths 0,50,100 --limit 50`

    `nsa eval artifacts/run/checkpoints/step2000 --tasks held_out_loss --rows 0 --json`

    `nsa eval sparse --against dense --data set --seq-len 8k --rows 32`

    `nsa eval exported --lm-eval niah_single_1,ruler_fwe --metadata '{"max_seq_lengths":[4096]}' --limit 20`
    """
    if context.args and lm_eval is None:
        raise ConfigError(f"unknown option {context.args[0]}. Options of the harness need --lm-eval TASKS.")
    if lm_eval is not None and against is not None:
        raise ConfigError("--against and --lm-eval were given: the harness scores one model. Leave one of them out.")
    require_tasks(_words(tasks) or (), compared=against is not None)
    require_packages(*MODEL_PACKAGES, *(["lm_eval"] if lm_eval is not None else []))
    if lm_eval is not None:
        from nsa_train.infer.evaluation.lm_eval import evaluate_with_harness
    from nsa_train.infer.evaluation.run import EvaluationRequest, results_file

    request = EvaluationRequest(
        tasks=_words(tasks),
        lengths=None if lengths is None else parse_lengths(lengths),
        depths=[_percent(word) for word in _words(depths) or ()],
        limit=limit or EvaluationRequest.limit,
        rows=rows or None,
        layer_rows=layer_rows,
        seed=seed,
        data=data,
        seq_len=None if seq_len is None else parse_count(seq_len, "--seq-len"),
        hay=hay,
    )
    loaded = open_model(
        model, device=device, dtype=dtype, tokenizer=tokenizer, key_file=key_file, needs_text=lm_eval is not None
    )
    reference = None if against is None else open_reference(against, loaded, key_file=key_file)
    path = out or results_file(loaded.source, here=pretrained)
    require_writable_file(path)
    require_mergeable(path)
    if lm_eval is None:
        results = _run(loaded, request, reference)
    else:
        words = [*context.args, *(["--limit", str(limit)] if limit else [])]
        results = evaluate_with_harness(loaded, lm_eval, words)
    merge_results(path, step=loaded.source.step, model=loaded.source.path.name, results=results)
    if as_json:
        print_json(results)
    else:
        _show(results)
        print_line(f"wrote {path}")
    _write_picture(results, path, as_json)


def _run(
    loaded: "LoadedModel", request: "EvaluationRequest", reference: "LoadedModel | None"
) -> dict[str, dict[str, Any]]:
    """Evaluate with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from nsa_train.infer.evaluation.run import evaluate_model

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        shown: dict[str, Any] = {}

        def progress(task: str, done: int, total: int | None) -> None:
            if task not in shown:
                shown[task] = bar.add_task(task, total=total)
            bar.update(shown[task], completed=done)

        return evaluate_model(
            loaded,
            request,
            reference=reference,
            progress=progress,
            note=lambda text: print_error(f"note: {text}"),
        )


def _write_picture(results: dict[str, dict[str, Any]], path: Path, as_json: bool) -> None:
    """Bars by layer, beside the results file."""
    from nsa.files import write_atomic
    from nsa_train.record.evaluations import LAYERS, checked_results
    from nsa_train.watch.view.layer_chart import layer_svg

    layers = checked_results(None, results).layers
    if layers is not None:
        picture = path.with_name(f"{path.stem}_{LAYERS}.svg")
        write_atomic(picture, layer_svg(layers))
        if not as_json:
            print_line(f"wrote {picture}")


def _show(results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    from nsa_train.record.evaluations import checked_results
    from nsa_train.watch.view.evaluation_tables import result_tables
    from nsa_train.watch.view.layer_chart import layer_advice, layer_bars

    console = Console(highlight=False, markup=False)
    width = console.width
    checked = checked_results(None, results)
    for title, heads, numbers, table_rows in result_tables([checked]):
        table = Table(
            title=title, box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0), title_justify="left"
        )
        for place, head in enumerate(heads):
            table.add_column(head, justify="right" if place in numbers else "left", no_wrap=True)
        for row in table_rows:
            table.add_row(*map(Text, row[1:]))
        # No cell is cut on a narrow terminal: lines that are too long wrap there.
        console.width = max(width, Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum)
        console.print(table)
        console.print()
    console.width = width
    if checked.layers is not None:
        for line in layer_bars(checked.layers, width):
            console.print(line, no_wrap=True, overflow="crop")
        console.print(layer_advice(checked.layers), soft_wrap=True)
        console.print()


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word for word in text.replace(",", " ").split() if word]


def _percent(word: str) -> float:
    try:
        return float(word.removesuffix("%")) / 100
    except ValueError:
        raise ConfigError(f"{word!r} is not a depth. Write percentages, e.g. 0,50,100.") from None
