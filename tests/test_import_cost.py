"""Importing what needs no torch stays quick, so that `nsa --help` and `nsa config` answer at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "numpy", "olmo_core", "datasets", "pyarrow", "transformers", "triton")


def import_in_a_new_process(module: str) -> tuple[float, set[str]]:
    """Seconds the import took, and the top-level names of everything it loaded."""
    code = (
        "import json, sys, time; start = time.perf_counter(); "
        f"import {module}; took = time.perf_counter() - start; "
        "print(json.dumps([took, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    took_s, loaded = json.loads(output)
    return took_s, set(loaded)


def test_the_package_itself_is_free():
    # The best of three: the question is what the import costs, not how busy the machine is.
    assert min(import_in_a_new_process("nsa")[0] for _ in range(3)) < 0.1
    assert not import_in_a_new_process("nsa")[1] & {*HEAVY, "pydantic", "yaml", "typer", "rich"}


@pytest.mark.parametrize("module", ["nsa.errors", "nsa.config", "nsa.config.docs", "nsa.cli.main", "nsa.cli.config"])
def test_nothing_heavy_is_imported(module):
    assert not import_in_a_new_process(module)[1] & set(HEAVY)


def test_the_command_line_does_not_load_the_settings_before_it_needs_them():
    assert "pydantic" not in import_in_a_new_process("nsa.cli.main")[1]
