"""`nsa data`: train a tokenizer, prepare token shards, and check that a source can be read."""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from nsa.errors import ConfigError, OutputError
from nsa_train.cli import prepared_set
from nsa_train.cli.early_checks import DATA_PACKAGES, require_packages
from nsa_train.cli.outputs import ProgressLine, print_line, require_writable_file

if TYPE_CHECKING:  # the data libraries take a second to import; `--help` must not
    from nsa_train.data.prepare.run import PrepareProgress

data_app = typer.Typer(help="Train a tokenizer, prepare token shards, and check training data.", no_args_is_help=True)
_tokenizer_app = typer.Typer(help="Train tokenizers.", no_args_is_help=True)
data_app.add_typer(_tokenizer_app, name="tokenizer")

_SOURCE = typer.Option(
    None, help="Folder, glob pattern, URL or hub dataset id. Default: the 10 BT sample of FineWeb-Edu."
)
_TOKENIZER = typer.Option(
    "byte", help="`byte` (UTF-8 bytes), or a tokenizers JSON file, or a folder with tokenizer.json."
)
_TEXT_COLUMN = typer.Option("text", help="Column (or JSON key) of the text.")
_ENCODING = typer.Option("cp1252", help="Encoding of text files that are neither UTF-8 nor have a byte order mark.")
_WORKERS = typer.Option(None, min=1, max=4096, help="Worker processes. Default: one per CPU core.", show_default=False)
_HELD_OUT = typer.Option(
    0.0005, help="Fraction of documents for the validation split, selected by a hash of the document id."
)

_ENOUGH_HELD_OUT_TOKENS = 16 * 2048
"""Tokens of an evaluation with the default settings: train.eval_batches rows of train.seq_len tokens."""
_BAR_WIDTH = 20
_MORE_DOCUMENTS = "Prepare more documents (a text file is one: divide large ones)"
_SMOKE_BATCHES = 4


@data_app.command()
def prepare(
    source: str = typer.Argument(
        metavar="SRC",
        help="Corpus: folder, file, glob, URL, s3:// prefix, hub id, or shipped: `debian_docs`, `simple_stories`.",
    ),
    out: str = typer.Argument(metavar="OUT", help="Output folder or s3:// prefix."),
    tokenizer: str = _TOKENIZER,
    workers: int = _WORKERS,
    held_out: float = _HELD_OUT,
    dedup: bool = typer.Option(
        False, "--dedup", help="Keep only the first of documents with exactly the same text; reads SRC twice."
    ),
    encoding: str = _ENCODING,
    shard_tokens: int = typer.Option(2**28, help="Tokens per shard; a shard ends at the first document end beyond it."),
    units_per_task: int = typer.Option(
        None,
        help="Row groups, 4 MB blocks of JSONL, or text files per task. Default: 64 (1 if every JSONL file is one "
        "unit), and text files up to 16 MB.",
    ),
    text_column: str = _TEXT_COLUMN,
    id_column: str = typer.Option(
        "id", help="Column of the document id; `-`, or no column `id`, uses a hash of the text."
    ),
    eos_token: str = typer.Option(None, help="End-of-document token, if the tokenizer file does not define one."),
    max_bad_units: int = typer.Option(0, help="Corrupt units (row groups or JSONL blocks) to skip before failing."),
    as_json: bool = prepared_set.JSON,
    slurm_partition: str = typer.Option(
        None, help="Submit the tasks to this Slurm partition instead of running them here."
    ),
    slurm_time: str = typer.Option("08:00:00", help="Time limit of each Slurm job, HH:MM:SS."),
    slurm_log: str = typer.Option(None, help="Slurm log folder, on a file system shared by all nodes."),
    slurm_env: str = typer.Option(None, help="Shell command that activates the Python environment on a Slurm node."),
) -> None:
    """Tokenize a corpus into checksummed token shards. If interrupted, run the same command again to resume.

    Reads .txt, .md, .html, .jsonl (also .gz, .zst) and .parquet files, all kinds together, in subfolders too; hidden
    files are skipped. A text, Markdown or HTML file is one document, a JSONL line or parquet row is one. The summary
    says what was skipped and why. Exit codes: 0 done, 20 wrong option, 21 data missing or corrupt.

    Examples: `nsa data prepare my_texts data/mine --dedup --held-out 0.05`,
    `nsa data prepare HuggingFaceFW/fineweb-edu:sample-10BT data/fwe10 --tokenizer bpe.json --workers 16`
    """
    require_packages(*DATA_PACKAGES)

    from nsa_train.data.document import DocumentColumns
    from nsa_train.data.prepare.plan import make_plan
    from nsa_train.data.prepare.run import prepare as run
    from nsa_train.data.prepare.slurm import submit

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
        if slurm_log is None:
            raise ConfigError(
                "--slurm-partition needs --slurm-log: the jobs read their plan from a folder shared by all nodes."
            )
        jobs = submit(
            plan, out, log_folder=Path(slurm_log), partition=slurm_partition, time_limit=slurm_time, workers=workers,
            env_command=slurm_env,
        )  # fmt: skip
        print_line(
            f"submitted as Slurm job {' and '.join(jobs)}, logs in {slurm_log}" if jobs else f"{out} is finished"
        )
        return
    with ProgressLine("starting workers") as line:
        run(plan, out, workers=workers or _cores(), on_progress=lambda progress: line.update(_progress_text(progress)))
    _print_result(out, source, as_json=as_json)


@data_app.command()
def bootstrap(
    out: str = typer.Option("data/fineweb_edu", help="Output folder."),
    gb: float = typer.Option(5.0, help="Approximate size of the shards in gigabytes."),
    source: str = _SOURCE,
    tokenizer: str = _TOKENIZER,
    workers: int = _WORKERS,
    held_out: float = _HELD_OUT,
) -> None:
    """Download and tokenize the beginning of a source to local shards, for runs without network access.

    Example: `nsa data bootstrap --gb 5 --out data/fineweb_edu --tokenizer bpe.json`
    """
    require_packages(*DATA_PACKAGES)

    from nsa_train.data.prepare.run import bootstrap as run
    from nsa_train.data.source.hub import FINEWEB_EDU

    source = source or FINEWEB_EDU
    with ProgressLine("starting workers") as line:
        run(
            source, out, gb=gb, tokenizer=tokenizer, workers=workers or _cores(), held_out_fraction=held_out,
            on_progress=lambda progress: line.update(_progress_text(progress)),
        )  # fmt: skip
    _print_result(out, source, as_json=False)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _progress_text(progress: "PrepareProgress") -> str:
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


def _print_result(out: str, source: str, *, as_json: bool) -> None:
    """Print the summary; warn here about a split too small to evaluate on, not at the first evaluation of a run."""
    from nsa_train.data.shards.manifest import TRAIN, VALIDATION, read_manifest
    from nsa_train.storage import StorageFolder

    prepared_set.print_summary(out, source, as_json=as_json)
    manifest = read_manifest(StorageFolder(out))
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


data_app.command()(prepared_set.inspect)
data_app.command()(prepared_set.verify)
data_app.command()(prepared_set.stats)


@_tokenizer_app.command("train")
def train_tokenizer(
    source: str = typer.Argument(
        help="Corpus: folder, file, glob pattern, URL, hub id, `debian_docs`, `simple_stories`."
    ),
    path: Path = typer.Argument(help="Tokenizer JSON file to write."),
    vocab_size: int = typer.Option(32768, min=257, help="Vocabulary size, including the end-of-document token."),
    mb: float = typer.Option(100.0, min=0.0, help="Megabytes of text to train on, sampled from the whole corpus."),
    seed: int = typer.Option(0, help="Random seed of the sample."),
    text_column: str = _TEXT_COLUMN,
    encoding: str = _ENCODING,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing file."),
) -> None:
    """Train a byte-level BPE tokenizer on a corpus: any files that `nsa data prepare` reads; it skips the same ones.

    An existing file is kept unless --overwrite is given: sets and runs made with it would not fit the new one.

    Example: `nsa data tokenizer train my-text data/bpe.json --vocab-size 8192`
    """
    require_packages(*DATA_PACKAGES)

    from nsa_train.data.document import DocumentColumns
    from nsa_train.data.document_stream import sample_texts
    from nsa_train.data.source.read_report import ReadReport
    from nsa_train.data.source.resolve import open_source
    from nsa_train.data.source.text import require_encoding
    from nsa_train.data.tokenizer import train_bpe

    if not path.is_dir() and path.parent.is_dir():  # else refused below, as data that cannot be written
        require_writable_file(path)
    if path.is_file() and not overwrite:
        raise OutputError(f"{path} exists and is kept. Name another file, or add --overwrite to replace it.")
    with ProgressLine(f"listing {source}") as line:
        most, report = int(mb * 1e6), ReadReport()
        columns, fallback = DocumentColumns(text_column), require_encoding(encoding)
        corpus = open_source(source, columns=columns, fallback_encoding=fallback, report=report)
        texts = sample_texts(corpus, seed=seed, max_bytes=most, report=report)
        tokenizer = train_bpe(_counted(texts, most, vocab_size, line), vocab_size, path)
    prepared_set.print_skipped(report)
    print_line(f"{path}: {tokenizer.vocab_size} tokens, end-of-document token {tokenizer.eos_id}")
    print_line(f"fingerprint {tokenizer.fingerprint}")


def _counted(texts: Iterable[str], most: int, vocab_size: int, line: ProgressLine) -> Iterator[str]:
    read = 0
    for text in texts:
        read += len(text)
        line.update(f"reading text, {read / 1e6:,.1f} of up to {most / 1e6:,.0f} MB")
        yield text
    line.update(f"merging {read / 1e6:,.1f} MB of text to {vocab_size:,} tokens")


@data_app.command()
def smoke(
    source: str = _SOURCE,
    seq_len: int = typer.Option(1024, help="Tokens per row."),
    batch: int = typer.Option(1, help="Rows per batch."),
    timeout: float = typer.Option(60.0, help="Seconds to wait for each batch."),
    tokenizer: str = _TOKENIZER,
) -> None:
    """Check that a data source is reachable: read a few batches and print the time to the first one and tokens/s.

    Example: `nsa data smoke --seq-len 1024 --batch 1 --timeout 60 --tokenizer byte`
    """
    require_packages(*DATA_PACKAGES)

    from nsa_train.data.prefetcher import BatchPrefetcher, PrefetchSettings
    from nsa_train.data.rows.specs import DirectData
    from nsa_train.data.source.hub import FINEWEB_EDU

    data = DirectData(source or FINEWEB_EDU, tokenizer, seq_len, loader_timeout_s=timeout)
    start = time.monotonic()
    with BatchPrefetcher(data, global_rows=batch, settings=PrefetchSettings(timeout_s=timeout)) as prefetcher:
        prefetcher.warm_up()
        first_batch_s = time.monotonic() - start
        batches = [next(prefetcher) for _ in range(_SMOKE_BATCHES)]
        tokens, elapsed_s = sum(one.valid_tokens for one in batches), time.monotonic() - start
    Console().print(
        f"first batch after {first_batch_s:.1f} s; {len(batches)} batches, {sum(one.documents for one in batches)} "
        f"documents, {tokens:,} tokens, {tokens / elapsed_s:,.0f} tokens/s"
    )
