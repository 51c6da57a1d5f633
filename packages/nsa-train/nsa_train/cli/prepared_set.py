"""`nsa data inspect`, `verify` and `stats`: show and check sets of token shards written by `nsa data prepare`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from nsa.errors import DataError
from nsa_train.cli.outputs import print_json, print_line
from nsa_train.terminal_text import printable

if TYPE_CHECKING:  # the data libraries take a second to import; `--help` must not
    from nsa_train.data.shards.inspect import LengthStats
    from nsa_train.data.shards.manifest import ShardManifest
    from nsa_train.storage import StorageFolder

_SetArgument = Annotated[
    str, typer.Argument(metavar="SET", help="Prepared set: folder or s3:// prefix written by `nsa data prepare`.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
_PERCENTILES = {"5 %": 5, "median": 50, "95 %": 95, "99 %": 99}


def inspect(
    prepared: _SetArgument,
    document: Annotated[
        int | None, typer.Option(help="Print id, shard and position of this document; numbers start at 0.")
    ] = None,
    split: Annotated[str, typer.Option(help="`train` or `validation`, for --document and --shards.")] = "train",
    shards: Annotated[bool, typer.Option(help="List all shards of the split.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show size, tokenizer and source of a prepared set, and what was skipped when it was prepared.

    Exit codes: 0, or 21 if the set does not exist, is not finished or is damaged; 20 for an unknown split.

    Example: `nsa data inspect data/fwe10 --shards`
    """
    from nsa_train.cli.prepare_summary import print_report
    from nsa_train.data.prepare.run import read_report
    from nsa_train.data.shards.inspect import find_document

    folder, manifest = _open_set(prepared)
    listed = manifest.shards(split) if shards else []
    place = find_document(folder, manifest, split, document) if document is not None else None
    report = read_report(folder)
    if as_json:
        content = set_facts(prepared, manifest) | {"read": report.as_json() if report is not None else None}
        content |= {"shards": [shard.as_json() for shard in listed]} if shards else {}
        content |= {"document": asdict(place)} if place is not None else {}
        print_json(content)
        return
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
    print_table("", ["", "value"], [[name, str(value)] for name, value in facts.items()], numbers=False)
    if report is not None:
        print_report(str(facts["source"]), report)
    if shards:
        rows = [[s.name, f"{s.tokens:,}", f"{s.documents:,}", s.tok_sha256[:16]] for s in listed]
        print_table(split, ["shard", "tokens", "documents", "SHA-256"], rows)
    if place is not None:
        row = [place.doc_id, place.shard, f"{place.start:,}", f"{place.tokens:,}"]
        print_table(f"document {document} of {split}", ["id", "shard", "first token", "tokens"], [row])


def verify(prepared: _SetArgument, as_json: JsonOption = False) -> None:
    """Verify the SHA-256 of every file of a prepared set.

    Exit codes: 0 if all files match, 21 if one is damaged or missing, or there is no finished set.

    Example: `nsa data verify s3://bucket/fwe10`
    """
    from nsa_train.data.shards.inspect import verify_set

    folder, manifest = _open_set(prepared)
    total = sum(manifest.totals(split)["bytes"] for split in manifest.splits)
    with Progress(console=Console(stderr=True)) as bar:
        shown = bar.add_task("verify", total=total)
        damaged = list(verify_set(folder, manifest, lambda count: bar.update(shown, advance=count)))
    if as_json:
        files = [asdict(file) for file in damaged]
        print_json({"set": prepared, "bytes": total, "ok": not damaged, "damaged": files})
    if damaged:
        if not as_json:
            print_table("damaged", ["file", "problem"], [[d.name, d.problem] for d in damaged], numbers=False)
        raise DataError(f"{len(damaged)} file(s) of {prepared} are damaged. Restore them, or prepare the set again.")
    if not as_json:
        print_line(f"{prepared}: all files match ({total:,} bytes)")


def stats(prepared: _SetArgument, as_json: JsonOption = False) -> None:
    """Print the distribution of document lengths in tokens.

    Exit codes: 0, or 21 if the set does not exist, is not finished or is damaged.

    Example: `nsa data stats data/fwe10`
    """
    from nsa_train.data.shards.inspect import length_stats

    folder, manifest = _open_set(prepared)
    statistics = {split: length_stats(folder, manifest, split) for split in manifest.splits}
    if as_json:
        print_json({"set": prepared, "lengths": {s: asdict(of) for s, of in statistics.items()}})
        return
    # One line per number: a line per split would not fit 80 columns.
    lengths = [_lengths(of) for of in statistics.values()]
    print_table(
        "document length in tokens", ["", *statistics], [[name, *(of[name] for of in lengths)] for name in lengths[0]]
    )


def _lengths(of: "LengthStats") -> dict[str, str]:
    return {
        "documents": f"{of.documents:,}",
        "tokens": f"{of.tokens:,}",
        "mean": f"{of.mean:,.1f}",
        **{name: f"{of.percentiles.get(percent, 0):,}" for name, percent in _PERCENTILES.items()},
        "longest": f"{of.longest:,}",
    }


def _open_set(prepared: str) -> "tuple[StorageFolder, ShardManifest]":
    from nsa_train.data.shards.manifest import read_manifest
    from nsa_train.storage import StorageFolder

    folder = StorageFolder(prepared)
    return folder, read_manifest(folder)


def set_facts(where: str, manifest: "ShardManifest") -> dict[str, Any]:
    """Size, tokenizer and source of a set, for --json."""
    from nsa_train.data.saved_tokenizer import set_tokenizer_record

    return {
        "set": where,
        "splits": {split: manifest.totals(split) for split in manifest.splits},
        "tokenizer": set_tokenizer_record(manifest),
        "dtype": manifest.dtype,
        "source": manifest.made_from.get("source"),
        "held_out_fraction": manifest.made_from.get("held_out_fraction"),
        "fingerprint": manifest.fingerprint,
        "quarantined": manifest.quarantined,
    }


def print_totals(where: str, manifest: "ShardManifest") -> None:
    columns = ["shards", "documents", "tokens", "bytes"]
    totals = {split: manifest.totals(split) for split in manifest.splits}
    rows = [[split, *(f"{total[column]:,}" for column in columns)] for split, total in totals.items()]
    print_table(where, ["split", *columns], rows)


def print_table(title: str, columns: list[str], rows: list[list[Any]], *, numbers: bool = True) -> None:
    """A table whose first column holds names, which are wrapped, and the others numbers, which are never cut."""
    table = Table(title=Text(printable(title)) if title else None, title_justify="left")
    for place, column in enumerate(columns):
        is_number = numbers and place > 0
        table.add_column(
            column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold",
            min_width=max((len(str(row[place])) for row in rows), default=0) if is_number else None,
        )  # fmt: skip
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)
