"""The mutation drill reports what its tests catch, what survives, and what could not be planted."""

import pytest

from proofs import mutation_drill
from tests.mutations import Mutation, MutationTable

VALUES = ("tests/test_errors.py::test_the_values_never_change",)
BUGS = [
    Mutation("errors: another value", "nsa/errors.py", "PREEMPTED = 10,", "PREEMPTED = 99,", VALUES),
    Mutation("errors: another text", "nsa/errors.py", 'DONE = 0, "finished"', 'DONE = 0, "ended"', VALUES),
    Mutation("errors: text that is not there", "nsa/errors.py", "no such text", "", VALUES),
]


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    monkeypatch.setattr(mutation_drill, "load_tables", lambda: [MutationTable("errors", "Bugs.", BUGS)])


def drill(monkeypatch, *args: str) -> int:
    monkeypatch.setattr("sys.argv", ["mutation_drill", *args])
    with pytest.raises(SystemExit) as ended:
        mutation_drill.main()
    return int(ended.value.code or 0)


def test_a_line_for_each_and_the_survivors_at_the_end(monkeypatch, capsys):
    source = (mutation_drill.ROOT / "nsa/errors.py").read_bytes()
    assert drill(monkeypatch, "-n", "1") == 1
    progress, _, summary = capsys.readouterr().out.partition("\n\n")
    lines = progress.splitlines()
    assert [line.split()[1:3] for line in lines] == [["1/3]", "caught"], ["2/3]", "SURVIVED"], ["3/3]", "INVALID"]]
    assert all("min left" in line for line in lines)
    assert [line.split(" (")[0] for line in summary.splitlines()[1:]] == [
        "SURVIVED: errors: another text",
        "INVALID: errors: text that is not there",
    ]
    assert (mutation_drill.ROOT / "nsa/errors.py").read_bytes() == source


def test_exit_code_0_if_all_are_caught(monkeypatch):
    assert drill(monkeypatch, "errors", "-k", "another value") == 0


@pytest.mark.parametrize("args", [["no_such_table"], ["-k", "no such name"]])
def test_a_choice_of_nothing_is_an_error(monkeypatch, args):
    assert drill(monkeypatch, *args) == 2


def test_help_describes_tables_results_and_exit_codes(monkeypatch, capsys):
    assert drill(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("errors", "3 mutations", "caught", "SURVIVED", "INVALID", "exit code"))
