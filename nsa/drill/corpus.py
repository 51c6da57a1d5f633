"""Synthetic text for the drill's runs, as JSONL and parquet files; deterministic."""

import json
import random
from pathlib import Path

_SENTENCE = "attention reads a block of keys and the window slides on while gates decide what each branch may add"


def documents(count: int) -> list[str]:
    """Some 400 bytes each."""
    chance, words = random.Random(3), _SENTENCE.split()
    return [" ".join(chance.choices(words, k=80)) for _ in range(count)]


def write_jsonl(path: Path, count: int) -> None:
    lines = [json.dumps({"id": str(number), "text": text}) for number, text in enumerate(documents(count))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_parquet(path: Path, count: int) -> None:
    """Four documents per row group, so that one fetch is enough for a few steps only."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": documents(count), "id": [str(number) for number in range(count)]})
    pyarrow.parquet.write_table(table, path, row_group_size=4, write_page_checksum=True)
