"""docs/FIRST_GPU.md shows what the commands print. They run in test_user_pages.py where they can run here."""

import re
from pathlib import Path

from nsa.kernels.choice_text import kernels_text
from nsa.kernels.registry import BRANCHES, BackendChoice

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "FIRST_GPU.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_lines_shown_are_those_that_the_commands_print():
    verified = tuple(BackendChoice(branch, "triton", verified=True) for branch in BRANCHES)
    assert f"kernels: {kernels_text(verified)}\n" in TEXT
    assert re.search(rf"^fact +self-check +kernels, bf16 +{re.escape(kernels_text(verified))}$", TEXT, re.MULTILINE)
    assert "**expected, not recorded**" in TEXT
