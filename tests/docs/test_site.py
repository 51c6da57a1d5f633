"""The documentation site: it builds without warnings, no page is left out, and every link in it leads somewhere."""

import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from proofs import import_path
from tests.docs.conftest import ROOT
from tests.ops.needs import programs

pytestmark = pytest.mark.nightly


class PageTargets(HTMLParser):
    """Links and anchors of one HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.links += [values[name] for name in ("href", "src") if name in values]


@cache
def targets(page: Path) -> PageTargets:
    return PageTargets(page.read_text(encoding="utf-8"))


def broken_links(site: Path) -> list[str]:
    """Links within the site to a missing file or anchor."""
    broken = []
    for page in sorted(site.rglob("*.html")):
        for link in targets(page).links:
            address, anchor = urldefrag(link)
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            file = (page.parent / unquote(address.partition("?")[0])).resolve() if address else page
            in_page = anchor and file.suffix == ".html" and file.is_file() and anchor not in targets(file).anchors
            if not file.exists() or in_page:
                broken.append(f"{page.relative_to(site)}: {link}")
    return broken


def test_every_page_is_built_and_listed(site: Path):
    sources = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert {name for name in sources if not (site / name.with_suffix(".html")).is_file()} == set()
    listed = {link.partition("#")[0] for link in targets(site / "index.html").links}
    assert {f"{name}.html" for name in sources if name != Path("index")} <= listed


def test_names_differ_on_file_systems_that_ignore_case(site: Path):
    """A page of ours must not take the place of one of Sphinx's own, such as search.html."""
    names = [path.relative_to(site).as_posix().lower() for path in site.rglob("*") if path.is_file()]
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_every_link_of_the_site_leads_to_a_file_and_an_anchor(site: Path):
    assert sum(len(targets(page).links) for page in site.rglob("*.html")) > 1000
    assert broken_links(site) == []


def test_a_broken_link_is_found(tmp_path: Path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">x</a><a href="b.html#gone">x</a><a href="c.html">x</a>')
    (tmp_path / "b.html").write_text('<p id="there">')
    assert broken_links(tmp_path) == ["a.html: b.html#gone", "a.html: c.html"]


def test_files_outside_docs_are_in_the_site(site: Path):
    link = "repository/packages/nsa-attention/nsa/core/rope.py.txt"
    assert link in targets(site / "WALKTHROUGH.html").links
    assert (site / link).read_text(encoding="utf-8") == (ROOT / "packages/nsa-attention/nsa/core/rope.py").read_text(
        encoding="utf-8"
    )
    listing = targets(site / "repository/ops/prometheus/index.html").links
    assert "rules.yml.txt" in listing


def test_the_site_loads_nothing_from_another_host(site: Path):
    class ResourceParser(HTMLParser):
        addresses: list[str]

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag in ("script", "link", "img", "iframe"):
                self.addresses += [
                    value for name, value in attrs if name in ("src", "href") and value and "//" in value
                ]

    for page in site.rglob("*.html"):
        parser = ResourceParser()
        parser.addresses = []
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.addresses == [], page


_MEASURE = """<script>document.fonts.ready.then(() => {
  const wrappers = [...document.querySelectorAll(".table-wrapper")];
  const tables = wrappers.filter(wrapper => wrapper.textContent.includes("meaning"));
  const boxes = tables.flatMap(table => [table, ...table.querySelectorAll("td")]);
  const cut = boxes.filter(box => box.scrollWidth > box.clientWidth + 1);
  const lines = (node, start, end) => {
    const range = document.createRange();
    range.setStart(node, start);
    range.setEnd(node, end);
    return new Set([...range.getClientRects()].filter(box => box.width > 0).map(box => Math.round(box.top))).size;
  };
  let broken = 0;
  for (const table of tables) {
    const walker = document.createTreeWalker(table, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode()); )
      for (const word of node.data.matchAll(/(?<![\\w.])[\\w.]{1,24}(?![\\w.])/g))
        broken += lines(node, word.index, word.index + word[0].length) > 1;
  }
  parent.postMessage([innerWidth, boxes.length, cut.length, broken].join(" "), "*");
})</script>"""
_FRAME = """<iframe src="{page}" width="{width}" height="900"></iframe>
<script>onmessage = message => document.body.dataset.widths = message.data</script>"""


@pytest.mark.parametrize("page", ["CONFIG", "ENV"])
@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_no_column_and_no_word_of_the_settings_is_cut(site: Path, page: str, width: int):
    """In a frame: a browser's own window is at least 500 pixels wide."""
    measured, frame = site / f"measured_{page}_{width}.html", site / f"frame_{page}_{width}.html"
    measured.write_text((site / f"{page}.html").read_text(encoding="utf-8").replace("</body>", f"{_MEASURE}</body>"))
    frame.write_text(_FRAME.format(page=measured.name, width=width))
    try:
        command = [programs("chromium")["chromium"], "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        words = ["--window-size=1600,1000", "--virtual-time-budget=5000", frame.as_uri()]
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=300, check=True)
    finally:
        measured.unlink()
        frame.unlink()
    match = re.search(r'data-widths="(\d+) (\d+) (\d+) (\d+)"', done.stdout)
    assert match, done.stderr[-2000:]
    shown, boxes, cut, broken = map(int, match.groups())
    assert shown == width
    assert boxes > 100
    assert cut == 0, "boxes whose content is wider than they are"
    assert broken == 0, "words of up to 24 letters that are broken over two lines"


def test_links_lead_to_the_repository_if_its_address_is_known(tmp_path: Path):
    """A small site with the same extension: its links go to the address, a missing file is a warning."""
    (tmp_path / "conf.py").write_text(
        "extensions = ['myst_parser', 'tools.docs.repository_links']\nrepository_url = 'https://example.org/blob/main'\n"
    )
    (tmp_path / "index.md").write_text(
        "# Page\n\n[code](../packages/nsa-attention/nsa/errors.py) [folder](../ops/grafana)\n"
    )
    command = [sys.executable, "-m", "sphinx", "-W", "-q", tmp_path, tmp_path / "out"]
    subprocess.run(command, cwd=ROOT, check=True, env={"PYTHONPATH": import_path()})
    links = targets(tmp_path / "out" / "index.html").links
    assert {
        "https://example.org/blob/main/packages/nsa-attention/nsa/errors.py",
        "https://example.org/blob/main/ops/grafana",
    } <= set(links)
    assert not (tmp_path / "out" / "repository").exists()
    (tmp_path / "index.md").write_text("# Page\n\n[code](../nsa/missing.py)\n")
    assert subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": import_path()}, capture_output=True).returncode != 0
