"""The comparison of two revisions: which way round its figure is, and that it sees other bits."""

import pytest

from tools import compare_revisions
from tools.compare_revisions import ROOT, Worker, differing, ratios


class Pretended:
    """Takes a fixed time, and answers with a fixed text."""

    def __init__(self, took: float, text: str = "") -> None:
        self.took, self.text, self.works = took, text, []

    def seconds(self, work: str) -> float:
        self.works.append(work)
        return self.took

    def answer(self, line: str) -> str:
        return self.text


def test_above_one_this_checkout_is_faster():
    before, now = Pretended(3.0), Pretended(2.0)
    assert ratios(before, now, "decode", 5) == [1.5] * 5
    assert before.works == now.works == ["decode"] * 7


def test_layers_with_other_bits_are_named():
    layers = 3 * len(compare_revisions.KINDS) * len(compare_revisions.OPTIONS)
    assert len(differing(Pretended(0, "a"), Pretended(0, "b"))) == layers
    assert differing(Pretended(0, "a"), Pretended(0, "a")) == []


@pytest.mark.nightly
def test_a_worker_does_every_work_and_knows_layers_apart():
    worker = Worker(ROOT)
    try:
        assert all(worker.seconds(work) > 0 for work in compare_revisions.WORKS)
        answers = [worker.answer(f'["portable", "{kind}", {{}}]') for kind in ("nsa", "nsa", "window")]
        assert answers[0] == answers[1] != answers[2]
    finally:
        worker.end()
