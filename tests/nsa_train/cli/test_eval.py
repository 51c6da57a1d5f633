"""`nsa eval`: output, results file, report; what is refused before a model is loaded."""

import json
import re

import pytest

pytest.importorskip("transformers", reason="in the hf extra")

from typer.testing import CliRunner

from nsa.errors import CheckpointError, ConfigError, OutputError
from nsa_train import names
from nsa_train.cli.main import app
from nsa_train.convert.dense.conversion_plan import ConversionOptions
from nsa_train.convert.dense.convert_folder import convert_folder
from nsa_train.convert.export_folder import export_folder
from nsa_train.convert.import_folder import import_folder
from nsa_train.convert.tokenizer_files import tokenizer_files
from nsa_train.data.tokenizer import ByteTokenizer
from nsa_train.infer.evaluation.far_tasks import BUILT_IN
from nsa_train.record.evaluations import checked_results, read_evaluations
from tests.nsa_train.convert.dense_sources import save_dense
from tests.trained_runs import save_run, settings


@pytest.fixture
def run(tmp_path):
    (tmp_path / "held.jsonl").write_text(
        "".join(json.dumps(dict(id=str(n), text=BUILT_IN[n:])) + "\n" for n in range(20))
    )
    folder = tmp_path / "run"
    save_run(folder, settings(data={"dataset": "local", "path": str(tmp_path / "held.jsonl"), "held_out": 0.4}))
    (folder / names.EVENTS).write_text("")
    return folder


def evaluate(*words):
    return CliRunner().invoke(app, ["eval", *map(str, words)], env={"COLUMNS": "100"})


FAST = ["--lengths", "700", "--depths", "0,100", "--limit", "2", "--rows", "3", "--device", "cpu"]


def test_results_are_printed_written_merged_and_reported(run):
    done = evaluate(run, "--tasks", "held_out_loss,needle", *FAST)
    assert done.exit_code == 0, done.output
    assert re.search(r"0–127\s+\d+", done.stdout)
    assert re.search(r"needle\s+700\s+100 %\s+2\s+12 %", done.stdout)
    done = evaluate(run, "--tasks", "associative_recall", *FAST, "--json")
    assert done.exit_code == 0, done.output
    assert set(json.loads(done.stdout)) == {"associative_recall"}
    (evaluation,) = read_evaluations(run)
    assert evaluation.step == 20
    assert evaluation.held_out["rows"] == 3
    assert set(evaluation.far_tasks) == {"needle", "associative_recall"}
    assert (run / "evaluations" / "step20.json").is_file()

    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 0, done.output
    html = (run / "report.html").read_text()
    assert 'id="evaluations"' in html
    assert "associative_recall" in html


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["20,2.5,{tokens},1.0,1.0,0.1"], ["2.500 nats per token", "over as many tokens"]),
        (["10,3.5,{tokens},1.0,1.0,0.1", "20,2.5,999999,1.0,1.0,0.1"], ["2.500 nats per token", "999,999", "--rows"]),
        (["10,3.5,{tokens},1.0,1.0,0.1"], []),
        (["20,damaged"], []),
    ],
)
def test_the_loss_that_training_reported_at_this_step_is_named_with_the_reason_why_it_differs(run, rows, words):
    evaluated = ["--tasks", "held_out_loss", *FAST, "--json"]
    tokens = json.loads(evaluate(run, *evaluated).stdout)["held_out_loss"]["tokens"]
    lines = [row.replace("{tokens}", str(tokens)) for row in rows]
    (run / names.VAL_CSV).write_text("\n".join(["step,val_loss,tokens,seconds,ts,val_accuracy", *lines, ""]))
    done = evaluate(run, *evaluated)
    assert done.exit_code == 0, done.output
    assert ("training reported" in done.stderr) == bool(words)
    assert all(word in done.stderr for word in words), done.stderr
    other = evaluate(run, *evaluated, "--seq-len", "64")
    assert "training reported" not in other.stderr, "rows of another length"


def test_an_exported_folder_is_evaluated_and_stays_as_it_was(run, tmp_path):
    export_folder(run, tmp_path / "exported")
    exported = sorted((tmp_path / "exported").rglob("*"))
    for task in ("needle", "needle_multikey"):
        done = evaluate(tmp_path / "exported", "--tasks", task, *FAST)
        assert done.exit_code == 0, done.output
    done = evaluate(tmp_path / "exported", *FAST, "--tasks", "held_out_loss", "--data", tmp_path / "held.jsonl")
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "exported_evaluations" / "step20.json").read_text())["results"]
    assert set(results) == {"needle", "needle_multikey", "held_out_loss"}
    assert sorted((tmp_path / "exported").rglob("*")) == exported
    export_folder(run, tmp_path / "exported", overwrite=True)
    import_folder(tmp_path / "exported", tmp_path / "imported")
    export_folder(tmp_path / "imported", tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_bytes() == (tmp_path / "exported" / "README.md").read_bytes()


def test_results_of_the_model_of_the_package_go_to_the_current_folder(run, tmp_path, monkeypatch):
    installed = tmp_path / "site-packages" / "pretrained"
    export_folder(run, installed)
    monkeypatch.setattr("nsa_train.cli.model_options.PRETRAINED_MODEL", installed)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done = evaluate("--pretrained", "--tasks", "needle", *FAST)
    assert done.exit_code == 0, done.output
    results = tmp_path / "here" / "pretrained_evaluations" / "step20.json"
    assert set(json.loads(results.read_text())["results"]) == {"needle"}
    assert f"wrote {results.relative_to(tmp_path / 'here')}" in done.stdout
    assert [*installed.parent.iterdir()] == [installed]


def test_the_same_seed_gives_the_same_results(run, tmp_path):
    cells = []
    for name in ("a", "b"):
        done = evaluate(run, "--tasks", "needle", *FAST, "--hay", "built-in", "--out", tmp_path / f"{name}.json")
        assert done.exit_code == 0, done.output
        cells.append(json.loads((tmp_path / f"{name}.json").read_text())["results"]["needle"]["cells"])
    assert cells[0] == cells[1]
    assert not (run / "evaluations").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--tasks", "needles"],
        ["--depths", "0,150"],
        ["--depths", "middle"],
        ["--lengths", "4x"],
        ["--tasks", "needle", "--lengths", "50"],
        ["--num_fewshot", "5"],
        ["--lm-eval", "ruler_vt"],
        ["--tasks", "agreement"],
        ["--tasks", "layers"],
        ["--lm-eval", "lambada", "--against", "."],
    ],
)
def test_wrong_options_are_refused(run, words):
    done = evaluate(run, *words, "--device", "cpu")
    assert isinstance(done.exception, ConfigError), done.output
    assert not (run / "evaluations").exists()


def test_a_file_that_is_not_ours_is_never_replaced(run, tmp_path):
    (tmp_path / "notes.json").write_text("[1, 2]")
    done = evaluate(run, *FAST, "--out", tmp_path / "notes.json")
    assert isinstance(done.exception, OutputError), done.output
    assert (tmp_path / "notes.json").read_text() == "[1, 2]"


def test_a_synthetic_run_with_few_ids_needs_no_tokenizer(tmp_path):
    config = settings(model={"vocab_size": 64}, data={"dataset": "synthetic", "synthetic_task": "copy", "path": None})
    save_run(tmp_path / "run", config, keep_tokenizer=False)
    done = evaluate(tmp_path / "run", "--json", *FAST)
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    assert set(results) == {"held_out_loss", "selection"}
    assert results["held_out_loss"]["bits_per_byte"] is None
    assert "far tasks" in done.stderr
    done = evaluate(tmp_path / "run", "--tasks", "needle", *FAST)
    assert isinstance(done.exception, CheckpointError)


@pytest.fixture
def converted(tmp_path):
    """A dense model of bytes in the folder dense, and its conversion in sparse."""
    save_dense(tmp_path / "dense", vocab_size=257, eos_token_id=256, max_position_embeddings=200)
    for name, content in tokenizer_files(ByteTokenizer(), 200).items():
        (tmp_path / "dense" / name).write_text(content)
    convert_folder(tmp_path / "dense", tmp_path / "sparse", ConversionOptions(l=8, d=4, l_sel=16, n_sel=4, w=24))
    (tmp_path / "held.jsonl").write_text(
        "".join(json.dumps(dict(id=str(n), text=BUILT_IN[n:])) + "\n" for n in range(4))
    )
    return tmp_path


def test_a_converted_model_is_evaluated_beside_its_dense_self(converted):
    words = ["--data", converted / "held.jsonl", "--against", converted / "dense", *FAST, "--depths", "50"]
    tasks = "held_out_loss,agreement,layers,selection,needle"
    done = evaluate(converted / "sparse", *words, "--tasks", tasks)
    assert done.exit_code == 0, done.output
    assert re.search(r"`nsa convert --keep-dense \d` removes \d+ % of the divergence", done.stdout)
    assert "█" in done.stdout
    beside = converted / "sparse_evaluations"
    assert (beside / "model_layers.svg").read_text().startswith("<svg")
    evaluation = checked_results(None, json.loads((beside / "model.json").read_text())["results"])
    assert evaluation.unreadable == 0
    assert evaluation.held_out["loss"] == pytest.approx(evaluation.agreement["loss"])
    assert evaluation.held_out_against["loss"] == pytest.approx(evaluation.agreement["against_loss"])
    assert len(evaluation.layers["layers"]) == 4
    assert evaluation.selection_against == []
    alone = converted / "alone.json"
    done = evaluate(
        converted / "sparse",
        *words[:2],
        *FAST,
        "--depths",
        "50",
        "--tasks",
        tasks.replace("agreement,layers,", ""),
        "--out",
        alone,
    )
    assert done.exit_code == 0, done.output
    results = json.loads(alone.read_text())["results"]
    assert results["held_out_loss"]["loss"] == pytest.approx(evaluation.held_out["loss"])
    assert "against" not in results["held_out_loss"]
    own = [
        {key: value for key, value in cell.items() if not key.startswith("against")}
        for cell in evaluation.far_tasks["needle"]
    ]
    assert own == checked_results(None, results).far_tasks["needle"]


def test_the_same_model_as_reference_differs_in_nothing(converted):
    words = ["--data", converted / "held.jsonl", "--against", converted / "sparse", *FAST, "--json"]
    words += ["--lengths", "1k", "--depths", "50", "--limit", "1"]
    done = evaluate(converted / "sparse", *words)
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    assert results["agreement"]["difference"] == 0
    assert results["agreement"]["same_top"] == 1
    assert results["selection"]["against"]["layers"] == results["selection"]["layers"]
    for cell in results["needle"]["cells"]:
        assert cell["against_accuracy"] == cell["accuracy"]
    assert "layers" not in results
    assert "same kind of attention" in done.stderr
    done = evaluate(converted / "sparse", *words, "--tasks", "layers")
    assert isinstance(done.exception, ConfigError)


def test_a_reference_with_another_vocabulary_is_refused(converted):
    save_dense(converted / "other", vocab_size=300)
    words = ["--data", converted / "held.jsonl", "--against", converted / "other", *FAST]
    done = evaluate(converted / "sparse", *words)
    assert isinstance(done.exception, ConfigError), done.output
    assert "257 and 300" in str(done.exception)
    assert not (converted / "sparse_evaluations" / "model.json").exists()
