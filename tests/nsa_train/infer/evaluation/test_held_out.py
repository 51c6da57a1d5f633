"""Held-out loss of a trained run: equal to val.csv, to our own model's, and by position; where its data comes from."""

import csv
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from nsa.errors import ConfigError, DataError
from nsa.model.loss import TokenScores
from nsa_train import names
from nsa_train.checkpoint.trained_model import open_trained_model
from nsa_train.data.rows.specs import DirectData, SyntheticData
from nsa_train.data.tokenizer import train_bpe
from nsa_train.infer.evaluation.held_out import bytes_per_token, held_out_data, rows_of
from nsa_train.infer.evaluation.run import EvaluationRequest, evaluate_model, results_file
from nsa_train.infer.load_model import load_model
from nsa_train.record.evaluations import evaluation_file
from nsa_train.run_model import build_model
from nsa_train.shipped import CORPUS
from nsa_train.train.held_out_loss import batch_inputs, held_out_loss, next_token_labels
from tests.nsa_train.train.runs import Job, run_all
from tests.trained_runs import save_run, settings

ROWS = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    changes = ["data.dataset=local", f"data.path={CORPUS}", "data.held_out=0.02", "data.packing=best_fit"]
    changes += [
        "train.steps=4",
        "train.save_every=4",
        "train.eval_every=4",
        "train.seq_len=384",
        "train.eval_batches=2",
    ]
    assert run_all(Job(str(folder), 1, changes)) == [[0]]
    return folder


@pytest.fixture(scope="module")
def loaded(run):
    return load_model(run, device="cpu")


def only(loaded, **changes):
    return evaluate_model(loaded, EvaluationRequest(tasks=["held_out_loss"], **changes))["held_out_loss"]


def test_equals_the_loss_in_val_csv_and_of_our_own_model(run, loaded):
    with (run / names.VAL_CSV).open() as file:
        (recorded,) = csv.DictReader(file)
    record = only(loaded, rows=ROWS)
    assert record["rows"] == ROWS
    assert record["tokens"] == int(recorded["tokens"])
    assert record["loss"] == pytest.approx(float(recorded["val_loss"]), rel=1e-6)

    trained = open_trained_model(run)
    own = build_model(trained.config, trained.vocab_size)
    own.load_state_dict(trained.tensors)

    def score_tokens(batch, labels):
        tokens, cu_doc_lens = batch_inputs(batch)
        losses = own.token_losses(tokens, labels, cu_doc_lens=cu_doc_lens)
        with torch.no_grad():
            return TokenScores(losses, own(tokens, cu_doc_lens=cu_doc_lens).argmax(-1) == labels)

    sums = held_out_loss(rows_of(held_out_data(loaded, None, None), ROWS), score_tokens)
    assert sums.loss == pytest.approx(record["loss"], rel=1e-6)
    assert record["accuracy"] > 0
    one_token = 1.01 / record["tokens"]  # two nearly equal logits may be in another order
    assert record["accuracy"] == pytest.approx(sums.accuracy, abs=one_token)
    assert record["accuracy"] == pytest.approx(float(recorded["val_accuracy"]), abs=one_token)
    for ours, theirs in zip(sums.by_position(), record["by_position"], strict=True):
        assert ours.tokens == theirs["tokens"]
        assert ours.loss == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours.accuracy == pytest.approx(theirs["accuracy"], abs=1.01 / ours.tokens)
        assert ours.standard_error == pytest.approx(theirs["standard_error"], rel=1e-3)


def test_bits_per_byte_count_bytes_and_not_tokens(loaded):
    record = only(loaded, rows=ROWS)
    data = held_out_data(loaded, None, None)
    labels = [next_token_labels(batch) for batch in rows_of(data, ROWS)]
    n_bytes = sum(int(((each >= 0) & (each < 256)).sum()) for each in labels)
    assert n_bytes < record["tokens"]
    assert record["bits_per_byte"] == pytest.approx(record["loss"] * record["tokens"] / math.log(2) / n_bytes)


def test_bytes_of_bpe_tokens_add_up_to_the_text(tmp_path):
    text = "Grüße aus Köln — naïve café. " * 20
    tokenizer = train_bpe([text], 300, tmp_path / "bpe.json")
    save_run(tmp_path / "run", tokenizer=tokenizer)
    loaded = load_model(tmp_path / "run", device="cpu")
    bytes_V = bytes_per_token(loaded.tokenizer, loaded.model.config.vocab_size)
    assert int(bytes_V[loaded.encode([text])[0]].sum()) == len(text.encode())
    assert bytes_V[tokenizer.eos_id] == 0
    assert torch.all(bytes_V <= 64)


def test_rows_may_be_longer_than_in_training(loaded):
    record = only(loaded, rows=4, seq_len=1024)
    assert record["seq_len"] == 1024
    assert record["by_position"][-1]["end"] == 1024


def test_all_rows_are_read_once(loaded):
    data = held_out_data(loaded, None, 2048)
    ids = [int(batch.row_ids[0]) for batch in rows_of(data, None)]
    assert ids == list(range(len(ids)))
    assert len(ids) > 5


def test_given_documents_are_read_whole_with_the_models_own_tokenizer(loaded, tmp_path):
    (tmp_path / "held.jsonl").write_text('{"id": "a", "text": "%s"}\n' % ("some text " * 200))
    record = only(loaded, rows=None, data=str(tmp_path / "held.jsonl"), seq_len=500)
    assert 1500 <= record["tokens"] + record["rows"] <= 2001
    assert only(loaded, rows=None, data=str(tmp_path / "held.jsonl"), seq_len=5000)["tokens"] == 2000
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError):
        only(loaded, data=str(tmp_path / "empty.jsonl"))


def test_data_that_is_not_known_is_asked_for(tmp_path):
    save_run(tmp_path / "run", settings(data={"dataset": "local", "path": str(CORPUS), "held_out": 0.0}))
    loaded = load_model(tmp_path / "run", device="cpu")
    with pytest.raises(ConfigError, match="--data"):
        only(loaded)
    notes = []
    records = evaluate_model(loaded, EvaluationRequest(limit=1, depths=[0.5]), note=notes.append)
    assert len(notes) == 1
    assert set(records) == {"needle", "needle_multikey", "variable_tracking", "associative_recall"}
    assert {result["settings"]["hay"] for result in records.values()} == {"built-in text"}
    with pytest.raises(ConfigError, match="--rows"):
        list(rows_of(SyntheticData("copy", 257, 64), None))


def test_hay_is_the_held_out_text_and_results_belong_to_the_run(run, loaded):
    seen = []
    record = evaluate_model(
        loaded,
        EvaluationRequest(tasks=["needle"], lengths=[600], depths=[0.0, 1.0], limit=2, seed=3),
        progress=lambda *state: seen.append(state),
    )["needle"]
    assert record["settings"] == {"hay": str(held_out_data(loaded, None, None)), "seed": 3, "examples": 2}
    assert [(cell["length"], cell["depth"], cell["examples"]) for cell in record["cells"]] == [(600, 0, 2), (600, 1, 2)]
    assert seen == [("needle", done, 4) for done in (1, 2, 3, 4)]
    assert results_file(loaded.source) == evaluation_file(run.resolve(), loaded.source.step)
    assert isinstance(held_out_data(loaded, None, None), DirectData)


@pytest.mark.parametrize(
    "wrong", [dict(tasks=["needles"]), dict(depths=[1.5]), dict(depths=[]), dict(lengths=[0]), dict(limit=0)]
)
def test_impossible_requests_are_refused(wrong):
    with pytest.raises(ConfigError):
        EvaluationRequest(**wrong)
