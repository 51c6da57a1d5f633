"""docs/TUTORIAL.md: few commands, one for every step. They run in test_user_pages.py."""

from tests.docs.blocks import ROOT, blocks, nsa_commands

PAGE = ROOT / "docs" / "TUTORIAL.md"
MOST_COMMANDS = 10


def lines_of(needs: str) -> list[str]:
    return [line for block in blocks(PAGE) if block.needs == needs for line in block.code.splitlines() if line.strip()]


def test_it_takes_ten_commands_at_most():
    assert 0 < len(lines_of("")) + len(lines_of("install")[1:]) <= MOST_COMMANDS


def test_the_steps_are_those_of_the_issue():
    """Own text, train, watch, evaluate, generate, share: a command for each."""
    words = [command for line in lines_of("") for command in nsa_commands(line)]
    assert [each[0] for each in words] == [
        "init", "data", "data", "train", "monitor", "report", "eval", "generate", "export",
    ]  # fmt: skip
