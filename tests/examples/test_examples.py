"""Every program and notebook of `examples/` runs in a process and folder of its own, and prints what it promises.

For every change the shorter ones are forked from a process that has imported torch; every night each is a new one.
"""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import fork_server
from tests.nsa_train.train.runs import environment

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RUN_NOTEBOOK = Path(__file__).with_name("run_notebook.py")
LONGEST = 100
NIGHTLY = pytest.mark.nightly


def run(folder: Path, *words: str, forked: bool = False) -> str:
    """Run Python where copies of the examples are; a new process sees of the checkout nothing but the packages."""
    for file in EXAMPLES.iterdir():
        if file.is_file() and not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    command = folder / "bin" / "nsa"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m nsa_train.cli "$@"\n')
    command.chmod(0o755)
    packages = [path for path in environment()["PYTHONPATH"].split(":") if path != str(ROOT)]
    if spec := find_spec("torchtitan"):
        packages.append(str(Path(spec.submodule_search_locations[0]).parent))
    path = f"{command.parent}:{os.environ['PATH']}"
    offline = dict(HF_HUB_OFFLINE="1", PATH=path, PYTHONPATH=":".join(packages))
    if forked:
        done = fork_server.run(list(words), cwd=folder, env=environment(**offline), timeout=550)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n--- stderr\n{done.stderr[-3000:]}"
        return done.stdout
    process = subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment(**offline), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        printed, errors = process.communicate(timeout=550)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks then
            process.wait()
    assert process.returncode == 0, f"{printed[-3000:]}\n--- stderr\n{errors[-3000:]}"
    return printed


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers that the group of a pattern matches, one or more."""
    values = [float(value) for value in re.findall(pattern, text, re.MULTILINE)]
    assert values, text
    return values


def table_rows(text: str) -> list[list[float]]:
    """Lines that consist of numbers: a step, then a loss of each model."""
    lines = (line.split() for line in text.splitlines())
    return [[float(word) for word in words] for words in lines if words and all(re.match(r"[\d.]+$", w) for w in words)]


def losses_fall(text: str) -> None:
    rows = table_rows(text)
    assert len(rows) >= 2
    assert all(last < first for first, last in zip(rows[0][1:], rows[-1][1:], strict=True))


def check_heat_map(text: str, folder: Path) -> None:
    hits, chance = numbers(r"first: (\d+)%", text)[0], numbers(r"chance: (\d+)%", text)[0]
    assert hits > 80 > 10 > chance
    assert len(list(xml.etree.ElementTree.parse(folder / "selection.svg").getroot())) > 500


def check_lora(text: str, folder: Path) -> None:
    losses = numbers(r"^step +\d+ +loss ([\d.]+)", text)
    assert losses[-1] < 0.1 < 4 < losses[0]
    assert "after:  'Sparse attention reads a few blocks" in text
    assert numbers(r"differ from the merged model's by ([\d.e+-]+)", text)[0] < 1e-3


def check_conversion(text: str, folder: Path) -> None:
    assert numbers(r"whole: ([\d.e+-]+)", text)[0] < 1e-4
    assert abs(numbers(r"dense ([\d.]+), sparse", text)[0] - numbers(r"untrained ([\d.]+)", text)[0]) < 0.05
    assert text.count("The last token reads [0, ") == 2  # a line per layer


def check_far_evaluation(text: str, folder: Path) -> None:
    assert len(re.findall(r"^ *[14],\d{3} +\d+% +\d+% +\d+% to +\d+% +(?:12|6)% +\d+% +(?:319|703) ", text, re.M)) == 12


def check_serving(text: str, folder: Path) -> None:
    answer, streamed = (re.search(rf"^{words}.*s: (['\"].*['\"])$", text, re.M) for words in ("answer", "streamed"))
    assert answer is not None
    assert streamed is not None
    assert len(answer[1]) > 50 < len(streamed[1])
    assert "max_tokens=0 is refused" in text
    assert re.search(r"^What do cows eat\? .*grass", text, re.M)
    assert "exit code 0" in text


def check_fsdp2(text: str, folder: Path) -> None:
    """Two ranks compute the losses of one, and each holds half of the weights."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    of_two = run(folder, *launcher, "train_with_fsdp2.py")
    for figure in (r"loss ([\d.]+)", r"norm ([\d.]+)"):
        alone, shared = numbers(figure, text), numbers(figure, of_two)
        assert len(alone) == 10
        assert shared == pytest.approx(alone, abs=2e-4)
    assert numbers(r"loss ([\d.]+)", text)[-1] < 4
    held, total = re.search(r"holds ([\d,]+) of ([\d,]+)", of_two).groups()
    assert int(held.replace(",", "")) * 2 == int(total.replace(",", ""))


def check_attention(text: str, folder: Path) -> None:
    assert numbers(r"single tokens: ([\d.e+-]+)", text)[0] < 1e-5
    assert " 64,000       3,999     1,024     512   5,535 " in text
    assert re.search(r"query 1800 reads the blocks \[0, .*\b4, 5,", text)
    assert text.count('fill="#1a6fb5"') > 300
    assert "finite differences agree: True" in text
    differences = numbers(r"^ *(?:q|k|v|gates)  ([\d.e+-]+)", text)
    assert len(differences) == 4
    assert max(differences) < 1e-3


def check_first_model(text: str, folder: Path) -> None:
    first, last, held_out = re.search(r"training ([\d.]+) to ([\d.]+), held out ([\d.]+)", text).groups()
    assert float(first) > 5 > 3.3 > max(float(last), float(held_out))
    assert text.count("<polyline") == 2
    assert re.search(r"^layer 0 +layer 1$", text, re.M)
    assert (folder / "my-model" / "model.safetensors").is_file()


class Example(NamedTuple):
    check: Callable[[str, Path], None]
    words: tuple[str, ...] = ()
    marks: tuple[pytest.MarkDecorator, ...] = ()
    needs: str | None = None
    """A package that is no dependency of the tests: without it the example is not run."""


# Nightly: more than half a minute on a busy machine.
ROWS = {
    "nanogpt.py": Example(lambda text, folder: losses_fall(text), ("--steps", "20", "--length", "128")),
    "selection_heat_map.py": Example(check_heat_map),
    "transformers_lora.py": Example(check_lora),
    "convert_dense.py": Example(check_conversion, ("20",)),
    "long_context_evaluation.py": Example(check_far_evaluation, marks=(NIGHTLY,)),
    "serve.py": Example(check_serving, marks=(NIGHTLY,)),
    "train_with_fsdp2.py": Example(check_fsdp2, marks=(NIGHTLY,)),
    "train_with_olmo_core.py": Example(lambda text, folder: losses_fall(text), marks=(NIGHTLY,)),
    # Run by `.ci/nightly torchtitan`.
    "train_with_torchtitan.py": Example(lambda text, folder: losses_fall(text), marks=(NIGHTLY,), needs="torchtitan"),
}


# Every second of `words` takes the place of the one before it: the same with less to compute. At night, as it is.
NOTEBOOKS = {
    "attention.ipynb": Example(
        check_attention, ("(1024, 2048, 4096, 8192)", "(1024, 2048)", "inputs(24,", "inputs(14,")
    ),
    "train_and_talk.ipynb": Example(check_first_model, ("steps = 300", "steps = 40"), (NIGHTLY,)),
}


def parameters(rows: Mapping[str, Example]) -> list:
    """Names, forked and as new processes."""
    there = {name: row for name, row in rows.items() if row.needs is None or find_spec(row.needs)}
    short = [name for name, row in there.items() if NIGHTLY not in row.marks]
    return [
        *(pytest.param(name, True, id=f"{name}, forked") for name in short),
        *(pytest.param(name, False, id=name, marks=NIGHTLY) for name in there),
    ]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "forked"), parameters(ROWS))
def test_it_runs_and_prints_what_it_promises(name: str, forked: bool, tmp_path: Path):
    row = ROWS[name]
    row.check(run(tmp_path, name, *row.words, forked=forked), tmp_path)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "forked"), parameters(NOTEBOOKS))
def test_the_notebook_runs_from_top_to_bottom(name: str, forked: bool, tmp_path: Path):
    row, text = NOTEBOOKS[name], (EXAMPLES / name).read_text(encoding="utf-8")
    for longer, shorter in zip(row.words[::2], row.words[1::2], strict=True):
        assert text.count(longer) == 1
        if forked or NIGHTLY in row.marks:
            text = text.replace(longer, shorter)
    (tmp_path / name).write_text(text, encoding="utf-8")
    row.check(run(tmp_path, str(RUN_NOTEBOOK), name, forked=forked), tmp_path)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_installs_first_and_has_no_outputs(name: str):
    cells = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert re.fullmatch(r"%pip install -q '?nsa-(attention|train\[train\])'?", "".join(code[0]["source"]))
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"]] == []


def test_every_file_has_a_row_and_a_line_of_the_readme():
    assert {path.name for path in EXAMPLES.glob("*.py")} == ROWS.keys()
    assert {path.name for path in EXAMPLES.glob("*.ipynb")} == NOTEBOOKS.keys()
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`([\w.]+)`\]\(([\w.]+)\)", page, re.MULTILINE)
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert {name for name, _ in listed} | {"README.md"} == files
    assert all(name == target for name, target in listed)


@pytest.mark.parametrize("name", ROWS)
def test_it_is_one_page_that_needs_no_checkout(name: str):
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST
    assert re.search(r"^pip install '?nsa-(attention|train)", text, re.MULTILINE), "the first lines say what to install"
    assert re.findall(r"^(?:from|import) (tests|tools|proofs|examples)\b", text, re.MULTILINE) == []
    assert "packages/" not in text
