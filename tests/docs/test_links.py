"""Links in the documentation lead to files that exist, and linked symbols to files that define them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(page for name in ("docs", "examples", "ops") for page in (ROOT / name).rglob("*.md"))]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*\]\([^`\n]*`", re.MULTILINE | re.DOTALL)  # what looks like a link in code
ON_GITHUB = "../../actions/"  # a page of the repository's site, as README's badges
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_every_link_leads_to_a_file():
    assert len(PAGES) > 40
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for _, target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
        if "://" not in target and not target.startswith(ON_GITHUB) and not (page.parent / target).exists()
    ]
    assert broken == []


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
