"""Training, conversion, evaluation and serving of language models with Native Sparse Attention; the command `nsa`."""

__version__ = "0.2.0"
