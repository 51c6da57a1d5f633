"""Links in the documentation lead to files that exist, and linked symbols to files that define them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "ops").glob("*.md")]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*\]\([^`\n]*`", re.MULTILINE | re.DOTALL)  # what looks like a link in code
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path):
    prose = CODE.sub("", page.read_text(encoding="utf-8"))
    links = [target for _, target in LINK.findall(prose) if "://" not in target]
    assert [target for target in links if not (page.parent / target).exists()] == []


def test_the_walkthrough_links_symbols_to_the_files_that_define_them():
    page = ROOT / "docs" / "WALKTHROUGH.md"
    links = [(text.strip("`"), page.parent / target) for text, target in LINK.findall(page.read_text(encoding="utf-8"))]
    symbols = [(name, file) for name, file in links if file.suffix == ".py" and file.name != "__init__.py"]
    assert len(symbols) > 30
    missing = [
        f"{name} in {file}"
        for name, file in symbols
        if not re.search(rf"^\s*(?:def|class) {re.escape(name)}\b", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert missing == []
