"""Scores of answers after a cached prompt against whole forward passes of our own model and against generation."""

import pytest
import torch

from nsa_train.infer.evaluation.far_evaluation import TransformersScorer, _candidate_scores
from nsa_train.infer.load_model import load_model
from tests.trained_runs import save_run

PROMPT = list(b"One sentence of some length that ends here, and the number of it is")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return save_run(folder), load_model(folder, device="cpu")


def test_scores_equal_those_of_whole_forward_passes_of_our_own_model(models):
    own, loaded = models
    candidates = [list(text.encode()) for text in (" 12345.", " 678", " a much longer candidate than the others", "x")]
    scores = TransformersScorer(loaded.model)(PROMPT, candidates)
    for tokens, score in zip(candidates, scores, strict=True):
        with torch.no_grad():
            logits = own(torch.tensor([[*PROMPT, *tokens]]))[0, len(PROMPT) - 1 : -1].double()
        expected = logits.log_softmax(-1)[range(len(tokens)), tokens].sum()
        assert score.tokens == len(tokens)
        assert score.log_likelihood == pytest.approx(float(expected), rel=1e-5)
        assert score.greedy == (logits.argmax(-1).tolist() == tokens)


def test_greedy_is_what_generation_gives(models):
    _, loaded = models
    prompt = torch.tensor([PROMPT])
    generated = loaded.model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    right = generated[0, len(PROMPT) :].tolist()
    wrong_at_the_end = [*right[:-1], (right[-1] + 1) % 256]
    scores = TransformersScorer(loaded.model)(PROMPT, [right, right[:2], wrong_at_the_end])
    assert [score.greedy for score in scores] == [True, True, False]


def test_scores_of_a_known_distribution():
    logits = torch.log(torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], [[0.2, 0.2, 0.6], [1.0, 1.0, 1.0]]]))
    first, second = _candidate_scores(logits, torch.eye(3), [[0, 2], [1]])
    assert first == (pytest.approx(torch.log(torch.tensor(0.4)).item()), True, 2)
    assert second == (pytest.approx(torch.log(torch.tensor(0.2)).item()), False, 1)
