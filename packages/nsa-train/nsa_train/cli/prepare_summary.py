"""Summary at the end of `nsa data prepare`: what was read and skipped, a preview, and the model size it supports."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nsa_train.cli.outputs import print_json, print_line
from nsa_train.cli.prepared_set import print_table, print_totals, set_facts
from nsa_train.terminal_text import printable

if TYPE_CHECKING:  # the data libraries take a second to import; `--help` must not
    from nsa_train.data.shards.manifest import ShardManifest
    from nsa_train.data.source.read_report import NamedCount, ReadReport
    from nsa_train.data.tokenizer import Tokenizer
    from nsa_train.planning.data_size import DataSizeAdvice
    from nsa_train.storage import StorageFolder

_PREVIEWED_DOCUMENTS, _PREVIEWED_TOKENS = 3, 64
_SHOWN_IDS, _SHOWN_CHARACTERS, _SHOWN_NAME = 5, 40, 24
_END = "⟨end⟩"


def print_summary(out: str, source: str, *, as_json: bool) -> None:
    """Print the summary of a finished set, as tables or as one JSON object."""
    from nsa_train.data.prepare.run import read_report
    from nsa_train.data.saved_tokenizer import read_from_set
    from nsa_train.data.shards.manifest import TRAIN, read_manifest
    from nsa_train.planning.data_size import advise
    from nsa_train.storage import StorageFolder

    folder = StorageFolder(out)
    manifest, report = read_manifest(folder), read_report(folder)
    tokenizer = read_from_set(folder, manifest)
    advice = advise(manifest.totals(TRAIN)["tokens"], manifest.vocab_size)
    preview = _preview(folder, manifest, tokenizer)
    if as_json:
        content = {
            **set_facts(out, manifest),
            "read": report.as_json() if report is not None else None,
            "preview": preview,
            "model_size": asdict(advice),
        }
        print_json(content)
        return
    if report is not None:
        print_report(source, report)
    print_totals(out, manifest)
    _print_preview(preview)
    _print_advice(advice, manifest)
    print_line(f"Train on it with: nsa train CONFIG data.dataset=prepared data.path={out}")


def print_report(source: str, report: "ReadReport") -> None:
    """Print what was read by kind of file, what was not used and why, and encodings other than UTF-8."""
    columns = ["kind", "files", "documents", "characters", "tokens"]
    rows = [[kind, *_numbers(counted)] for kind, counted in report.kinds.items()]
    if len(rows) > 1:
        rows.append(["total", *_numbers(report.total())])
    print_table(f"read from {source}", columns, rows)
    if report.skipped:
        print_line("Not used:")
    for reason, entry in report.skipped.items():
        print_line(f"  {entry.count:,} {reason}: {_names(entry)}")
    if report.encodings:
        print_line("Not plain UTF-8:")
    for encoding, entry in report.encodings.items():
        print_line(f"  {_files(entry.count)} read as {encoding}: {_names(entry)}")
    if any(not name.startswith(("UTF", "damaged")) for name in report.encodings):
        print_line("  If an encoding is wrong, prepare into another folder with --encoding NAME.")


def _numbers(counted: Any) -> list[str]:
    return [f"{getattr(counted, name):,}" for name in ("files", "documents", "characters", "tokens")]


def _names(entry: "NamedCount") -> str:
    more = entry.count - len(entry.first)
    return ", ".join(printable(name, 100) for name in entry.first) + (f", and {more:,} more" if more else "")


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _preview(folder: "StorageFolder", manifest: "ShardManifest", tokenizer: "Tokenizer | None") -> list[dict[str, Any]]:
    """The first documents of the training split: id, length, first ids, and the text they decode to."""
    from nsa_train.data.shards.inspect import first_documents
    from nsa_train.data.shards.manifest import TRAIN

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


def _print_advice(advice: "DataSizeAdvice", manifest: "ShardManifest") -> None:
    from nsa_train.planning.data_size import BYTES_PER_SUBWORD, TOKENS_PER_PARAMETER, USEFUL_PASSES

    counted = (
        f" (at {BYTES_PER_SUBWORD} bytes per token)" if advice.tokens != manifest.totals("train")["tokens"] else ""
    )
    print_line(
        f"Model size: {_short(advice.tokens)} training tokens{counted} support about {_short(advice.parameters)} "
        f"parameters in one pass ({TOKENS_PER_PARAMETER} tokens per parameter, Hoffmann et al. 2022), "
        f"{_short(advice.parameters_at_most)} in {USEFUL_PASSES} passes (Muennighoff et al. 2023)."
    )
    verdict = (
        "it is much larger, so it will learn this text by heart: add text, or start from trained weights (--init-from)"
        if advice.too_little
        else f"train it for up to {USEFUL_PASSES} passes"
    )
    print_line(
        f"Nearest shipped config: {advice.nearest_config} ({_short(advice.nearest_parameters)} parameters); {verdict}."
    )


def _short(number: int) -> str:
    """1,234,567 → 1.2 M."""
    for size, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
