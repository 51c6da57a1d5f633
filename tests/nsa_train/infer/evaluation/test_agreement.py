"""Agreement of a converted model with its dense self: equal to what the logits of both say, token by token."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="in the hf extra")

from nsa.errors import ConfigError
from nsa_train.infer.evaluation.held_out import (
    agreement_record,
    agreement_with,
    model_token_scores,
    require_same_vocabulary,
)
from nsa_train.train.held_out_loss import held_out_loss
from tests.nsa_train.infer.evaluation.compared_models import COVERED, converted_pair, token_rows, token_tensor


def by_token(sparse, theirs, batch):
    """Losses of both, whether the top token is the same, and KL, of every token that has a successor."""
    tokens = token_tensor(batch)
    with torch.no_grad():
        own, dense = (model(tokens).logits[0, :-1].double().log_softmax(-1) for model in (sparse, theirs))
    label = tokens[0, 1:, None]
    divergence = (dense.exp() * (dense - own)).sum(-1)
    losses = (-each.gather(1, label)[:, 0] for each in (own, dense))
    return torch.stack([*losses, (own.argmax(-1) == dense.argmax(-1)).double(), divergence]).numpy()


def test_figures_are_those_of_the_logits_of_both(tmp_path):
    sparse, dense, theirs = converted_pair(tmp_path)
    rows = token_rows(3, 240)
    record = agreement_record(agreement_with(sparse, dense, rows), "rows", 240, "dense")
    values = np.stack([by_token(sparse, theirs, row) for row in rows])  # row, figure, token
    assert (record["rows"], record["tokens"], record["against"]) == (3, 3 * 239, "dense")
    parts = [(record, values)]
    for position in record["by_position"]:
        parts.append((position, values[:, :, position["begin"] : position["end"]]))
    assert [position["begin"] for position in record["by_position"]] == [0, 128]
    for figures, part in parts:
        loss, against, same, divergence = part.mean((0, 2))
        by_row = (part[:, 0] - part[:, 1]).mean(-1)
        assert figures["loss"] == pytest.approx(loss, abs=1e-4)
        assert figures["against_loss"] == pytest.approx(against, abs=1e-4)
        assert figures["difference"] == pytest.approx(loss - against, abs=1e-4)
        assert figures["difference_standard_error"] == pytest.approx(by_row.std(ddof=1) / 3**0.5, rel=1e-2)
        assert figures["same_top"] == pytest.approx(same, abs=0.01)
        assert figures["divergence"] == pytest.approx(divergence, rel=1e-3)
    assert record["by_position"][1]["divergence"] > 1e-3
    assert 0 < record["same_top"] < 1


def test_losses_are_those_of_each_model_alone(tmp_path):
    sparse, dense, _ = converted_pair(tmp_path)
    rows = token_rows(2, 200, ends=[60])
    sums = agreement_with(sparse, dense, rows)
    for model, totals in ((sparse, sums.own), (dense, sums.reference)):
        alone = held_out_loss(rows, model_token_scores(model))
        assert totals.by_position() == alone.by_position()
        assert (totals.loss, totals.standard_error) == (alone.loss, alone.standard_error)


@pytest.mark.parametrize("mix", ["merged", "gated"])
def test_models_agree_up_to_the_covered_length(mix, tmp_path):
    sparse, dense, _ = converted_pair(tmp_path, mix=mix)
    covered = COVERED if mix == "merged" else 4 * 16
    for length, equal in ((covered, True), (covered + 60, False)):
        record = agreement_record(agreement_with(sparse, dense, token_rows(2, length)), "rows", length, "dense")
        assert (record["divergence"] < 1e-6) == equal
        assert (abs(record["difference"]) < 1e-4) == equal
    assert record["same_top"] > 0


def test_other_vocabularies_are_refused(tmp_path):
    sparse, dense, _ = converted_pair(tmp_path)
    require_same_vocabulary(sparse, dense)
    dense.config.vocab_size += 1
    with pytest.raises(ConfigError, match="101 and 102"):
        require_same_vocabulary(sparse, dense)
