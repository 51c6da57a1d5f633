"""Exit codes are a contract with schedulers and scripts: fixed values, documented in one table."""

import re
import subprocess
import sys
from pathlib import Path

import nsa.errors
from nsa.errors import ExitCode, NSAError

ROOT = Path(__file__).parents[1]


def test_the_values_never_change():
    assert {code.name: code.value for code in ExitCode} == {
        "DONE": 0,
        "FAILED": 1,
        "REFUSED": 2,
        "PREEMPTED": 10,
        "HALTED": 11,
        "REGROUP": 12,
        "REPLICAS_DIFFER": 16,
        "CONFIG": 20,
        "DATA": 21,
        "CHECKPOINT": 22,
        "NON_FINITE": 23,
        "HUNG": 24,
    }


def test_every_exception_has_a_code_of_the_table():
    kinds = [kind for kind in vars(nsa.errors).values() if isinstance(kind, type) and issubclass(kind, NSAError)]
    assert len(kinds) > 8
    assert all(isinstance(kind.exit_code, ExitCode) for kind in kinds)


def test_a_code_is_a_plain_number_to_the_shell_and_in_text():
    program = "import sys; from nsa.errors import ExitCode; sys.exit(ExitCode.HALTED)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 11
    assert f"exit {ExitCode.HALTED}" == "exit 11"


def test_the_runbook_lists_every_code():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (.+) \|$", (ROOT / "docs/RUNBOOK.md").read_text("utf-8"), re.M)
    assert [(int(value), name, meaning) for value, name, meaning in rows] == [
        (code.value, code.name, code.meaning) for code in ExitCode
    ]
