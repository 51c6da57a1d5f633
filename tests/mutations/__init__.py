"""Bugs that the tests must catch, planted by `python -m tools.mutation_drill`."""

from typing import NamedTuple


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Test files that should go red, the likeliest first."""
    interpreted: bool = False
    """Whether they run under TRITON_INTERPRET=1."""
