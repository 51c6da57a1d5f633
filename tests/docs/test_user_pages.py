"""User pages work after `pip install`: their blocks run from the built wheels, in an empty folder.

README runs at every merge, the other pages at night.

What a page trains for minutes is shortened here; everything else is as printed.
"""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nsa.files import file_lock
from tests.docs.blocks import (
    ONLY_PARSED,
    ROOT,
    SERVE,
    all_blocks,
    blocks,
    code_of,
    nsa_commands,
    run_page,
    unknown_words,
    user_pages,
)
from tests.wheel_install import WheelInstall

PAGES = user_pages()
README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "TUTORIAL.md"
AFTER_TUTORIAL = {"EVAL", "TRANSFORMERS", "VLLM"}
"""Pages that use the run of the tutorial, as they say themselves."""
HARNESS = {"--metadata", "--model_args"}
"""Options that `nsa eval --lm-eval` passes on."""
OF_A_CHECKOUT = re.compile(
    r"python -m (tools|proofs|experiments|bench|tests)\b|pytest|\.ci/|scripts/|packages/nsa|tests/"
)
FEW_STEPS = (
    "train.steps=4 train.warmup_steps=1 train.log_every=2 train.eval_every=4 train.eval_batches=2 train.save_every=4"
)
SHORTER = {
    "README": {
        "nsa demo ": "nsa demo --steps 2 ",
    },
    "index": {
        "nsa train my-run/config.yaml": f"nsa train my-run/config.yaml {FEW_STEPS}",
        "nsa generate my-run/run": "nsa generate my-run/run --max-new-tokens 8",
    },
    "TUTORIAL": {
        "nsa train my-run/config.yaml": f"nsa train my-run/config.yaml {FEW_STEPS}",
        "nsa generate my-run/run": "nsa generate my-run/run --max-new-tokens 8",
        "--tasks held_out_loss": "--tasks held_out_loss --rows 4",
    },
    "GENERATE": {
        "nsa train cpu_stories": f"nsa train cpu_stories {FEW_STEPS}",
    },
    "EVAL": {"train.out_dir=my-run/dense": f"train.out_dir=my-run/dense {FEW_STEPS}"},
}
OUTPUTS = {
    "TUTORIAL": ["my-run/report.html", "my-model/model.safetensors"],
    "EVAL": ["my-run/run/evaluations/step4.json"],
    "TRANSFORMERS": ["tuned/adapter/adapter_model.safetensors"],
    "FIRST_GPU": ["artifacts/rehearsal.zip", "artifacts/first_cpu/model.pt"],
}


def write_own_text(folder: Path) -> None:
    """The folder of files that OWN_TEXT.md reads, of every kind."""
    texts = folder / "my_texts"
    paragraphs = (ROOT / "docs" / "WALKTHROUGH.md").read_text(encoding="utf-8").split("\n\n")
    (texts / "deep").mkdir(parents=True)
    for number, paragraph in enumerate(paragraphs):
        ending = ("md", "txt", "html")[number % 3]
        (texts / "deep" / f"{number}.{ending}").write_text(paragraph, encoding="utf-8")
    (texts / "copy.txt").write_text(paragraphs[1], encoding="utf-8")
    (texts / "lines.jsonl").write_text("\n".join(json.dumps({"text": paragraph}) for paragraph in paragraphs))
    (texts / "old.txt").write_bytes("naïve café".encode("cp1252"))
    (texts / "scan.pdf").write_bytes(b"%PDF")


def check_demo(folder: Path, printed: str) -> None:
    """The only test of the demo's results for every change: tests/nsa_train/cli/test_demo.py stops it, at night."""
    assert "$ nsa data tokenizer train nsa-demo/text nsa-demo/bpe.json" in printed
    assert (folder / "nsa-demo/run/report.html").stat().st_size > 10_000
    picture = ElementTree.parse(folder / "nsa-demo/selection.svg").getroot()
    words = [text.text or "" for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [each for each in words if each.startswith("layer ")] == [f"layer {i}" for i in range(4)]
    assert re.search(r"^step 1 writes: Once upon .*\n(.*\n)*step 2 writes: Once upon ", printed, re.MULTILINE)
    assert "nsa init my-run" in printed


def check_own_text(folder: Path, printed: str) -> None:
    summary = json.loads((folder / "artifacts" / "summary.json").read_text())
    assert set(summary["read"]["kinds"]) == {"jsonl", "text", "markdown", "html"}
    assert {"unknown ending", "duplicate documents"} <= set(summary["read"]["skipped"])
    assert summary["read"]["encodings"]["cp1252"]["first"] == ["old.txt"]
    env = json.loads((folder / "artifacts" / "mine_run" / "env.json").read_text())
    assert env["tokenizer"]["vocab_size"] == 257


BEFORE: dict[str, Callable[[Path], None]] = {"OWN_TEXT": write_own_text}
CHECKS: dict[str, Callable[[Path, str], None]] = {"README": check_demo, "OWN_TEXT": check_own_text}
"""Page → check of its folder and of what its blocks printed."""


def _cases() -> list[object]:
    nightly = [pytest.mark.nightly]  # minutes: a new process for every command, and training runs
    pages = [page for page in PAGES if any(block.runs for block in all_blocks(page))]
    return [pytest.param(page, id=page.stem, marks=[] if page == README else nightly) for page in pages]


@pytest.fixture(scope="session")
def tutorial_folder(installed: WheelInstall, session_folder: Path) -> Path:
    """The folder of a reader who did the tutorial, shortened."""
    folder, done = session_folder / "tutorial", session_folder / "tutorial_done"
    with file_lock(session_folder / "tutorial.lock"):
        if not done.exists():
            folder.mkdir()
            run_page(TUTORIAL, folder, installed.venv / "bin", timeout_s=3500, replace=SHORTER["TUTORIAL"])
            done.touch()
    return folder


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", _cases())
def test_every_block_runs_from_the_wheels(page: Path, installed: WheelInstall, tmp_path: Path, request):
    pytest.importorskip("olmo_core", reason="the engine is in the train extra")
    pytest.importorskip("transformers", reason="Transformers is in the hf extra")
    if page.stem in BEFORE:
        BEFORE[page.stem](tmp_path)
    replace = dict(SHORTER.get(page.stem, {}))
    if any(block.needs == SERVE for block in blocks(page)):
        with socket.create_server(("127.0.0.1", 0)) as free:
            replace["8000"] = str(free.getsockname()[1])
    if page.stem in AFTER_TUTORIAL or page == TUTORIAL:
        shutil.copytree(request.getfixturevalue("tutorial_folder"), tmp_path, dirs_exist_ok=True, symlinks=True)
    printed = ""
    if page != TUTORIAL:
        printed = run_page(page, tmp_path, installed.venv / "bin", timeout_s=3500, replace=replace)
    assert [name for name in OUTPUTS.get(page.stem, []) if not (tmp_path / name).is_file()] == []
    if page.stem in CHECKS:
        CHECKS[page.stem](tmp_path, printed)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_tutorial_learns_what_it_says(installed, tmp_path):
    """Nothing shortened."""
    run_page(TUTORIAL, tmp_path, installed.venv / "bin", timeout_s=3500)
    (row,) = (tmp_path / "my-run" / "run" / "val.csv").read_text().splitlines()[-1:]
    assert float(row.split(",")[1]) < 0.9


def test_the_pages_are_those_that_people_are_sent_to():
    names = {page.stem for page in PAGES}
    assert {
        "README",
        "index",
        "TUTORIAL",
        "OWN_TEXT",
        "GENERATE",
        "EXPORT",
        "CONVERT",
        "TRANSFORMERS",
        "VLLM",
        "EVAL",
    } <= names
    assert {"RUNBOOK", "HOW_TO", "FAQ", "COMING_FROM", "FIRST_GPU"} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_code_of_a_page_needs_a_checkout(page: Path):
    assert [code for code in code_of(page) if OF_A_CHECKOUT.search(code)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_parses_and_names_commands_that_exist(page: Path):
    for block in all_blocks(page):
        assert block.needs in ("", SERVE, *ONLY_PARSED), f"line {block.line}: {block.needs}"
        if block.language == "python":
            compile(block.code, page.name, "exec")
            continue
        subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
        for words in nsa_commands(block.code):
            passed_on = HARNESS if "--lm-eval" in words else set()
            assert unknown_words([word for word in words if word not in passed_on]) is None, (
                f"line {block.line}: {words}"
            )


def test_torch_is_pinned_wherever_the_trainer_is_installed():
    (pin,) = re.findall(r"^pip install (torch==\S+)", README.read_text(encoding="utf-8"), re.MULTILINE)
    for page in PAGES:
        for block in blocks(page):
            if "[train" in block.code:
                assert pin in block.code, f"{page.name} line {block.line}"
