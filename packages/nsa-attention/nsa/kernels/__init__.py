"""How a branch is computed. Knows tensors and sizes, nothing of models, documents or configuration."""
