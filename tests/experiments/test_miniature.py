"""NSA learns far recall in the study's smallest table, by finding the fact, and the window alone does not.

`python -m proofs.mutation_drill learning` plants bugs in selection, φ and gates, each of which must fail here. Some
bugs only slow learning and pass, e.g. gates normalised over heads: tests of the attention itself catch those.
"""

import pytest

from experiments.nsa_vs_dense import results, run, tables
from nsa_train.watch.run_reader import load

pytestmark = pytest.mark.nightly  # hundreds of steps of training
CHANCE = 0.25


def trained(variant: str, tmp_path_factory):
    (study_run,) = tables.read_tables()["miniature"].chosen([variant], [0])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp(variant))
        _, code, _ = run.train(study_run, threads=1)
        assert code == 0, (study_run.folder / "log.txt").read_text()
        if study_run.selects:
            results.evaluate_selection(study_run)
        return load(study_run.folder)


@pytest.fixture(scope="module")
def nsa_run(tmp_path_factory):
    return trained("nsa", tmp_path_factory)


def test_nsa_learns(nsa_run):
    assert nsa_run.counted_evaluations()[-1].val_accuracy > 0.6


def test_nsa_finds_the_facts(nsa_run):
    """Some layer chooses the block of a question's fact far more often than a random choice would."""
    layers = [row for row in nsa_run.model_evaluations[-1].facts if row.get("layer") is not None]
    assert max(row["fact_hit"] - row["chance"] for row in layers) > 0.25


def test_a_window_alone_does_not_learn_the_task(tmp_path_factory):
    assert trained("window", tmp_path_factory).counted_evaluations()[-1].val_accuracy < CHANCE + 0.1
