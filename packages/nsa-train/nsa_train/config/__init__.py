"""Configuration: `load` resolves a run to a frozen `RunConfig` that knows the origin of each value. Needs no torch."""

from nsa_train.config.load import load
from nsa_train.config.schema import RunConfig

__all__ = ["RunConfig", "load"]
