"""The model card says what the run's own records say, and shows foreign text as text."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nsa_train.convert.export_folder import exported_config
from nsa_train.data.tokenizer import ByteTokenizer

pytest.importorskip("transformers", reason="Transformers is in the hf extra")
from huggingface_hub import ModelCard

from nsa.errors import CheckpointError
from nsa_train.checkpoint.trained_model import open_trained_model
from nsa_train.convert.training_record import TrainingRecord, _public_settings, model_card, record_of
from nsa_train.record.evaluations import evaluation_file, merge_results
from tests.trained_runs import save_run, settings


def beat(step: int, loss: float, msg: str = "progress") -> str:
    return json.dumps({"ts": 1.7e9 + step, "rank": 0, "step": step, "msg": msg, "pid": 1, "loss": loss}) + "\n"


@pytest.fixture
def run(tmp_path) -> Path:
    """Records up to step 30, and a checkpoint of step 20."""
    save_run(tmp_path, step=20)
    lines = [beat(0, 0.0, "start"), *(beat(step, 5.0 - step / 10) for step in (10, 20, 30))]
    (tmp_path / "heartbeat_rank0.jsonl").write_text("".join(lines))
    (tmp_path / "val.csv").write_text("step,val_loss,tokens,seconds,ts\n10,4.5,9,1,1\n20,3.5,9,1,1\n30,2.5,9,1,1\n")
    return tmp_path


def test_the_record_is_that_of_the_checkpoint_not_of_the_end_of_the_run(run):
    record = record_of(open_trained_model(run), "mit")
    assert (record.step, record.loss, record.held_out_loss, record.held_out_step) == (20, 3.0, 3.5, 20)
    assert record.tokens == 20 * 2 * 128  # steps, rows of a step, tokens of a row
    assert record.license == "mit"
    assert TrainingRecord.parse(json.loads(record.to_json()), "here") == record


def test_a_checkpoint_alone_has_a_record_without_losses(tmp_path):
    save_run(tmp_path / "run")
    record = record_of(open_trained_model(tmp_path / "run"), None)
    assert (record.loss, record.held_out_loss, record.held_out_step) == (None, None, None)
    card = render(record)
    assert "not recorded" in card
    assert "not stated" in card


def test_results_of_evaluations_are_shown_and_kept(run):
    cells = [
        dict(length=1024, depth=depth, examples=10, chance=0.125, accuracy=accuracy, exact_match=0.1)
        for depth, accuracy in ((0.0, 0.3), (1.0, 0.9))
    ]
    held_out = dict(tokens=4096, loss=2.5, bits_per_byte=3.6, accuracy=0.25, by_position=[])
    harness = dict(metrics={"acc,none": 0.25})
    results = {"held_out_loss": held_out, "needle": dict(cells=cells), "lm_eval/x|<b>": harness}
    merge_results(evaluation_file(run, 20), step=20, model="step20", results=results)
    merge_results(evaluation_file(run, 30), step=30, model="step30", results={"held_out_loss": held_out})
    record = record_of(open_trained_model(run), None)
    assert TrainingRecord.parse(json.loads(record.to_json()), "here") == record
    card = render(record)
    assert "| held-out loss of 4,096 tokens | 2.500 nats per token, 3.600 bits per byte |" in card
    assert "| held-out accuracy of 4,096 tokens | 25 % |" in card
    assert "| needle, 1,024 tokens | accuracy 60 % (chance 12 %), exact match 10 %, 20 examples |" in card
    assert "lm-eval x\\|&lt;b&gt;, acc,none" in card
    for wrong in ({"a": 1}, {"a": "b\n"}, {"a\x1b": "b"}, {"a": "b" * 1000}):
        with pytest.raises(CheckpointError):
            TrainingRecord.parse({**record.as_dict(), "evaluations": wrong}, "here")


def render(record: TrainingRecord, **changes: object) -> str:
    config = exported_config(settings(), 257, 256)
    options = dict(parameters=12_345, dtype="float32", tokenizer=ByteTokenizer(), remote_code=False)
    return "\n".join(model_card(record, config, **{**options, **changes})) + "\n"


def test_the_card_has_every_figure(run):
    card = render(record_of(open_trained_model(run), "mit"))
    for text in ("20", "5,120", "3.0000 nats", "3.5000 nats per token at step 20", "books.jsonl", "12,345",
                 "UTF-8 bytes", "8, 4, 16, 4, 24", "import nsa.hf", "train.lr | 0.0003"):  # fmt: skip
        assert text in card, text
    assert ModelCard(card).data.to_dict()["license"] == "mit"  # what the Hub reads


@pytest.mark.parametrize("text", ["a | b", "<script>alert(1)</script>", "[x](javascript:1)", "a\nb", "`code`", "---"])
def test_foreign_text_stays_text(run, text):
    record = replace(record_of(open_trained_model(run), None), data=text, settings={"data": {"path": text}})
    card = render(record)
    assert "<script" not in card
    assert "[x](" not in card
    assert ModelCard(card).data.to_dict()["license"] == "unknown"
    row = next(line for line in card.splitlines() if line.startswith("| data |"))
    assert row.replace("\\|", "").count("|") == 3


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/me/books.jsonl", "books.jsonl"),
        ("../books", "books"),
        ("HuggingFaceFW/fineweb-edu", "HuggingFaceFW/fineweb-edu"),
        ("https://user:secret@host/a.parquet?token=1", "https://host/a.parquet"),
        ("s3://bucket/set?endpoint=http://10.0.0.1", "s3://bucket/set"),
    ],
)
def test_paths_and_credentials_are_left_out(path, shown):
    config = settings(data={"path": path}, train={"checkpoint_key_file": "/keys/secret"})
    public = _public_settings(config)
    assert public["data"]["path"] == shown
    assert "secret" not in json.dumps(public)
