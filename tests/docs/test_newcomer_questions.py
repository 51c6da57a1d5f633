"""The site's search box leads newcomers to the page that answers, and the answer is there (docs/FINDING_PAGES.md)."""

import re
from pathlib import Path

import pytest

from tests.docs.conftest import ROOT
from tests.ops.needs import programs
from tools.docs.site_search import NEWCOMER_QUESTIONS, SHOWN, find_links, find_pages, line_of_answer

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def node():
    return programs("node")


@pytest.mark.parametrize("asked", NEWCOMER_QUESTIONS, ids=lambda asked: asked.question)
def test_a_question_finds_the_page_that_answers(site: Path, asked):
    pages = find_pages(site, asked.question)
    assert asked.page in pages[:SHOWN]
    assert line_of_answer(ROOT / "docs", asked) is not None


def test_the_example_of_the_answers_runs():
    (example,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/FAQ.md").read_text("utf-8"), re.M | re.S)
    names: dict[str, object] = {}
    exec(compile(example, "FAQ.md", "exec"), names)
    assert names["y"].shape == (2, 1000, 768)


def test_ten_questions_are_in_words_that_are_not_headings():
    headings = {
        line.lstrip("# ").rstrip("?").lower()
        for page in (ROOT / "docs").rglob("*.md")
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    }
    questions = [asked.question.lower() for asked in NEWCOMER_QUESTIONS]
    assert len(set(questions)) == 20
    assert [question for question in questions[10:] if any(question in heading for heading in headings)] == []


def test_a_result_leads_to_the_heading_that_has_the_words(site: Path):
    assert find_links(site, ["how can I resume"])[0][0] == "FAQ#how-do-i-resume-a-run"


def test_a_word_that_no_page_has_does_not_hide_the_others(site: Path):
    assert find_pages(site, "zebra tokenizer")[0] == find_pages(site, "tokenizer")[0]


def test_unknown_words_find_no_page(site: Path):
    assert find_pages(site, "zebra giraffe") == []


def test_the_page_of_questions_is_not_a_result(site: Path):
    assert "FINDING_PAGES" not in find_pages(site, "can a newcomer find it")
