"""Datasets as fixed-length rows of tokens in one global order, with a data cursor independent of the world size."""
