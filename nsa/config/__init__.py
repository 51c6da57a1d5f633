"""Configuration: `load` resolves a run to a frozen `RunConfig` that knows the origin of each value. Needs no torch."""

from nsa.config.load import load
from nsa.config.schema import RunConfig

__all__ = ["RunConfig", "load"]
