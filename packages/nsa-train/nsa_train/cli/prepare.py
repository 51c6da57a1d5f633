"""`nsa data prepare` and `nsa data bootstrap`: tokenize a corpus into token shards, with progress and a summary."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from nsa.errors import ConfigError
from nsa_train.cli.prepare_summary import print_summary
from nsa_train.cli.prepared_set import JsonOption
from nsa_train.cli.progress_line import ProgressLine

if TYPE_CHECKING:  # the data libraries take a second to import; `--help` must not
    from nsa_train.data.prepare import run as preparing
    from nsa_train.data.prepare.plan import PreparePlan
    from nsa_train.data.shards.manifest import ShardManifest

SourceOption = Annotated[
    str | None,
    typer.Option(help="Folder, glob pattern, URL or hub dataset id. Default: the 10 BT sample of FineWeb-Edu."),
]
TokenizerOption = Annotated[
    str, typer.Option(help="`byte` (UTF-8 bytes), or a tokenizers JSON file, or a folder with tokenizer.json.")
]
_WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, max=4096, help="Worker processes. Default: one per CPU core.", show_default=False),
]
_HeldOutOption = Annotated[
    float, typer.Option(help="Fraction of documents for the validation split, selected by a hash of the document id.")
]

_ENOUGH_HELD_OUT_TOKENS = 16 * 2048
"""Tokens of an evaluation with the default settings: train.eval_batches rows of train.seq_len tokens."""
_BAR_WIDTH = 20
_MORE_DOCUMENTS = "Prepare more documents (a text file is one: divide large ones)"


def prepare(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="Corpus: folder, file, glob pattern, URL, s3:// prefix or hub dataset id."),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Output folder or s3:// prefix.")],
    tokenizer: TokenizerOption = "byte",
    workers: _WorkersOption = None,
    held_out: _HeldOutOption = 0.0005,
    dedup: Annotated[
        bool,
        typer.Option("--dedup", help="Keep only the first of documents with exactly the same text; reads SRC twice."),
    ] = False,
    encoding: Annotated[
        str, typer.Option(help="Encoding of text files that are neither UTF-8 nor have a byte order mark.")
    ] = "cp1252",
    shard_tokens: Annotated[
        int, typer.Option(help="Tokens per shard; a shard ends at the first document end beyond it.")
    ] = 2**28,
    units_per_task: Annotated[
        int | None,
        typer.Option(
            help="Row groups, 4 MB blocks of JSONL, or text files per task. Default: 64 (1 if every JSONL file is one "
            "unit), and text files up to 16 MB."
        ),
    ] = None,
    text_column: Annotated[str, typer.Option(help="Column (or JSON key) of the text.")] = "text",
    id_column: Annotated[
        str, typer.Option(help="Column of the document id; `-`, or no column `id`, uses a hash of the text.")
    ] = "id",
    eos_token: Annotated[
        str | None, typer.Option(help="End-of-document token, if the tokenizer file does not define one.")
    ] = None,
    max_bad_units: Annotated[
        int, typer.Option(help="Corrupt units (row groups or JSONL blocks) to skip before failing.")
    ] = 0,
    as_json: JsonOption = False,
    slurm_partition: Annotated[
        str | None, typer.Option(help="Submit the tasks to this Slurm partition instead of running them here.")
    ] = None,
    slurm_time: Annotated[str, typer.Option(help="Time limit of each Slurm job, HH:MM:SS.")] = "08:00:00",
    slurm_log: Annotated[
        str | None, typer.Option(help="Slurm log folder, on a file system shared by all nodes.")
    ] = None,
    slurm_env: Annotated[
        str | None, typer.Option(help="Shell command that activates the Python environment on a Slurm node.")
    ] = None,
) -> None:
    """Tokenize a corpus into checksummed token shards. If interrupted, run the same command again to resume.

    Reads .txt, .md, .html, .jsonl (also .gz, .zst) and .parquet files, all kinds together, in subfolders too; hidden
    files are skipped. A text, Markdown or HTML file is one document, a JSONL line or parquet row is one. The summary
    says what was skipped and why. Exit codes: 0 done, 20 wrong option, 21 data missing or corrupt.

    Examples: `nsa data prepare my_texts data/mine --dedup --held-out 0.05`,
    `nsa data prepare HuggingFaceFW/fineweb-edu:sample-10BT data/fwe10 --tokenizer bpe.json --workers 16`
    """
    from nsa_train.data.document import DocumentColumns
    from nsa_train.data.prepare.plan import make_plan
    from nsa_train.data.prepare.run import prepare as run

    with ProgressLine(f"listing {source}"):
        plan = make_plan(
            source,
            tokenizer,
            columns=DocumentColumns(text_column, None if id_column == "-" else id_column),
            eos_token=eos_token,
            held_out_fraction=held_out,
            units_per_task=units_per_task,
            shard_tokens=shard_tokens,
            max_bad_units=max_bad_units,
            encoding=encoding,
            dedup=dedup,
            exclude=Path(out),
        )
    if slurm_partition is not None:
        _submit_to_slurm(
            plan, out, slurm_log, partition=slurm_partition, time_limit=slurm_time, workers=workers, env=slurm_env
        )
        return
    with _shown_progress() as update:
        manifest = run(plan, out, workers=workers or _cores(), on_progress=update)
    print_summary(out, source, as_json=as_json)
    _warn_about_small_held_out_split(manifest)


def bootstrap(
    out: Annotated[str, typer.Option(help="Output folder.")] = "data/fineweb_edu",
    gb: Annotated[float, typer.Option(help="Approximate size of the shards in gigabytes.")] = 5.0,
    source: SourceOption = None,
    tokenizer: TokenizerOption = "byte",
    workers: _WorkersOption = None,
    held_out: _HeldOutOption = 0.0005,
) -> None:
    """Download and tokenize the beginning of a source to local shards, for runs without network access.

    Example: `nsa data bootstrap --gb 5 --out data/fineweb_edu --tokenizer bpe.json`
    """
    from nsa_train.data.prepare.run import bootstrap as run
    from nsa_train.data.source.hub import FINEWEB_EDU

    with _shown_progress() as update:
        manifest = run(
            source or FINEWEB_EDU,
            out,
            gb=gb,
            tokenizer=tokenizer,
            workers=workers or _cores(),
            held_out_fraction=held_out,
            on_progress=update,
        )
    print_summary(out, source or FINEWEB_EDU, as_json=False)
    _warn_about_small_held_out_split(manifest)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def _shown_progress() -> Iterator[Callable[["preparing.PrepareProgress"], None]]:
    with ProgressLine("starting workers") as line:
        yield lambda progress: line.update(_progress_text(progress))


def _progress_text(progress: "preparing.PrepareProgress") -> str:
    """A bar with the share that is done, what was written so far, and the time left."""
    share = progress.units_done / max(1, progress.units)
    bar = "█" * round(share * _BAR_WIDTH)
    parts = [f"{progress.activity} {bar:░<{_BAR_WIDTH}} {share:4.0%}"]
    if progress.tokens:
        rate = progress.tokens / max(progress.elapsed_s, 1e-9)
        parts.append(f"{progress.tokens / 1e6:,.1f} M tokens · {rate / 1e3:,.0f} k/s")
    if progress.left_s is not None:
        minutes, seconds = divmod(round(progress.left_s), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return " · ".join(parts)


def _submit_to_slurm(
    plan: "PreparePlan",
    out: str,
    log_folder: str | None,
    *,
    partition: str,
    time_limit: str,
    workers: int | None,
    env: str | None,
) -> None:
    from nsa_train.data.prepare.run import slurm_executor

    if log_folder is None:
        raise ConfigError(
            "--slurm-partition needs --slurm-log: the jobs read their plan from a folder shared by all nodes."
        )
    slurm_executor(
        plan,
        out,
        logging_dir=log_folder,
        partition=partition,
        time_limit=time_limit,
        workers=workers or -1,
        env_command=env,
    ).run()


def _warn_about_small_held_out_split(manifest: "ShardManifest") -> None:
    """Warn here about a split too small to evaluate on, not at the first evaluation of a run."""
    from nsa_train.data.shards.manifest import TRAIN, VALIDATION

    held_out, trained = manifest.totals(VALIDATION), manifest.totals(TRAIN)
    if held_out["tokens"] >= _ENOUGH_HELD_OUT_TOKENS:
        return
    tokens, documents = (held_out[of] + trained[of] for of in ("tokens", "documents"))
    share = max(2 * _ENOUGH_HELD_OUT_TOKENS / max(1, tokens), 10 / max(1, documents))
    advice = f"Prepare into another folder with --held-out {share:.2g}" if share < 0.5 else _MORE_DOCUMENTS
    Console(stderr=True, soft_wrap=True).print(
        f"WARNING: the held-out split has {held_out['documents']} documents, {held_out['tokens']:,} tokens: too few "
        f"for an evaluation, which needs at least one batch of rows. {advice}, or train with train.eval_every=0.",
        highlight=False,
        markup=False,
    )
