"""`nsa data inspect`, `verify` and `stats`: show and check sets of token shards written by `nsa data prepare`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from nsa.cli.outputs import print_line
from nsa.errors import DataError
from nsa.terminal_text import printable

if TYPE_CHECKING:  # the data libraries take a second to import; `--help` must not
    from nsa.data.shards.manifest import ShardManifest
    from nsa.storage import StorageFolder

SetArgument = Annotated[
    str, typer.Argument(metavar="SET", help="Prepared set: folder or s3:// prefix written by `nsa data prepare`.")
]


def inspect(
    prepared: SetArgument,
    document: Annotated[
        int | None, typer.Option(help="Print id, shard and position of this document; numbers start at 0.")
    ] = None,
    split: Annotated[str, typer.Option(help="`train` or `validation`, for --document and --shards.")] = "train",
    shards: Annotated[bool, typer.Option(help="List all shards of the split.")] = False,
) -> None:
    """Show size, tokenizer and source of a prepared set.

    Example: `nsa data inspect data/fwe10 --shards`
    """
    from nsa.data.shards.inspect import find_document

    folder, manifest = _open_set(prepared)
    print_totals(prepared, manifest)
    facts = {
        "vocabulary": manifest.vocab_size,
        "tokenizer": manifest.tokenizer_fingerprint,
        "end-of-document token": manifest.eos_id,
        "token type": manifest.dtype,
        "held-out fraction": manifest.made_from.get("held_out_fraction"),
        "source": manifest.made_from.get("source"),
        "fingerprint": manifest.fingerprint,
        "quarantined units": len(manifest.quarantined),
    }
    _print_table("", ["", "value"], [[name, str(value)] for name, value in facts.items()])
    if shards:
        rows = [[s.name, f"{s.tokens:,}", f"{s.documents:,}", s.tok_sha256[:16]] for s in manifest.shards(split)]
        _print_table(split, ["shard", "tokens", "documents", "SHA-256"], rows)
    if document is not None:
        found = find_document(folder, manifest, split, document)
        row = [found.doc_id, found.shard, f"{found.start:,}", f"{found.tokens:,}"]
        _print_table(f"document {document} of {split}", ["id", "shard", "first token", "tokens"], [row])


def verify(prepared: SetArgument) -> None:
    """Verify the SHA-256 of every file of a prepared set; exit code 21 if one is damaged or missing.

    Example: `nsa data verify s3://bucket/fwe10`
    """
    from nsa.data.shards.inspect import verify_set

    folder, manifest = _open_set(prepared)
    total = sum(manifest.totals(split)["bytes"] for split in manifest.splits)
    with Progress(console=Console(stderr=True)) as bar:
        shown = bar.add_task("verify", total=total)
        damaged = list(verify_set(folder, manifest, lambda count: bar.update(shown, advance=count)))
    if damaged:
        _print_table("damaged", ["file", "problem"], [[d.name, d.problem] for d in damaged])
        raise DataError(f"{len(damaged)} file(s) of {prepared} are damaged. Restore them, or prepare the set again.")
    print_line(f"{prepared}: all files match ({total:,} bytes)")


def stats(prepared: SetArgument) -> None:
    """Print the distribution of document lengths in tokens.

    Example: `nsa data stats data/fwe10`
    """
    from nsa.data.shards.inspect import length_stats

    folder, manifest = _open_set(prepared)
    rows = []
    for split in manifest.splits:
        s = length_stats(folder, manifest, split)
        at = [f"{s.percentiles.get(p, 0):,}" for p in (5, 50, 95, 99)]
        rows.append([split, f"{s.documents:,}", f"{s.tokens:,}", f"{s.mean:,.1f}", *at, f"{s.longest:,}"])
    head = ["split", "documents", "tokens", "mean", "5 %", "median", "95 %", "99 %", "longest"]
    _print_table("document length in tokens", head, rows)


def _open_set(prepared: str) -> "tuple[StorageFolder, ShardManifest]":
    from nsa.data.shards.manifest import read_manifest
    from nsa.storage import StorageFolder

    folder = StorageFolder(prepared)
    return folder, read_manifest(folder)


def print_totals(where: str, manifest: "ShardManifest") -> None:
    columns = ["shards", "documents", "tokens", "bytes"]
    totals = {split: manifest.totals(split) for split in manifest.splits}
    rows = [[split, *(f"{total[column]:,}" for column in columns)] for split, total in totals.items()]
    _print_table(where, ["split", *columns], rows)


def _print_table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    table = Table(*columns, title=Text(printable(title)) if title else None, title_justify="left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)
