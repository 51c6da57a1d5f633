"""`nsa data`: train a tokenizer, prepare token shards, and check that a source can be read."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nsa.errors import OutputError
from nsa_train.cli import prepare, prepared_set
from nsa_train.cli.outputs import print_line, require_writable_file
from nsa_train.cli.prepare import SourceOption, TokenizerOption
from nsa_train.cli.progress_line import ProgressLine

data_app = typer.Typer(help="Train a tokenizer, prepare token shards, and check training data.", no_args_is_help=True)
_tokenizer_app = typer.Typer(help="Train tokenizers.", no_args_is_help=True)
data_app.add_typer(_tokenizer_app, name="tokenizer")
data_app.command()(prepare.prepare)
data_app.command()(prepare.bootstrap)
data_app.command()(prepared_set.inspect)
data_app.command()(prepared_set.verify)
data_app.command()(prepared_set.stats)


@_tokenizer_app.command("train")
def train_tokenizer(
    source: str = typer.Argument(help="Corpus: folder, file, glob pattern, URL or hub dataset id."),
    path: Path = typer.Argument(help="Tokenizer JSON file to write."),
    vocab_size: int = typer.Option(32768, min=257, help="Vocabulary size, including the end-of-document token."),
    mb: float = typer.Option(100.0, min=0.0, help="Megabytes of text to train on, sampled from the whole corpus."),
    seed: int = typer.Option(0, help="Random seed of the sample."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing file."),
) -> None:
    """Train a byte-level BPE tokenizer on a corpus: any files that `nsa data prepare` reads.

    An existing file is kept unless --overwrite is given: sets and runs made with it would not fit the new one.

    Example: `nsa data tokenizer train my-text data/bpe.json --vocab-size 8192`
    """
    from nsa_train.data.document_stream import sample_texts
    from nsa_train.data.source import open_source
    from nsa_train.data.tokenizer import train_bpe

    if not path.is_dir() and path.parent.is_dir():  # else refused below, as data that cannot be written
        require_writable_file(path)
    if path.is_file() and not overwrite:
        raise OutputError(f"{path} exists and is kept. Name another file, or add --overwrite to replace it.")
    with ProgressLine(f"listing {source}") as line:
        most = int(mb * 1e6)
        texts = _counted(sample_texts(open_source(source), seed=seed, max_bytes=most), most, vocab_size, line)
        tokenizer = train_bpe(texts, vocab_size, path)
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
    source: SourceOption = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per row.")] = 1024,
    batch: Annotated[int, typer.Option(help="Rows per batch.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each batch.")] = 60.0,
    tokenizer: TokenizerOption = "byte",
) -> None:
    """Check that a data source is reachable: read a few batches and print the time to the first one and tokens/s.

    Example: `nsa data smoke --seq-len 1024 --batch 1 --timeout 60 --tokenizer byte`
    """
    from nsa_train.data.prefetcher import smoke as run
    from nsa_train.data.source.hub import FINEWEB_EDU

    report = run(source or FINEWEB_EDU, tokenizer=tokenizer, seq_len=seq_len, batch=batch, timeout_s=timeout)
    Console().print(
        f"first batch after {report.first_batch_s:.1f} s; {report.batches} batches, {report.documents} documents, "
        f"{report.tokens:,} tokens, {report.tokens_per_s:,.0f} tokens/s"
    )
