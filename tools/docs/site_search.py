"""Search box of the documentation site: questions of newcomers, and the pages that it finds for them.

    python -m tools.docs.site_search build/docs        print the first pages for each question; needs node
    python -m tools.docs.site_search build/docs WORDS

`find_pages` runs the site's own scripts in node. docs/_static/search_scorer.js decides the order of the results.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SHOWN = 3
"""The expected page must be among this many."""

# The scripts of search.html in its order, without a browser: the few names of one that they touch are replaced.
_SEARCH_IN_NODE = """
const fs = require("fs"), vm = require("vm");
const [site, ...queries] = process.argv.slice(2);
const context = {
  SPHINX_HIGHLIGHT_ENABLED: false, DOCUMENTATION_OPTIONS: {}, _: (text) => text, _ready: () => {}, console,
  document: { getElementById: () => null, addEventListener: () => {}, readyState: "complete" },
};
context.window = context;
vm.createContext(context);
for (const name of ["_static/searchtools.js", "_static/language_data.js", "searchindex.js"])
  vm.runInContext(fs.readFileSync(`${site}/${name}`, "utf-8").replace(/^const Search = /m, "var Search = "), context);
const links = queries.map((query) =>
  context.Search._performSearch(...context.Search._parseQuery(query)).reverse().map(([page, , anchor]) => page + anchor)
);
console.log(JSON.stringify(links));
"""


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
    # Words that are not headings: everyday words for what the pages call otherwise.
    NewcomerQuestion("gpu ran out of memory what can I do", "FAQ", "a smaller `train.batch_size`"),
    NewcomerQuestion("loss suddenly jumped up", "FAQ", "A loss that suddenly jumps"),
    NewcomerQuestion("power went out, continue where it stopped", "FAQ", "after a crash, a power cut"),
    NewcomerQuestion("why is it slower than normal attention", "FAQ", "slower than normal, dense attention"),
    NewcomerQuestion("how many gpus and days do I need", "SCALE", "nsa plan base_7b_128k --gpus h100-80gb:128"),
    NewcomerQuestion("my text is chinese", "FAQ", "Train a tokenizer on your own text"),
    NewcomerQuestion("send my model to a friend", "FAQ", "`nsa export hf RUN OUT` writes a folder"),
    NewcomerQuestion("turn llama into sparse", "FAQ", "`nsa convert MODEL OUT` keeps its weights"),
    NewcomerQuestion("does it remember the start of a long document", "FAQ", "measures what your model remembers"),
    NewcomerQuestion("talk to the model I trained", "GENERATE", "`nsa chat` talks to a model"),
)


def line_of_answer(docs: Path, question: NewcomerQuestion) -> int | None:
    """Number of the line that answers; None if the page does not have it."""
    lines = (docs / f"{question.page}.md").read_text(encoding="utf-8").splitlines()
    numbers = (number for number, line in enumerate(lines, 1) if question.answer in line)
    return next(numbers, None)


def find_links(site: Path, queries: list[str]) -> list[list[str]]:
    """Results of each query in their order: pages, some with the anchor of a heading."""
    node = shutil.which("node")
    if node is None:
        raise SystemExit("node not found: the site's search is JavaScript. Install it, e.g. apt-get install nodejs.")
    command = [node, "-", str(site), *queries]
    done = subprocess.run(command, input=_SEARCH_IN_NODE, text=True, capture_output=True, check=True)
    links: list[list[str]] = json.loads(done.stdout)
    return links


def find_pages(site: Path, query: str) -> list[str]:
    """Pages in the order of the result list, each once."""
    return list(dict.fromkeys(link.partition("#")[0] for link in find_links(site, [query])[0]))


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
        "Questions that a newcomer types into the search box of the documentation; the last ten are in words that are",
        "not headings. A test builds the site, searches it with the site's own scripts, and requires that the page is",
        "among the first three results and that the line is there. Written by `python -m tools.docs.regenerate`.",
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
    site, words = Path(sys.argv[1]), " ".join(sys.argv[2:])
    if words:
        print("\n".join(find_links(site, [words])[0][:10]))
        return
    right = 0
    for question in NEWCOMER_QUESTIONS:
        shown = find_pages(site, question.question)[:SHOWN]
        right += question.page in shown
        print(f"{' ' if question.page in shown else '✗'} {question.question}: {', '.join(shown)}")
    print(f"{right} of {len(NEWCOMER_QUESTIONS)} among the first {SHOWN}")


if __name__ == "__main__":
    main()
