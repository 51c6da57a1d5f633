"""Checks that only a checkout runs: fault drills, PTX emulator, GPU performance model, compile reports, planted bugs,
sanitizers, load and soak tests, supply chain.
"""

import os
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


def import_path(checkout: Path = CHECKOUT) -> str:
    """`PYTHONPATH` of programs that import the packages, tests and proofs of this checkout, also of a copy."""
    return os.pathsep.join(map(str, (checkout, *sorted(checkout.glob("packages/nsa-*")))))


def with_checkout(environment: dict[str, str]) -> dict[str, str]:
    """Add the checkout to `PYTHONPATH`, so that programs of this package start in any folder."""
    paths = [import_path(), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
