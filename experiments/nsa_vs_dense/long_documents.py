"""Keep the long documents of a folder of parquet files, so that rows of 16k tokens hold one document each.

python -m experiments.nsa_vs_dense.long_documents artifacts/demo artifacts/demo_long --at-least 50000
"""

import argparse
import json
from pathlib import Path

import pyarrow.parquet as parquet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of parquet files with a column text")
    parser.add_argument("out", type=Path, help="folder for documents.jsonl")
    parser.add_argument("--at-least", type=int, default=50_000, help="characters of a document (default 50,000)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    n_documents = characters = 0
    with open(options.out / "documents.jsonl", "w", encoding="utf-8") as file:
        for path in sorted(options.source.glob("*.parquet")):
            for text in parquet.read_table(path, columns=["text"])["text"].to_pylist():
                if len(text) >= options.at_least:
                    file.write(json.dumps({"text": text}) + "\n")
                    n_documents, characters = n_documents + 1, characters + len(text)
    print(f"{n_documents:,} documents with {characters:,} characters in {options.out / 'documents.jsonl'}")


if __name__ == "__main__":
    main()
