"""Training on the engine (OLMo-core): the only package that imports it."""
