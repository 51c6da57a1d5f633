"""The description of a run: `load` makes a frozen `RunConfig`, each value with its origin. Needs no torch."""

from nsa.config.load import load
from nsa.config.schema import RunConfig

__all__ = ["RunConfig", "load"]
