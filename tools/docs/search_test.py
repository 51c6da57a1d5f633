"""docs/FINDING_CODE.md: can a newcomer find the code, and the page of the documentation (`tools.docs.site_search`)?

Twenty questions about code, each searched with the first word one would try.

    python -m tools.docs.search_test       print the first three files that each search lists

A search lists the source files in the order in which a reader opens results: files with the term in their path, then
files with it in the first line, then by the number of lines that contain it. A question is answered if the expected
file comes first.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tools.docs import site_search

ROOT = Path(__file__).parents[2]
SUFFIXES = (".py", ".h", ".cpp")


@dataclass(frozen=True)
class SearchQuestion:
    question: str
    term: str
    """A regular expression, case-insensitive; a space also stands for an underscore or a hyphen."""
    expected: str
    """Path below nsa/."""
    where: str = ""
    """Search below this folder of nsa/ only."""


QUESTIONS = (
    SearchQuestion("a step with NaN gradients skipped", "nan grad", "train/engine/bad_step_hook.py", "train"),
    SearchQuestion("HTTP retried with back-off", "retry", "data/source/retry_policy.py"),
    SearchQuestion("top-n blocks chosen in C++", "top", "kernels/cpu/src/top_blocks.h", "kernels/cpu"),
    SearchQuestion("top-n blocks chosen in PyTorch", "top n", "kernels/portable/selection.py", "kernels/portable"),
    SearchQuestion("top-n blocks chosen in Triton", "top n", "kernels/triton/device/select.py", "kernels/triton"),
    SearchQuestion("RoPE applied", "rope", "core/rope.py"),
    SearchQuestion("a checkpoint written atomically", "atomic checkpoint", "checkpoint/folder.py"),
    SearchQuestion("SIGTERM of a run handled", "sigterm", "train/signal_handlers.py", "train"),
    SearchQuestion("the heartbeat written", "heartbeat", "observe/heartbeat.py"),
    SearchQuestion("a stall detected", "stall detect", "observe/watch/health.py"),
    SearchQuestion("W&B logged in the background", "background", "observe/export/background_logger.py"),
    SearchQuestion("documents packed", "packing", "data/rows/packing.py"),
    SearchQuestion("the shuffling order computed", "shuffling order", "data/permutation.py"),
    SearchQuestion("the learning-rate schedule built", "learning rate", "train/engine/build.py"),
    SearchQuestion("FSDP applied", "fsdp", "train/engine/build.py"),
    SearchQuestion("the KV cache appended", "kv cache", "core/kv_cache.py"),
    SearchQuestion("memory estimated", "memory estimate", "planning/estimate.py"),
    SearchQuestion("Prometheus metrics defined", "prometheus metric", "observe/export/run_metrics.py"),
    SearchQuestion("a backend selected", "backend", "kernels/registry.py", "kernels"),
    SearchQuestion("crashed ranks restarted", "restart", "train/launch/launcher.py"),
    SearchQuestion("the global batch size computed", "global batch size", "train/datasets.py"),
    SearchQuestion("exit codes defined", "exit code", "errors.py"),
)


def results(question: SearchQuestion) -> list[str]:
    """Files below nsa/, best first."""
    pattern = re.compile(question.term.replace(" ", "[ _-]"), re.IGNORECASE)
    found = []
    for file in sorted((ROOT / "nsa" / question.where).rglob("*")):
        if file.suffix not in SUFFIXES or file.name == "__init__.py":
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        name = str(file.relative_to(ROOT / "nsa"))
        if count := sum(bool(pattern.search(line)) for line in (name, *lines)):
            in_name, in_title = bool(pattern.search(name)), bool(pattern.search(lines[0]))
            found.append(((not in_name, not in_title, -count), name))
    return [name for _, name in sorted(found)]


def answered() -> list[SearchQuestion]:
    """Questions whose search lists the expected file first."""
    return [question for question in QUESTIONS if results(question)[:1] == [question.expected]]


def text() -> str:
    good = answered()
    lines = [
        "---",
        "nosearch: true",
        "---",
        "",
        "# Can a newcomer find it?",
        "",
        "## Pages",
        "",
        "Ten questions that a newcomer types into the search box of the documentation. A test builds the site and",
        "requires that the page is among the first three results and that the line is there. Written by",
        "`python -m tools.docs.regenerate`.",
        "",
        *site_search.table(),
        "",
        "## Code",
        "",
        "Twenty questions that an engineer new to this code asks (one of them about three backends), each with the",
        "first words to search for. A search lists files with the words in their path first, then files with them in",
        "their first line, then by the number of lines that contain them. A test requires that the expected file",
        "comes first for nine of ten.",
        "",
        f"**{len(good)} of {len(QUESTIONS)}** find the file first.",
        "",
        "| where is … | search for | file | comes |",
        "|---|---|---|---|",
    ]
    for question in QUESTIONS:
        found = results(question)
        place = found.index(question.expected) + 1 if question.expected in found else None
        link = f"[{question.expected}](../nsa/{question.expected})"
        term = f"`{question.term}`" + (f" in `nsa/{question.where}`" if question.where else "")
        lines.append(f"| {question.question} | {term} | {link} | {'first' if place == 1 else place or 'not found'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for question in QUESTIONS:
        found = results(question)
        mark = " " if found[:1] == [question.expected] else "✗"
        print(f"{mark} {question.question}: {question.term!r} → {', '.join(found[:3])}")
