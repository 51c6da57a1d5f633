"""How one model is divided among ranks that work on the same rows; data parallelism is the engine's own."""
