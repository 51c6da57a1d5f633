"""Text in, rows of tokens out: sources, tokenizers, the resumable order, packing and prepared shards."""
