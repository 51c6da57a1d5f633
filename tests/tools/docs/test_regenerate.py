"""Every generated page is what the code writes now."""

import re
from pathlib import Path

from tests import fork_server
from tests.nsa_train.train.runs import environment
from tools.docs import regenerate

ROOT = Path(__file__).parents[3]


def test_no_generated_page_is_stale():
    done = fork_server.run(["-m", "tools.docs.regenerate", "--check"], cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_and_a_missing_page_are_found(monkeypatch, tmp_path):
    monkeypatch.setattr(regenerate, "ROOT", tmp_path)
    (tmp_path / "old.md").write_text("before")
    (tmp_path / "fresh.md").write_text("now")
    assert regenerate.stale({"old.md": "now", "fresh.md": "now", "missing.md": "now"}) == ["old.md", "missing.md"]


def test_pages_that_name_a_command_are_regenerated():
    """A page that says it is written by code is in the list."""
    noted = {
        str(path.relative_to(ROOT))
        for path in (*ROOT.glob("docs/**/*.md"), *ROOT.glob("ops/**/*.yml"))
        if re.search("<!-- Written by `|ritten by `nsa", path.read_text(encoding="utf-8"))
    }
    assert noted <= regenerate.PAGES.keys()
