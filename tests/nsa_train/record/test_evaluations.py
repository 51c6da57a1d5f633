"""Results of evaluations: merged, atomic, and harmless to read when damaged."""

import json

import pytest

from nsa.errors import OutputError
from nsa_train import names
from nsa_train.record.evaluations import evaluation_file, merge_results, read_evaluations, require_mergeable

POSITIONS = [
    dict(begin=0, end=128, tokens=128, loss=3.0, standard_error=0.1, bits_per_byte=4.3, accuracy=0.23),
    dict(begin=128, end=256, tokens=100, loss=2.5, standard_error=None, bits_per_byte=None),
]
HELD_OUT = dict(data="a set", seq_len=256, rows=1, tokens=228, loss=2.78, bits_per_byte=4.0, by_position=POSITIONS)
HELD_OUT["accuracy"] = 0.41


def cell(length, depth, accuracy=0.5):
    counts = dict(length=length, depth=depth, examples=8, candidates=8, chosen=4, exact=0, answer_nats=1.5)
    intervals = dict(accuracy_interval=[0.2, 0.8], exact_match_interval=[0.0, 0.3])
    return dict(**counts, chance=0.125, accuracy=accuracy, exact_match=0.0, **intervals)


def far(*cells, seed=0):
    return dict(settings=dict(hay="built-in text", seed=seed), cells=list(cells))


def add(run, step=20, **results):
    merge_results(evaluation_file(run, step), step=step, model="checkpoints/step20", results=results)


def test_results_are_merged_by_name_and_cells_by_length_and_depth(tmp_path):
    add(tmp_path, held_out_loss=HELD_OUT, needle=far(cell(1024, 0.5), cell(1024, 1.0)))
    add(tmp_path, needle=far(cell(4096, 0.5), cell(1024, 0.5, accuracy=1.0)))
    add(tmp_path, **{"lm_eval/niah_single_1": dict(settings={}, metrics={"4096,none": 0.25})})
    (evaluation,) = read_evaluations(tmp_path)
    assert (evaluation.step, evaluation.model, evaluation.unreadable) == (20, "checkpoints/step20", 0)
    assert (evaluation.held_out["loss"], evaluation.held_out["accuracy"]) == (2.78, 0.41)
    assert [row["loss"] for row in evaluation.held_out["by_position"]] == [3.0, 2.5]
    cells = [(row["length"], row["depth"], row["accuracy"]) for row in evaluation.far_tasks["needle"]]
    assert cells == [(1024, 0.5, 1.0), (1024, 1.0, 0.5), (4096, 0.5, 0.5)]
    assert evaluation.lm_eval == {"niah_single_1": {"4096,none": 0.25}}
    raw = json.loads(evaluation_file(tmp_path, 20).read_text())
    assert raw["format"] == 1
    assert raw["results"]["needle"]["nsa"]


def test_other_settings_replace_a_result(tmp_path):
    add(tmp_path, needle=far(cell(1024, 0.5)))
    add(tmp_path, needle=far(cell(2048, 0.5), seed=1))
    assert [row["length"] for row in read_evaluations(tmp_path)[0].far_tasks["needle"]] == [2048]


def test_steps_are_in_order_and_an_exported_model_needs_none(tmp_path):
    for step in (100, 20, None):
        add(tmp_path, step, held_out_loss=HELD_OUT)
    (tmp_path / names.EVALUATIONS / "notes.json").write_text("{}")
    assert [each.step for each in read_evaluations(tmp_path)] == [None, 20, 100]
    assert read_evaluations(tmp_path / "nowhere") == []


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format": 2}', '{"results": {}}', "[" * 100_000])
def test_a_damaged_file_is_counted_and_never_replaced(tmp_path, content):
    path = evaluation_file(tmp_path, 20)
    path.parent.mkdir()
    path.write_text(content)
    assert [each.unreadable for each in read_evaluations(tmp_path)] == [1]
    with pytest.raises(OutputError):
        require_mergeable(path)
    with pytest.raises(OutputError):
        add(tmp_path, held_out_loss=HELD_OUT)
    assert path.read_text() == content
    require_mergeable(path.with_name("step21.json"))


HOSTILE = {
    "held_out_loss": {**HELD_OUT, "loss": "<script>"},
    "needle": far({**cell(1024, 0.5), "accuracy": {}}, cell(2048, 0.5), 7),
    "lm_eval/x": {"metrics": {"a": "b", "c": 1.0}},
    "<script>alert(1)</script>": far(cell(1024, 0.5)),
    "other": 3,
}


def test_values_of_other_types_are_left_out(tmp_path):
    path = evaluation_file(tmp_path, 20)
    path.parent.mkdir()
    path.write_text(json.dumps({"format": 1, "model": [], "results": HOSTILE}))
    (evaluation,) = read_evaluations(tmp_path)
    assert evaluation.held_out is None
    assert [row["length"] for row in evaluation.far_tasks["needle"]] == [2048]
    assert evaluation.lm_eval == {"x": {"c": 1.0}}
    assert evaluation.unreadable == 2
