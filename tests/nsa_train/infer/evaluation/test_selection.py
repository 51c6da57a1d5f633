"""`nsa eval`'s figures of selection: by layer on held-out rows, and of the needle's block in far tasks."""

import numpy as np
import pytest
import torch

from nsa.core.probe import Probe, probing
from nsa.hf import NSAConfig, NSAForCausalLM
from nsa_train.data.rows.batch import Batch
from nsa_train.data.rows.synthetic import SyntheticRows
from nsa_train.infer.evaluation.far_evaluation import (
    CandidateScore,
    TransformersScorer,
    _needle_blocks,
    evaluate_far_task,
)
from nsa_train.infer.evaluation.far_tasks import built_in_hay, make_example
from nsa_train.infer.evaluation.selection import selection_by_layer, selection_record


def small_model(**options) -> NSAForCausalLM:
    torch.manual_seed(0)
    sizes = dict(vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    geometry = dict(head_dim=8, l=8, d=4, l_sel=16, n_sel=4, w=24, max_position_embeddings=2048)
    return NSAForCausalLM(NSAConfig(**{**sizes, **geometry, **options})).eval()


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_the_needle_lies_in_its_blocks():
    example = make_example("needle", built_in_hay(), lambda text: len(encode(text)), length=800, depth=0.5, number=0)
    blocks = _needle_blocks(example, encode, 16)
    text = "".join(example.prompt[block * 16 : block * 16 + 16] for block in sorted(blocks))
    assert example.needle in text
    assert len(blocks) <= len(example.needle) // 16 + 2


@pytest.mark.parametrize("everything", [True, False])
def test_accuracy_is_divided_by_whether_the_needle_was_found(everything):
    def scorer(prompt, candidates):
        return [CandidateScore(float(-place), False, 1) for place in range(len(candidates))]

    cells = evaluate_far_task(
        "needle",
        scorer,
        encode,
        built_in_hay(),
        lengths=[800],
        depths=[0.5],
        limit=6,
        l_sel=16,
        selected_by_layer=lambda: [set(), set(range(60)) if everything else set()],
    )
    record = cells[0].as_record()
    assert record["needle_hit_by_layer"] == [0.0, 1.0 if everything else 0.0]
    assert record["needle_hit"] == (1.0 if everything else 0.0)
    known, unknown = ("accuracy_if_hit", "accuracy_if_missed")[:: 1 if everything else -1]
    assert record[known] == record["accuracy"]
    assert record[unknown] is None


def test_a_models_choices_are_those_of_the_prompts_last_token():
    model = small_model()
    scorer = TransformersScorer(model)
    prompt = torch.randint(0, 256, (300,)).tolist()
    scorer(prompt, [[1, 2], [3, 4, 5]])
    assert len(scorer.selected_by_layer) == 2
    for chosen in scorer.selected_by_layer:
        assert {0, 17, 18} <= chosen <= set(range(19))  # the first block and the two nearest; 300 tokens are 19 blocks
        assert len(chosen) <= 2 * 4


def test_every_layer_that_selects_has_a_row():
    ends = (np.array([0, 257], dtype=np.int32),)
    tokens = torch.randint(0, 256, (2, 1, 257)).numpy().astype(np.uint16)
    rows = [Batch(row, ends, None, np.zeros(1, np.int64), 0, 1) for row in tokens]
    selection = selection_by_layer(small_model(attention=["nsa", "dense"], kv="per_branch", phi="avg"), rows)
    assert [layer for layer, _ in selection.counts] == [0]
    record = selection_record(selection, "rows", 256, 2)
    (row,) = record["layers"]
    # An untrained model hits about as often as chance.
    assert abs(row["hit_rate"] - row["chance"]) < 0.35
    assert 0 < row["mass_caught"] < 1
    assert "facts" not in record


class ChoicesProbe(Probe):
    """Keeps what every query chose."""

    def record_selection(self, q_BSGRK, idx_BSGN, *_):
        self.chosen = idx_BSGN.tolist()


@pytest.mark.parametrize("task", ["recall_pairs", "needle"])
def test_hits_on_facts_equal_a_search_in_the_choices(task):
    model = small_model(vocab_size=320, n_sel=8)
    data = SyntheticRows(task, vocab_size=320, seq_len=512, seed=1)
    rows = [data.rows(np.asarray([number])) for number in range(6)]
    with torch.no_grad():  # some answers are right: the logit of each value is a random one, those of others are lower
        counted = [int(batch.tokens[batch.loss_mask][place]) for batch in rows for place in (0, 1)]
        model.lm_head.weight[sorted(set(range(320)) - set(counted))] = 0
    selection = selection_by_layer(model, rows, answer_places=data.answer_places)
    facts = selection_record(selection, "rows", 512, len(rows))["facts"]

    outcomes, expected = [], []
    for batch in rows:
        tokens = torch.from_numpy(batch.tokens.astype(np.int64))
        with torch.no_grad(), probing(model, ChoicesProbe) as probes:
            predicted = model(tokens).logits[0].argmax(-1).tolist()
        for _, query, fact in data.answer_places(batch.row_ids):
            if 1 <= fact // 16 <= query // 16 - 2:
                hits = [any(fact // 16 in group for group in probe.chosen[0][query]) for probe in probes.values()]
                outcomes.append((*hits, any(hits), predicted[query] == tokens[0, query + 1]))
                expected.append(1 - (1 - 5 / (query // 16 - 2)) ** 2)
    table = np.asarray(outcomes)
    assert 0 < table[:, -1].mean() < 1
    for column, record in enumerate((*facts["layers"], facts["any_layer"])):
        hit, right = table[:, column], table[:, -1]
        assert 0 < hit.mean() < 1
        assert record["questions"] == len(table)
        assert record["fact_hit"] == pytest.approx(hit.mean())
        assert record["accuracy"] == pytest.approx(right.mean())
        assert record["accuracy_if_hit"] == pytest.approx(right[hit].mean())
        assert record["accuracy_if_missed"] == pytest.approx(right[~hit].mean())
    assert [record["layer"] for record in facts["layers"]] == [0, 1]
    assert [record["chance"] for record in facts["layers"]] == [pytest.approx(np.mean(expected))] * 2
    both_layers = [1 - (1 - chance) ** 2 for chance in expected]
    assert facts["any_layer"]["chance"] == pytest.approx(np.mean(both_layers))
