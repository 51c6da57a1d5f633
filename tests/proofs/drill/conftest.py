"""Without the engine (the extra `train`) the tests that import it are left out."""

import os
from importlib.util import find_spec

import pytest

from nsa.errors import ConfigError
from proofs.drill.node_network import unshare_options

if find_spec("olmo_core") is None:
    collect_ignore_glob = ["*"]


@pytest.fixture(scope="session")
def permitted() -> None:
    """Skip where nodes in network namespaces cannot be made; CI must be able to make them."""
    try:
        unshare_options()
    except ConfigError as problem:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(problem))
