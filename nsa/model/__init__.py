"""A language model around the attention: block, transformer, loss. Torch only."""
