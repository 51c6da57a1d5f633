"""Shows sets of token shards: the summary of `nsa data prepare`, `nsa data inspect`, `verify` and `stats`."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from nsa.errors import DataError
from nsa_train.cli.early_checks import DATA_PACKAGES, require_packages
from nsa_train.cli.outputs import print_json, print_line
from nsa_train.terminal_text import printable

if TYPE_CHECKING:  # the data libraries take a second to import; `--help` must not
    from nsa_train.data.shards.manifest import ShardManifest
    from nsa_train.data.source.read_report import NamedCount, ReadReport
    from nsa_train.data.tokenizer import Tokenizer
    from nsa_train.storage import StorageFolder


def _require_data_packages(prepared: str) -> str:
    require_packages(*DATA_PACKAGES)
    return prepared


_SET = typer.Argument(
    metavar="SET",
    callback=_require_data_packages,
    help="Prepared set: folder or s3:// prefix written by `nsa data prepare`.",
)
JSON = typer.Option(False, "--json", help="Print one JSON object and nothing else on stdout.")
_PERCENTILES = {"5 %": 5, "median": 50, "95 %": 95, "99 %": 99}
_PREVIEWED_DOCUMENTS, _PREVIEWED_TOKENS = 3, 64
_SHOWN_IDS, _SHOWN_CHARACTERS, _SHOWN_NAME = 5, 40, 24
_END = "⟨end⟩"

# How large a model an amount of text supports. The ratio is that of Hoffmann et al. 2022 ("Chinchilla"), measured with
# subword tokens; four passes are the number up to which Muennighoff et al. 2023 found repeated text nearly as good as
# new text. Both are rules of thumb for training from scratch.
_TOKENS_PER_PARAMETER = 20
_USEFUL_PASSES = 4
_BYTES_PER_SUBWORD = 4
"""English text: a byte tokenizer counts about four times the tokens of a subword tokenizer."""
_SHIPPED_MODELS = {
    "cpu_quickstart": 496_536,
    "cpu_stories": 3_894_624,
    "base_125m_8k": 123_827_376,
    "base_1b_32k": 1_078_697_024,
    "base_7b_128k": 7_240_170_752,
}
"""Parameters of the shipped configs, with the vocabulary that their header names."""


def inspect(
    prepared: str = _SET,
    document: int = typer.Option(None, help="Print id, shard and position of this document; numbers start at 0."),
    split: str = typer.Option("train", help="`train` or `validation`, for --document and --shards."),
    shards: bool = typer.Option(False, help="List all shards of the split."),
    as_json: bool = JSON,
) -> None:
    """Show size, tokenizer and source of a prepared set, and what was skipped when it was prepared.

    Exit codes: 0, or 21 if the set does not exist, is not finished or is damaged; 20 for an unknown split.

    Example: `nsa data inspect data/fwe10 --shards`
    """
    from nsa_train.data.prepare.run import read_report
    from nsa_train.data.shards.manifest import find_document

    folder, manifest = _open_set(prepared)
    listed = manifest.shards(split) if shards else []
    place = find_document(folder, manifest, split, document) if document is not None else None
    report = read_report(folder)
    if as_json:
        content = _set_facts(prepared, manifest) | {"read": report.as_json() if report is not None else None}
        content |= {"shards": [shard.as_json() for shard in listed]} if shards else {}
        content |= {"document": asdict(place)} if place is not None else {}
        print_json(content)
        return
    _print_totals(prepared, manifest)
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
    _print_table("", ["", "value"], [[name, str(value)] for name, value in facts.items()], numbers=False)
    if report is not None:
        _print_report(str(facts["source"]), report)
    if shards:
        rows = [[s.name, f"{s.tokens:,}", f"{s.documents:,}", s.tok_sha256[:16]] for s in listed]
        _print_table(split, ["shard", "tokens", "documents", "SHA-256"], rows)
    if place is not None:
        row = [place.doc_id, place.shard, f"{place.start:,}", f"{place.tokens:,}"]
        _print_table(f"document {document} of {split}", ["id", "shard", "first token", "tokens"], [row])


def verify(prepared: str = _SET, as_json: bool = JSON) -> None:
    """Verify the SHA-256 of every file of a prepared set.

    Exit codes: 0 if all files match, 21 if one is damaged or missing, or there is no finished set.

    Example: `nsa data verify s3://bucket/fwe10`
    """
    from nsa_train.data.shards.manifest import verify_set

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
            _print_table("damaged", ["file", "problem"], [[d.name, d.problem] for d in damaged], numbers=False)
        raise DataError(f"{len(damaged)} file(s) of {prepared} are damaged. Restore them, or prepare the set again.")
    if not as_json:
        print_line(f"{prepared}: all files match ({total:,} bytes)")


def stats(prepared: str = _SET, as_json: bool = JSON) -> None:
    """Print the distribution of document lengths in tokens.

    Exit codes: 0, or 21 if the set does not exist, is not finished or is damaged.

    Example: `nsa data stats data/fwe10`
    """
    from nsa_train.data.shards.manifest import length_stats

    folder, manifest = _open_set(prepared)
    statistics = {split: length_stats(folder, manifest, split) for split in manifest.splits}
    if as_json:
        print_json({"set": prepared, "lengths": {s: asdict(of) for s, of in statistics.items()}})
        return
    # One line per number: a line per split would not fit 80 columns.
    lengths = [
        {
            "documents": f"{of.documents:,}",
            "tokens": f"{of.tokens:,}",
            "mean": f"{of.mean:,.1f}",
            **{name: f"{of.percentiles.get(percent, 0):,}" for name, percent in _PERCENTILES.items()},
            "longest": f"{of.longest:,}",
        }
        for of in statistics.values()
    ]
    _print_table(
        "document length in tokens", ["", *statistics], [[name, *(of[name] for of in lengths)] for name in lengths[0]]
    )


def _open_set(prepared: str) -> "tuple[StorageFolder, ShardManifest]":
    from nsa_train.data.shards.manifest import read_manifest
    from nsa_train.storage import StorageFolder

    folder = StorageFolder(prepared)
    return folder, read_manifest(folder)


def _set_facts(where: str, manifest: "ShardManifest") -> dict[str, Any]:
    """Size, tokenizer and source of a set, for --json."""
    return {
        "set": where,
        "splits": {split: manifest.totals(split) for split in manifest.splits},
        "tokenizer": manifest.tokenizer_record,
        "dtype": manifest.dtype,
        "source": manifest.made_from.get("source"),
        "held_out_fraction": manifest.made_from.get("held_out_fraction"),
        "fingerprint": manifest.fingerprint,
        "quarantined": manifest.quarantined,
    }


def _print_totals(where: str, manifest: "ShardManifest") -> None:
    columns = ["shards", "documents", "tokens", "bytes"]
    totals = {split: manifest.totals(split) for split in manifest.splits}
    rows = [[split, *(f"{total[column]:,}" for column in columns)] for split, total in totals.items()]
    _print_table(where, ["split", *columns], rows)


def _print_table(title: str, columns: list[str], rows: list[list[Any]], *, numbers: bool = True) -> None:
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


def advise(tokens: int, vocab_size: int) -> dict[str, Any]:
    """Model size for training from scratch on so many tokens of a tokenizer with `vocab_size` ids.

    `tokens` are subword tokens, `parameters` is the size for one pass, `parameters_at_most` for `_USEFUL_PASSES`.
    """
    is_byte = vocab_size <= 256 + 1
    subwords = tokens // _BYTES_PER_SUBWORD if is_byte else tokens
    parameters = subwords // _TOKENS_PER_PARAMETER
    at_most = subwords * _USEFUL_PASSES // _TOKENS_PER_PARAMETER
    middle = math.sqrt(max(1, parameters) * max(1, at_most))
    nearest = min(_SHIPPED_MODELS, key=lambda name: abs(math.log(_SHIPPED_MODELS[name] / middle)))
    return {
        "tokens": subwords,
        "parameters": parameters,
        "parameters_at_most": at_most,
        "nearest_config": nearest,
        "nearest_parameters": _SHIPPED_MODELS[nearest],
    }


def print_summary(out: str, source: str, *, as_json: bool) -> None:
    """Print the summary of a finished set, as tables or as one JSON object."""
    from nsa_train.data.prepare.run import read_report
    from nsa_train.data.shards.manifest import TRAIN, read_from_set, read_manifest
    from nsa_train.storage import StorageFolder

    folder = StorageFolder(out)
    manifest, report = read_manifest(folder), read_report(folder)
    tokenizer = read_from_set(folder, manifest)
    advice = advise(manifest.totals(TRAIN)["tokens"], manifest.vocab_size)
    preview = _preview(folder, manifest, tokenizer)
    if as_json:
        content = {
            **_set_facts(out, manifest),
            "read": report.as_json() if report is not None else None,
            "preview": preview,
            "model_size": advice,
        }
        print_json(content)
        return
    if report is not None:
        _print_report(source, report)
    _print_totals(out, manifest)
    _print_preview(preview)
    _print_advice(advice, manifest)
    print_line(f"Train on it, with that config or your own: nsa train {advice['nearest_config']} data.path={out}")


def _print_report(source: str, report: "ReadReport") -> None:
    """Print what was read by kind of file, what was not used and why, and encodings other than UTF-8."""
    columns = ["kind", "files", "documents", "characters", "tokens"]
    rows = [[kind, *_numbers(counted)] for kind, counted in report.kinds.items()]
    if len(rows) > 1:
        rows.append(["total", *_numbers(report.total())])
    _print_table(f"read from {source}", columns, rows)
    print_skipped(report)
    if report.encodings:
        print_line("Not plain UTF-8:")
    for encoding, entry in report.encodings.items():
        print_line(f"  {entry.count:,} file{'s' * (entry.count != 1)} read as {encoding}: {_names(entry)}")
    if any(not name.startswith(("UTF", "damaged")) for name in report.encodings):
        print_line("  If an encoding is wrong, prepare into another folder with --encoding NAME.")


def print_skipped(report: "ReadReport") -> None:
    if report.skipped:
        print_line("Not used:")
    for reason, entry in report.skipped.items():
        print_line(f"  {entry.count:,} {reason}: {_names(entry)}")


def _numbers(counted: Any) -> list[str]:
    return [f"{getattr(counted, name):,}" for name in ("files", "documents", "characters", "tokens")]


def _names(entry: "NamedCount") -> str:
    more = entry.count - len(entry.first)
    return ", ".join(printable(name, 100) for name in entry.first) + (f", and {more:,} more" if more else "")


def _preview(folder: "StorageFolder", manifest: "ShardManifest", tokenizer: "Tokenizer | None") -> list[dict[str, Any]]:
    """The first documents of the training split: id, length, first ids, and the text they decode to."""
    from nsa_train.data.shards.manifest import TRAIN, first_documents

    if tokenizer is None:
        return []
    starts = first_documents(folder, manifest, TRAIN, documents=_PREVIEWED_DOCUMENTS, max_tokens=_PREVIEWED_TOKENS)
    return [
        {
            "document": start.doc_id,
            "tokens": start.tokens,
            "ids": start.ids,
            "text": tokenizer.decode([token for token in start.ids if token != manifest.eos_id]),
            "complete": start.tokens <= _PREVIEWED_TOKENS,
        }
        for start in starts
    ]


def _print_preview(preview: list[dict[str, Any]]) -> None:
    if preview:
        print_line(f"What the model will see, first documents as token ids → text (each ends with {_END}):")
    for shown in preview:
        text, ids = shown["text"], shown["ids"]
        numbers = " ".join(str(token) for token in ids[:_SHOWN_IDS]) + (" …" if len(ids) > _SHOWN_IDS else "")
        end = _END if shown["complete"] and len(text) <= _SHOWN_CHARACTERS else f"… {_END}"
        length = f"{shown['tokens']:,} tokens of {printable(shown['document'], _SHOWN_NAME)}"
        print_line(f"  {numbers} → {text[:_SHOWN_CHARACTERS]!r}{end}  ({length})")


def _print_advice(advice: dict[str, Any], manifest: "ShardManifest") -> None:
    counted = (
        f" (at {_BYTES_PER_SUBWORD} bytes per token)" if advice["tokens"] != manifest.totals("train")["tokens"] else ""
    )
    print_line(
        f"Model size: {_short(advice['tokens'])} training tokens{counted} support about {_short(advice['parameters'])} "
        f"parameters in one pass ({_TOKENS_PER_PARAMETER} tokens per parameter, Hoffmann et al. 2022), "
        f"{_short(advice['parameters_at_most'])} in {_USEFUL_PASSES} passes (Muennighoff et al. 2023)."
    )
    verdict = (
        "it is much larger, so it will learn this text by heart: add text, or start from trained weights (--init-from)"
        if advice["nearest_parameters"] > 2 * advice["parameters_at_most"]
        else f"train it for up to {_USEFUL_PASSES} passes"
    )
    size = _short(advice["nearest_parameters"])
    print_line(f"Nearest shipped config: {advice['nearest_config']} ({size} parameters); {verdict}.")


def _short(number: int) -> str:
    """1,234,567 → 1.2 M."""
    for size, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
