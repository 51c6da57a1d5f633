"""Outputs of `nsa plan` for the shipped configs of many GPUs: docs/plans/*.txt."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from nsa_train.cli.plan import print_plan
from nsa_train.config import load
from nsa_train.planning.hardware import parse_target
from nsa_train.planning.layout_plan import plan_layouts

ROOT = Path(__file__).parents[2]
PLANNED = {"base_1b_32k": "h100-80gb:8", "base_7b_128k": "h100-80gb:128", "base_7b_1m": "h100-80gb:1024"}
"""Config, and the GPUs it is for."""
_TOP = 8


def text(name: str) -> str:
    """The command, and what it prints."""
    config, target = load(ROOT / "configs" / f"{name}.yaml"), parse_target(PLANNED[name])
    assert config.model.vocab_size is not None
    out = io.StringIO()
    console = Console(file=out, width=120, markup=False, highlight=False)
    print_plan(console, config, plan_layouts(config, target, config.model.vocab_size), _TOP, None)
    lines = (line.rstrip() for line in out.getvalue().splitlines())
    return "\n".join((f"$ nsa plan configs/{name}.yaml --gpus {target}", *lines)) + "\n"


PAGES: dict[str, Callable[[], str]] = {f"docs/plans/{name}.txt": partial(text, name) for name in PLANNED}
