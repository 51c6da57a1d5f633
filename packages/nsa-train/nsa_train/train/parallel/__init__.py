"""Division of one model among ranks that work on the same rows; data parallelism is the engine's own."""
