"""The site's search box leads newcomers to the page that answers, and the answer is there (docs/FINDING_PAGES.md)."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.conftest import ROOT
from tools.docs.site_search import NEWCOMER_QUESTIONS, SHOWN, find_pages, line_of_answer, read_index

pytestmark = pytest.mark.nightly
SHORT_QUERIES = ("own tokenizer", "nan loss", "resume", "stop run", "serve", "exit code", "memory", "glossary", "phi")

# Runs the site's own scripts without a browser: the few names of one that they touch are replaced.
SEARCH_IN_NODE = """
const fs = require("fs"), vm = require("vm");
const [site, ...queries] = process.argv.slice(2);
const context = {
  SPHINX_HIGHLIGHT_ENABLED: false, DOCUMENTATION_OPTIONS: {}, _: (text) => text, _ready: () => {}, console,
  document: { getElementById: () => null, addEventListener: () => {}, readyState: "complete" },
};
context.window = context;
vm.createContext(context);
for (const name of ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"])
  vm.runInContext(fs.readFileSync(`${site}/${name}`, "utf-8").replace(/^const Search = /m, "var Search = "), context);
const pages = queries.map((query) => {
  const results = context.Search._performSearch(...context.Search._parseQuery(query));
  return [...new Set(results.reverse().map((result) => result[0]))];
});
console.log(JSON.stringify(pages));
"""


@pytest.mark.parametrize("asked", NEWCOMER_QUESTIONS, ids=lambda asked: asked.question)
def test_a_question_finds_the_page_that_answers(site: Path, asked):
    pages = find_pages(read_index(site), asked.question)
    assert asked.page in pages[:SHOWN]
    assert line_of_answer(ROOT / "docs", asked) is not None


def test_the_example_of_the_answers_runs():
    (example,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/FAQ.md").read_text("utf-8"), re.M | re.S)
    names: dict[str, object] = {}
    exec(compile(example, "FAQ.md", "exec"), names)
    assert names["y"].shape == (2, 1000, 768)


def test_there_are_ten_questions():
    assert len({asked.question for asked in NEWCOMER_QUESTIONS}) == 10


def test_unknown_words_find_no_page(site: Path):
    assert find_pages(read_index(site), "zebra crossing") == []


def test_the_page_of_questions_is_not_a_result(site: Path):
    assert "FINDING_PAGES" not in find_pages(read_index(site), "can a newcomer find it")


def test_the_order_is_that_of_the_sites_own_script(site: Path):
    if shutil.which("node") is None:
        pytest.skip("needs node to run the site's JavaScript")
    queries = [*(asked.question for asked in NEWCOMER_QUESTIONS), *SHORT_QUERIES]
    done = subprocess.run(
        ["node", "-", site, *queries], input=SEARCH_IN_NODE, text=True, capture_output=True, check=True
    )
    expected = json.loads(done.stdout)
    index = read_index(site)
    for query, pages in zip(queries, expected, strict=True):
        assert find_pages(index, query)[:SHOWN] == pages[:SHOWN], query
