"""`nsa data`: build a demo corpus, train a tokenizer, prepare token shards, and check that a source can be read."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nsa.cli import prepared_set
from nsa.cli.outputs import print_line
from nsa.cli.prepared_set import print_totals
from nsa.errors import ConfigError

if TYPE_CHECKING:  # the data libraries take a second to import; `--help` must not
    from nsa.data.prepare import run as preparing
    from nsa.data.prepare.plan import PreparePlan
    from nsa.data.shards.manifest import ShardManifest

data_app = typer.Typer(
    help="Build a corpus, train a tokenizer, prepare token shards, and check training data.", no_args_is_help=True
)
tokenizer_app = typer.Typer(help="Train tokenizers.", no_args_is_help=True)
data_app.add_typer(tokenizer_app, name="tokenizer")

SourceOption = Annotated[
    str | None,
    typer.Option(help="Folder, glob pattern, URL or hub dataset id. Default: the 10 BT sample of FineWeb-Edu."),
]
TokenizerOption = Annotated[
    str, typer.Option(help="`byte` (UTF-8 bytes), or a tokenizers JSON file, or a folder with tokenizer.json.")
]
WorkersOption = Annotated[
    int | None, typer.Option(help="Worker processes. Default: one per CPU core.", show_default=False)
]
HeldOutOption = Annotated[
    float, typer.Option(help="Fraction of documents for the validation split, selected by a hash of the document id.")
]


_ENOUGH_HELD_OUT_TOKENS = 16 * 2048
"""Tokens of an evaluation with the default settings: train.eval_batches rows of train.seq_len tokens."""


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def _progress_bar() -> Iterator[Callable[["preparing.PrepareProgress"], None]]:
    bar = Progress(
        TextColumn("{task.fields[tasks]} tasks"),
        BarColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with bar:
        shown = bar.add_task("prepare", total=None, tasks="-", tokens="0", rate="-")

        def update(progress: "preparing.PrepareProgress") -> None:
            rate = progress.tokens / max(progress.elapsed_s, 1e-9)
            bar.update(
                shown,
                total=progress.tasks,
                completed=progress.tasks_done,
                tasks=f"{progress.tasks_done}/{progress.tasks}",
                tokens=f"{progress.tokens:,}",
                rate=f"{rate:,.0f}",
            )

        yield update


@data_app.command()
def demo(
    folder: Path = typer.Argument(help="New or empty folder for the parquet files."),
    mb: float = typer.Option(0.0, min=0.0, help="Megabytes of text to write; 0 for everything available (about 110)."),
) -> None:
    """Download Debian documentation packages and write their English text as parquet in the format of FineWeb-Edu.

    Needs apt-get and dpkg; nothing is installed.

    Example: `nsa data demo data/demo --mb 20`
    """
    from nsa.data.demo import build_demo

    columns = (TextColumn("{task.description:<36}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, requested: int) -> None:
            bar.update(task, description=what, completed=done, total=requested or None)

        built = build_demo(folder, megabytes=mb, progress=show)
    for package in built.packages:
        print_line(
            f"{package['package']:24} {package['version']:24} {package['documents']:>6} documents "
            f"{int(package['text_bytes']) / 1e6:8.2f} MB  {package['licence']}"
        )
    print_line(f"{built.documents} documents, {built.text_bytes / 1e6:.2f} MB of text, {built.files} files in {folder}")


@tokenizer_app.command("train")
def train_tokenizer(
    source: str = typer.Argument(help="Corpus: folder, glob pattern, URL or hub dataset id."),
    path: Path = typer.Argument(help="Tokenizer JSON file to write."),
    vocab_size: int = typer.Option(32768, min=257, help="Vocabulary size, including the end-of-document token."),
    mb: float = typer.Option(100.0, min=0.0, help="Megabytes of text to train on, sampled from the whole corpus."),
    seed: int = typer.Option(0, help="Random seed of the sample."),
) -> None:
    """Train a byte-level BPE tokenizer on a corpus.

    Example: `nsa data tokenizer train data/demo data/bpe.json --vocab-size 8192`
    """
    from nsa.data.document_stream import sample_texts
    from nsa.data.source import open_source
    from nsa.data.tokenizer import train_bpe

    tokenizer = train_bpe(sample_texts(open_source(source), seed=seed, max_bytes=int(mb * 1e6)), vocab_size, path)
    print_line(f"{path}: {tokenizer.vocab_size} tokens, end-of-document token {tokenizer.eos_id}")
    print_line(f"fingerprint {tokenizer.fingerprint}")


@data_app.command()
def prepare(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Corpus: folder, glob pattern, URL, s3:// prefix or hub dataset id.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Output folder or s3:// prefix.")],
    tokenizer: TokenizerOption,
    workers: WorkersOption = None,
    held_out: HeldOutOption = 0.0005,
    shard_tokens: Annotated[
        int, typer.Option(help="Tokens per shard; a shard ends at the first document end beyond it.")
    ] = 2**28,
    units_per_task: Annotated[
        int | None,
        typer.Option(
            help="Row groups (or 4 MB blocks of JSONL) per task. Default: 64; 1 if every JSONL file is one unit."
        ),
    ] = None,
    text_column: Annotated[str, typer.Option(help="Column (or JSON key) of the text.")] = "text",
    id_column: Annotated[str, typer.Option(help="Column of the document id; `-` uses a hash of the text.")] = "id",
    eos_token: Annotated[
        str | None, typer.Option(help="End-of-document token, if the tokenizer file does not define one.")
    ] = None,
    max_bad_units: Annotated[
        int, typer.Option(help="Corrupt units (row groups or JSONL blocks) to skip before failing.")
    ] = 0,
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

    Example: `nsa data prepare HuggingFaceFW/fineweb-edu:sample-10BT data/fwe10 --tokenizer bpe.json --workers 16`
    """
    from nsa.data.document import DocumentColumns
    from nsa.data.prepare.plan import make_plan
    from nsa.data.prepare.run import prepare as run

    plan = make_plan(
        source,
        tokenizer,
        columns=DocumentColumns(text_column, None if id_column == "-" else id_column),
        eos_token=eos_token,
        held_out_fraction=held_out,
        units_per_task=units_per_task,
        shard_tokens=shard_tokens,
        max_bad_units=max_bad_units,
    )
    if slurm_partition is not None:
        _submit_to_slurm(
            plan, out, slurm_log, partition=slurm_partition, time_limit=slurm_time, workers=workers, env=slurm_env
        )
        return
    with _progress_bar() as update:
        manifest = run(plan, out, workers=workers or _cores(), on_progress=update)
    print_totals(out, manifest)
    _warn_about_small_held_out_split(manifest)


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
    from nsa.data.prepare.run import slurm_executor

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


data_app.command()(prepared_set.inspect)
data_app.command()(prepared_set.verify)
data_app.command()(prepared_set.stats)


@data_app.command()
def smoke(
    source: SourceOption = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per row.")] = 1024,
    batch: Annotated[int, typer.Option(help="Rows per batch.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each batch.")] = 60.0,
    tokenizer: TokenizerOption = "byte",
) -> None:
    """Check that a data source is reachable: read a few batches and print the time to the first one and tokens/s.

    Example: `nsa data smoke --seq-len 1024 --batch 1 --timeout 60 --tokenizer byte`
    """
    from nsa.data.prefetcher import smoke as run
    from nsa.data.source.hub import FINEWEB_EDU

    report = run(source or FINEWEB_EDU, tokenizer=tokenizer, seq_len=seq_len, batch=batch, timeout_s=timeout)
    Console().print(
        f"first batch after {report.first_batch_s:.1f} s; {report.batches} batches, {report.documents} documents, "
        f"{report.tokens:,} tokens, {report.tokens_per_s:,.0f} tokens/s"
    )


@data_app.command()
def bootstrap(
    out: Annotated[str, typer.Option(help="Output folder.")] = "data/fineweb_edu",
    gb: Annotated[float, typer.Option(help="Approximate size of the shards in gigabytes.")] = 5.0,
    source: SourceOption = None,
    tokenizer: TokenizerOption = "byte",
    workers: WorkersOption = None,
    held_out: HeldOutOption = 0.0005,
) -> None:
    """Download and tokenize the beginning of a source to local shards, for runs without network access.

    Example: `nsa data bootstrap --gb 5 --out data/fineweb_edu --tokenizer bpe.json`
    """
    from nsa.data.prepare.run import bootstrap as run
    from nsa.data.source.hub import FINEWEB_EDU

    with _progress_bar() as update:
        manifest = run(
            source or FINEWEB_EDU,
            out,
            gb=gb,
            tokenizer=tokenizer,
            workers=workers or _cores(),
            held_out_fraction=held_out,
            on_progress=update,
        )
    print_totals(out, manifest)
    _warn_about_small_held_out_split(manifest)


def _warn_about_small_held_out_split(manifest: "ShardManifest") -> None:
    """Warn here about a split too small to evaluate on, not at the first evaluation of a run."""
    from nsa.data.shards.manifest import TRAIN, VALIDATION

    held_out, trained = manifest.totals(VALIDATION), manifest.totals(TRAIN)
    if held_out["tokens"] >= _ENOUGH_HELD_OUT_TOKENS:
        return
    tokens, documents = (held_out[of] + trained[of] for of in ("tokens", "documents"))
    share = max(2 * _ENOUGH_HELD_OUT_TOKENS / max(1, tokens), 10 / max(1, documents))
    advice = f"Prepare into another folder with --held-out {share:.2g}" if share < 0.5 else "Prepare more documents"
    Console(stderr=True, soft_wrap=True).print(
        f"WARNING: the held-out split has {held_out['documents']} documents, {held_out['tokens']:,} tokens: too few "
        f"for an evaluation, which needs at least one batch of rows. {advice}, or train with train.eval_every=0.",
        highlight=False,
        markup=False,
    )
