"""Backends that compute a branch. Know tensors and sizes, nothing of models, documents or configuration."""
