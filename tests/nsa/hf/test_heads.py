"""Classification and reward heads: the hidden states are the language model's, found by the Auto classes, trainable."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, Trainer, TrainingArguments

from tests.nsa.hf.tiny_model import padded, tiny_config, tiny_model

HEADS = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}


def with_head(kind, n_labels, folder):
    """Load a head for the weights of `tiny_model`."""
    tiny_model().save_pretrained(folder)
    return HEADS[kind].from_pretrained(folder, num_labels=n_labels).eval()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sequence_is_judged_at_its_last_token(tmp_path, side):
    model, (ids, mask) = with_head("sequence", 3, tmp_path), padded([50, 21], side)
    with torch.no_grad():
        got = model(ids, attention_mask=mask).logits
        hidden = tiny_model().model(ids, attention_mask=mask).last_hidden_state
    last = [49, 49 if side == "left" else 20]
    torch.testing.assert_close(got, model.score(hidden[[0, 1], last]))


def test_every_token_is_judged(tmp_path):
    model, (ids, mask) = with_head("token", 4, tmp_path), padded([50, 21])
    with torch.no_grad():
        hidden = tiny_model().model(ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, model.score(hidden))


def test_a_saved_head_is_loaded_again(tmp_path):
    model, (ids, mask) = with_head("sequence", 1, tmp_path / "lm"), padded([50, 21])
    model.save_pretrained(tmp_path / "reward")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    with torch.no_grad():
        assert torch.equal(again(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("kind", HEADS)
def test_new_heads_start_as_linear_layers_and_learn(tmp_path, kind):
    model = HEADS[kind].from_config(tiny_config(num_labels=2))
    assert 0.01 < model.score.weight.std() < 0.03
    ids = padded([50])[0][0]
    labels = {"sequence": 1, "token": (ids > 50).long().tolist()}[kind]
    arguments = TrainingArguments(str(tmp_path), max_steps=8, learning_rate=1e-2, report_to=[], use_cpu=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": ids.tolist(), "labels": labels}] * 8)
    first = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] < first - 0.1
