"""The table of `tools.compare_generation`: a difference between two ways is seen, with its position and margin."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="generation is in the hf extra")

from tests.trained_runs import write_run
from tools.compare_generation import GreedyAnswer, ReferenceAnswer, make_prompts, table

LOGITS = torch.tensor([[5.0, 1.0, 0.0], [0.0, 2.0, 1.75], [0.0, 0.0, 9.0]])
REFERENCE = ReferenceAnswer("x", 1, "abc", [0, 1, 2], LOGITS)


def letters(text: str) -> list[int]:
    return ["abc".index(letter) for letter in text]


@pytest.mark.parametrize(
    ("answer", "cell"),
    [
        (GreedyAnswer("abc", 3, [0, 1, 2]), "identical"),
        (GreedyAnswer("acc", 3, [0, 2, 2]), "**parts at 1, margin 2.5e-01**"),
        (GreedyAnswer("ab", 2, [0, 1]), "**2 tokens instead of 3**"),
        (GreedyAnswer("abca", 4, [0, 1, 2, 0]), "**4 tokens instead of 3**"),
        (GreedyAnswer("abc", 3), "identical"),
        (GreedyAnswer("abb", 3), "**parts at 2, margin 9.0e+00**"),
    ],
)
def test_a_difference_is_located_and_measured(answer, cell):
    assert REFERENCE.compare(answer, letters) == cell
    assert f"| {cell} |" in table([REFERENCE], {"way": [answer]}, letters)


def test_the_smallest_margin_is_over_all_steps():
    assert REFERENCE.smallest_margin == 0.25


def test_prompts_have_the_lengths_asked_for():
    def encode(text: str) -> list[int]:
        return list(text.encode())

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode()

    assert [len(encode(prompt)) for prompt in make_prompts(encode, decode, [1, 7, 500, 8000])] == [1, 7, 500, 8000]


@pytest.mark.nightly
def test_all_ways_give_the_same_tokens(tmp_path):
    run = write_run(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tools.compare_generation", str(run), "--new-tokens=24", "--lengths=1,40,200,3000"],
        capture_output=True, text=True, timeout=250, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True,
    )  # fmt: skip
    assert done.stdout.count("| identical | identical |") == 4
