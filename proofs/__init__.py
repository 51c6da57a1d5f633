"""Checks that only a checkout runs: fault drills, PTX emulator, GPU performance model, compile reports, planted bugs,
sanitizers, load and soak tests, supply chain.
"""

import os
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


def with_checkout(environment: dict[str, str]) -> dict[str, str]:
    """Add the checkout to `PYTHONPATH`, so that programs of this package start in any folder."""
    paths = [str(CHECKOUT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
