"""Transformers must not ask the network for anything."""

from tests.nsa.hf.conftest import offline

__all__ = ["offline"]
