"""Subclasses and overrides of the training engine (OLMo-core)."""
