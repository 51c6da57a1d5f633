"""docs/RUNBOOK.md says what to do about every condition; scripts with older names still work.

The commands of the runbook run in test_user_pages.py.
"""

from pathlib import Path

import pytest

from nsa_train.watch.conditions import CONDITIONS
from tests.docs.blocks import ROOT, run_page
from tests.wheel_install import WheelInstall


def test_every_condition_has_its_place_and_its_advice():
    text = (ROOT / "docs" / "RUNBOOK.md").read_text(encoding="utf-8")
    for name in CONDITIONS:
        assert f'<a id="{name}"></a>' in text, f"run python -m tools.docs.regenerate: {name} is missing"


@pytest.mark.nightly  # a new process for every command
@pytest.mark.timeout(900)
def test_older_scripts_work_in_a_checkout(installed: WheelInstall, tmp_path: Path):
    for name in ("configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    run_page(ROOT / "docs" / "OLDER_NAMES.md", tmp_path, installed.venv / "bin", timeout_s=880)
