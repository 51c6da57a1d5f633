"""Planting of bugs that are described by what they change in which function, for `proofs.mutation_drill`."""


class PlantingError(ValueError):
    """A bug cannot be planted: its function is not there, its pattern does not match it once, or it changes nothing."""
