"""Small made-up corpora in the shape of FineWeb-Edu, for tests of reading."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_WORDS = [
    f"{a}{b}" for a in ("stone", "river", "light", "cloud", "paper") for b in ("mill", "bank", "house", "fold", "")
]


def make_records(count: int, *, seed: int = 0, words: int = 40) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [
        {
            "text": " ".join(rng.choices(_WORDS, k=rng.randrange(1, 2 * words))),
            "id": f"<urn:uuid:{seed:04x}-{i:08x}>",
            "dump": "made-up",
        }
        for i in range(count)
    ]


def write_parquet(path: Path, records: list[dict[str, str]], *, rows: int = 20, **options: object) -> None:
    """`rows` per row group; page checksums on, small pages so that a group has several."""
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {"write_page_checksum": True, "compression": "zstd", "data_page_size": 2048, **options}
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=rows, **settings)


def write_corpus(folder: Path, *, files: int = 3, records: int = 100, rows: int = 20) -> None:
    for i in range(files):
        write_parquet(folder / f"part-{i:03d}.parquet", make_records(records, seed=i), rows=rows)
