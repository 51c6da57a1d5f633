"""docs/OWN_TEXT.md: its table names what is read. Its commands run in test_user_pages.py."""

import re

from nsa_train.data.source.file import SUFFIXES
from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "OWN_TEXT.md"


def test_the_table_names_every_ending():
    rows = re.findall(r"^\| (`\..*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {ending for row in rows for ending in re.findall(r"`(\.[\w.]+)`", row)} == set(SUFFIXES)
