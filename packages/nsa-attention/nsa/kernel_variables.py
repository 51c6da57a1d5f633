"""NSA_KERNEL and NSA_KERNEL_<BRANCH>: kernel backends requested by environment variables. Needs no torch.

They hold for the library (`NSAAttention`, `nsa_attention`, …) and `nsa doctor`, where an argument that names a backend
wins over them, and through `nsa_train.config.env` for the settings of a run, where the command line wins over them and
they win over the config file. The variable of one branch wins over NSA_KERNEL.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

ALL_BRANCHES = "NSA_KERNEL"


class _RequestedBackend(NamedTuple):
    name: str
    variable: str
    """Where it was requested."""


def variable_of(branch: str) -> str:
    """The variable of one branch."""
    return f"{ALL_BRANCHES}_{branch.upper()}"


def requested_backends(branches: Iterable[str]) -> dict[str, _RequestedBackend]:
    """Backends by branch that the environment of this process requests now; an empty variable counts as unset."""
    requests = {}
    for branch in branches:
        for variable in (variable_of(branch), ALL_BRANCHES):
            if name := os.environ.get(variable, "").strip():
                requests[branch] = _RequestedBackend(name, variable)
                break
    return requests


@contextmanager
def requested(name: str) -> Iterator[None]:
    """Request a backend for all branches of models that are built within the block, as NSA_KERNEL would."""
    before = os.environ.get(ALL_BRANCHES)
    os.environ[ALL_BRANCHES] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[ALL_BRANCHES]
        else:
            os.environ[ALL_BRANCHES] = before
