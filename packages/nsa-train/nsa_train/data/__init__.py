"""Data pipeline: document sources, tokenizers, resumable shuffling, packing, prepared shards, prefetching."""
