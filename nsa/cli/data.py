"""`nsa data`: make a demo corpus and train a tokenizer."""

from pathlib import Path

import typer

from nsa.cli.terminal import say

data_app = typer.Typer(help="Build, prepare and check training data.", no_args_is_help=True)
tokenizer_app = typer.Typer(help="Make tokenizers.", no_args_is_help=True)
data_app.add_typer(tokenizer_app, name="tokenizer")


@data_app.command()
def demo(
    folder: Path = typer.Argument(help="New folder for the parquet files."),
    mb: float = typer.Option(0.0, min=0.0, help="Megabytes of text to make; 0 for all there is (about 110)."),
) -> None:
    """Build a corpus of real English text, shaped like FineWeb-Edu, from Debian's documentation packages."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from nsa.data.demo import build_demo

    columns = (TextColumn("{task.description:<36}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Bar(*columns, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, wanted: int) -> None:
            bar.update(task, description=what, completed=done, total=wanted or None)

        built = build_demo(folder, megabytes=mb, progress=show)
    for package in built.packages:
        say(
            f"{package['package']:24} {package['version']:24} {package['documents']:>6} documents "
            f"{int(package['text_bytes']) / 1e6:8.2f} MB  {package['licence']}"
        )
    say(f"{built.documents} documents, {built.text_bytes / 1e6:.2f} MB of text, {built.files} files in {folder}")


@tokenizer_app.command("train")
def train_tokenizer(
    source: str = typer.Argument(help="Folder, pattern, address or dataset id of the corpus."),
    path: Path = typer.Argument(help="Where to write the tokenizer's JSON file."),
    vocab_size: int = typer.Option(32768, min=257, help="Entries, the end-of-document token included."),
    mb: float = typer.Option(100.0, min=0.0, help="Megabytes of text to learn from, spread over the corpus."),
    seed: int = typer.Option(0, help="Which part of the corpus."),
) -> None:
    """Train a byte-level BPE on a corpus."""
    from nsa.data.document_stream import sample_texts
    from nsa.data.source import open_source
    from nsa.data.tokenizer import train_bpe

    tokenizer = train_bpe(sample_texts(open_source(source), seed=seed, max_bytes=int(mb * 1e6)), vocab_size, path)
    say(f"{path}: {tokenizer.vocab_size} entries, end of document {tokenizer.eos_id}")
    say(f"fingerprint {tokenizer.fingerprint}")
