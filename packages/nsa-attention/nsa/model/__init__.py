"""Language model with NSA layers: block, transformer, loss. Depends on torch only."""
