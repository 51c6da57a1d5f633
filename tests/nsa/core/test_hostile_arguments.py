"""No public argument reads or writes memory that is not its own: each is refused, or computed as the reference does.

The attacks run in a process of their own, because one that works may kill it.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nsa.core.hostile_arguments import ATTACKS, HARMLESS, REFUSED

ROOT = Path(__file__).parents[3]


@functools.cache
def outcomes() -> dict[str, str]:
    """Outcome of every attack; one that killed the process is followed by the rest in a new one."""
    outcome_of: dict[str, str] = {}
    while len(outcome_of) < len(ATTACKS):
        command = [sys.executable, "-m", "tests.nsa.core.hostile_arguments", str(len(outcome_of))]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
        assert lines, ended.stderr
        outcome_of |= {line["name"]: line["outcome"] for line in lines if line["outcome"] != "started"}
        if lines[-1]["outcome"] == "started":
            outcome_of[lines[-1]["name"]] = f"killed the process (code {ended.returncode}): {ended.stderr[-300:]}"
        elif ended.returncode:
            outcome_of[lines[-1]["name"]] = f"left the process broken (code {ended.returncode}): {ended.stderr[-300:]}"
    return outcome_of


@pytest.mark.parametrize("name", ATTACKS)
def test_no_argument_reaches_foreign_memory(name):
    assert outcomes()[name] in (REFUSED, HARMLESS)
