"""Document sources: parquet, JSONL and text files, local, over HTTP or on the Hugging Face hub."""
