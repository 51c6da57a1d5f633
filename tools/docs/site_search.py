"""Search box of the documentation site: questions of newcomers, and what Sphinx's own search finds for them.

    python -m tools.docs.site_search build/docs        print the first pages for each question
    python -m tools.docs.site_search build/docs WORDS

`find_pages` evaluates the site's index (searchindex.js) by the rules of Sphinx's searchtools.js: every word of a query
that is not a stop word must occur; a heading that contains the query, then words in headings, then words in the text
decide the order, with the boosts of docs/_static/search_scorer.js. A test compares it with the JavaScript where node is
installed.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TITLE, PARTIAL_TITLE, TERM, PARTIAL_TERM = 15, 7, 5, 2
"""Scores of searchtools.js."""
SCORER = Path(__file__).parents[2] / "docs" / "_static" / "search_scorer.js"
SHOWN = 3
"""The expected page must be among this many."""


@dataclass(frozen=True)
class NewcomerQuestion:
    question: str
    page: str
    """Path below docs/, without suffix: one of the first results."""
    answer: str
    """Text of the line of that page which answers."""


NEWCOMER_QUESTIONS = (
    NewcomerQuestion("how do I use my own tokenizer", "FAQ", "prepare FOLDER OUT --tokenizer tokenizer.json`"),
    NewcomerQuestion("does it work with my GPU", "FAQ", "Nobody has run it on a GPU yet."),
    NewcomerQuestion("what does exit code 4 mean", "reference/EXIT_CODES", "exit code 4, does not come from"),
    NewcomerQuestion("how do I resume", "FAQ", "`nsa train CONFIG --resume` continues from the newest good checkpoint"),
    NewcomerQuestion("how much memory do I need", "FAQ", "`nsa estimate CONFIG --target a100-80gb:2` prints memory"),
    NewcomerQuestion("can I use it in my own model", "FAQ", "Yes: `NSAAttention` is a PyTorch module"),
    NewcomerQuestion("how do I stop a run", "FAQ", "Ctrl-C, or `nsa halt RUN` from another terminal"),
    NewcomerQuestion("my loss is NaN", "FAQ", "First lower `train.lr`"),
    NewcomerQuestion("how do I serve it", "GENERATE", "nsa serve --pretrained --port 8000"),
    NewcomerQuestion("how long until I see text", "FAQ", "A few minutes: the [tutorial](TUTORIAL.md)"),
)


def line_of_answer(docs: Path, question: NewcomerQuestion) -> int | None:
    """Number of the line that answers; None if the page does not have it."""
    lines = (docs / f"{question.page}.md").read_text(encoding="utf-8").splitlines()
    numbers = (number for number, line in enumerate(lines, 1) if question.answer in line)
    return next(numbers, None)


def read_index(site: Path) -> dict[str, Any]:
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index: dict[str, Any] = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    return index


def find_pages(index: dict[str, Any], query: str) -> list[str]:
    """Pages in the order of the result list, each once."""
    scorer = SCORER.read_text(encoding="utf-8")
    (boosts,) = re.findall(r"^  boosts: (\{.*\}),$", scorer, re.MULTILINE)
    (whole_title,) = re.findall(r"^  wholeTitle: (\d+),$", scorer, re.MULTILINE)
    matches = [
        (score + _boost(page, json.loads(boosts)), title, page)
        for score, title, page in _results(index, query, int(whole_title))
    ]
    ranked = sorted(matches, key=lambda result: (-result[0], result[1].lower()))
    return list(dict.fromkeys(page for _, _, page in ranked))


def _boost(page: str, boosts: dict[str, int]) -> int:
    matching = (name for name in boosts if page == name or (name.endswith("/") and page.startswith(name)))
    return sum(boosts[name] for name in matching)


def _results(index: dict[str, Any], query: str, whole_title: int) -> Iterator[tuple[int, str, str]]:
    """(score, title, page), in any order."""
    pages, titles, lowered = index["docnames"], index["titles"], query.lower().strip()
    for title, places in index["alltitles"].items():
        if lowered in title.lower() and len(lowered) >= len(title) / 2:
            for page, _ in places:
                own = titles[page] == title
                score = int(TITLE * len(lowered) / len(title) + 0.5) + own + whole_title
                yield score, title if own else f"{titles[page]} > {title}", pages[page]
    for page, score in _pages_with_all(index, _query_words(query)).items():
        yield score, titles[page], pages[page]


def _query_words(query: str) -> set[str]:
    """Stemmed, without stop words and numbers, as the search box reads a query."""
    from sphinx.search.en import SearchEnglish

    language = SearchEnglish({})
    words = (word.lower() for word in re.findall(r"\w+", query))
    return {language.stem(word) for word in words if word not in language.stopwords and not word.isdigit()}


def _pages_with_all(index: dict[str, Any], words: set[str]) -> dict[int, int]:
    """Pages that have every word, with the best score of a word."""
    scores: dict[int, dict[str, int]] = {}
    for word in words:
        for table, exact, partial in (("terms", TERM, PARTIAL_TERM), ("titleterms", TITLE, PARTIAL_TITLE)):
            entries = index[table]
            if word in entries:
                matches = [(exact, entries[word])]
            else:
                matches = [(partial, pages) for term, pages in entries.items() if len(word) > 2 and word in term]
            for score, match in matches:
                for page in [match] if isinstance(match, int) else match:
                    scores.setdefault(page, {})[word] = score
    long_words = sum(len(word) > 2 for word in words)
    return {page: max(by_word.values()) for page, by_word in scores.items() if len(by_word) in (len(words), long_words)}


def text() -> str:
    """docs/FINDING_PAGES.md."""
    docs = Path(__file__).parents[2] / "docs"
    lines = [
        "---",
        "nosearch: true",
        "---",
        "",
        "# Can a newcomer find it?",
        "",
        "Ten questions that a newcomer types into the search box of the documentation. A test builds the site and",
        "requires that the page is among the first three results and that the line is there. Written by",
        "`python -m tools.docs.regenerate`.",
        "",
        "| a newcomer types | page | line that answers |",
        "|---|---|---|",
    ]
    for question in NEWCOMER_QUESTIONS:
        number = line_of_answer(docs, question)
        answer = question.answer.replace("](", "] (")  # part of a link is no link
        lines.append(f"| {question.question} | [{question.page}]({question.page}.md) | {number}: {answer} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    index, words = read_index(Path(sys.argv[1])), " ".join(sys.argv[2:])
    if words:
        print("\n".join(find_pages(index, words)[:10]))
        return
    for question in NEWCOMER_QUESTIONS:
        shown = find_pages(index, question.question)[:SHOWN]
        print(f"{' ' if question.page in shown else '✗'} {question.question}: {', '.join(shown)}")


if __name__ == "__main__":
    main()
