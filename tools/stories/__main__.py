"""Write the story corpus: simple English stories, facts and questions, drawn from the grammar of this folder.

Every sentence was written for this repository and is under its licence.

python -m tools.stories OUT.parquet --documents 7400 --seed 1
python -m tools.stories OUT.parquet --print 40        also print the first texts, and figures of their variety
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from tools.stories.documents import documents
from tools.stories.grammar import sentences

ROWS_PER_GROUP = 600


def row(number: int, title: str, text: str, seed: int) -> dict[str, object]:
    """One document in the columns of the shipped corpus."""
    return {
        "text": text,
        "id": f"stories/{seed}/{number}",
        "dump": "tools.stories",
        "url": "",
        "file_path": title,
        "language": "en",
        "language_score": 1.0,
        "token_count": len(text.split()),
        "score": 0.0,
        "int_score": 0,
    }


def distinct_share(items: Iterator[object]) -> float:
    listed = list(items)
    return len(set(listed)) / len(listed)


def five_grams(text: str) -> Iterator[tuple[str, ...]]:
    words = text.split()
    return zip(*(islice(words, start, None) for start in range(5)), strict=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="parquet file to write")
    parser.add_argument("--documents", type=int, default=7400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print", type=int, default=0, metavar="N", dest="shown", help="print the first N texts")
    args = parser.parse_args()
    drawn = list(islice(documents(Random(args.seed)), args.documents))
    for title, text in drawn[: args.shown]:
        print(f"--- {title}\n{text}\n")
    table = pa.Table.from_pylist([row(number, title, text, args.seed) for number, (title, text) in enumerate(drawn)])
    pq.write_table(
        table,
        args.out,
        compression="zstd",
        compression_level=19,
        row_group_size=ROWS_PER_GROUP,
        write_page_checksum=True,
    )
    texts = [text for _, text in drawn]
    print(f"{args.out}: {len(texts)} documents, {sum(map(len, texts)):,} bytes, {args.out.stat().st_size:,} compressed")
    sample = texts[:2000]
    shares = [
        distinct_share(item for text in sample for item in parts_of(text)) for parts_of in (sentences, five_grams)
    ]
    print(f"of the first {len(sample)}: {shares[0]:.0%} of sentences and {shares[1]:.0%} of 5-grams are distinct")


if __name__ == "__main__":
    main()
