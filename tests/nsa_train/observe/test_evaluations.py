"""Results of evaluations: merged, atomic, and harmless to read when damaged."""

import json
import re

import pytest

from nsa.errors import OutputError
from nsa_train import names
from nsa_train.observe.evaluations import (
    checked_results,
    evaluation_file,
    merge_results,
    read_evaluations,
    require_mergeable,
)
from nsa_train.observe.view.layer_chart import MASS_PARTS, layer_advice, layer_bars, layer_svg
from nsa_train.observe.view.report.evaluation_tables import evaluation_section, result_tables

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
    (found,) = read_evaluations(tmp_path)
    assert (found.step, found.model, found.unreadable) == (20, "checkpoints/step20", 0)
    assert (found.held_out["loss"], found.held_out["accuracy"]) == (2.78, 0.41)
    assert [row["loss"] for row in found.held_out["by_position"]] == [3.0, 2.5]
    cells = [(row["length"], row["depth"], row["accuracy"]) for row in found.far_tasks["needle"]]
    assert cells == [(1024, 0.5, 1.0), (1024, 1.0, 0.5), (4096, 0.5, 0.5)]
    assert found.lm_eval == {"niah_single_1": {"4096,none": 0.25}}
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


def test_values_of_other_types_are_left_out(tmp_path):
    path = evaluation_file(tmp_path, 20)
    path.parent.mkdir()
    hostile = {
        "held_out_loss": {**HELD_OUT, "loss": "<script>"},
        "needle": far({**cell(1024, 0.5), "accuracy": {}}, cell(2048, 0.5), 7),
        "lm_eval/x": {"metrics": {"a": "b", "c": 1.0}},
        "<script>alert(1)</script>": far(cell(1024, 0.5)),
        "other": 3,
    }
    path.write_text(json.dumps({"format": 1, "model": [], "results": hostile}))
    (found,) = read_evaluations(tmp_path)
    assert found.held_out is None
    assert [row["length"] for row in found.far_tasks["needle"]] == [2048]
    assert found.lm_eval == {"x": {"c": 1.0}}
    assert found.unreadable == 2
    assert "<script>" not in evaluation_section([found])


def test_the_report_shows_every_result(tmp_path):
    assert "nsa eval" in evaluation_section([])
    add(tmp_path, held_out_loss=HELD_OUT, needle=far(cell(1024, 0.5), cell(4096, 1.0, accuracy=0.75)))
    add(tmp_path, 40, held_out_loss=HELD_OUT, **{"lm_eval/ruler_fwe": dict(settings={}, metrics={"4096,none": 0.25})})
    html = evaluation_section(read_evaluations(tmp_path))
    for text in ("step 20", "step 40", "128–255", "2.78", "needle", "4,096", "75", "ruler_fwe", "4096,none", "<svg"):
        assert text in html
    assert {"23 %", "41 %"} <= set(re.findall(r"[\d.]+ %", html))


COMPARED = dict(tokens=228, loss=2.78, against_loss=2.7, difference=0.08, difference_standard_error=0.01, same_top=0.93)
COMPARED |= dict(divergence=0.0417, divergence_standard_error=None)
AGREEMENT = dict(data="a set", rows=4, against="dense", **COMPARED, by_position=[dict(begin=0, end=128, **COMPARED)])
LAYER_ROWS = [
    dict(layer=0, kind="merged", harm=0.01, harm_standard_error=None, gain=0.004, **dict.fromkeys(MASS_PARTS, 0.2)),
    dict(layer=3, kind="window", harm=0.05, harm_standard_error=0.001, gain=0.045),
]
LAYERS = dict(rows=4, seq_len=8192, against="dense", divergence=0.0613, layers=LAYER_ROWS, keep_dense=[3], advised=[3])
LAYERS["removed"] = 0.71


def test_figures_of_a_reference_model_are_kept_beside_the_models_own(tmp_path):
    others = {"against": "dense", "against_accuracy": 0.88, "against_exact_match": 0.12}
    add(
        tmp_path,
        held_out_loss={**HELD_OUT, "against": {**HELD_OUT, "model": "dense", "loss": 2.61}},
        agreement=AGREEMENT,
        layers=LAYERS,
        needle=far({**cell(1024, 0.5), **others}),
    )
    (found,) = read_evaluations(tmp_path)
    assert found.unreadable == 0
    assert (found.held_out["loss"], found.held_out_against["loss"]) == (2.78, 2.61)
    assert (found.agreement["divergence"], found.agreement["by_position"][0]["same_top"]) == (0.0417, 0.93)
    tables = {title: (heads, rows) for title, heads, _, rows in result_tables([found])}
    heads, rows = tables["layers by harm"]
    assert [row[1] for row in rows] == ["3", "0"]  # the most harmful first
    assert (rows[0][-4:], rows[1][-4:]) == (("–",) * 4, ("20 %", "20 %", "20 %", "40 %"))
    heads, rows = tables["far tasks"]
    assert rows[0][1 + heads.index("against: accuracy")] == "88 %"
    html = evaluation_section([found])
    for text in ("--keep-dense 3", "71 %", "0.0417", "93 %", "2.61", "data:image/svg+xml;base64,"):
        assert text in html


def test_without_a_reference_no_column_is_about_one(tmp_path):
    add(tmp_path, held_out_loss=HELD_OUT, needle=far(cell(1024, 0.5)))
    (found,) = read_evaluations(tmp_path)
    for _, heads, numbers, rows in result_tables([found]):
        assert not [head for head in heads if "against" in head]
        assert {len(row) for row in rows} == {len(heads) + 1}
        assert numbers.stop == len(heads)


def test_damaged_figures_of_a_comparison_are_left_out():
    hostile = [{**LAYER_ROWS[0], "harm": -1.0}, {**LAYER_ROWS[0], "window_mass": 7.0, "kind": "<script>"}, 4]
    found = checked_results(
        None,
        {
            "held_out_loss": {**HELD_OUT, "against": {"loss": "<script>"}},
            "agreement": {**AGREEMENT, "same_top": "all"},
            "layers": {**LAYERS, "layers": hostile, "keep_dense": ["<script>"], "removed": float("nan")},
            "selection": {"layers": [], "against": 3},
        },
    )
    assert found.unreadable == 3
    assert (found.held_out_against, found.agreement) == (None, None)
    assert found.held_out is not None
    (row,) = found.layers["layers"]
    assert row["window_mass"] == 7.0
    assert "keep_dense" not in found.layers
    assert "<script>" not in evaluation_section([found])
    assert layer_svg(found.layers).count("<rect") > 4
    assert "keep-dense" not in layer_advice(found.layers)


def test_bars_of_characters_are_as_long_as_the_shares_and_fit(tmp_path):
    key, _, first, second = layer_bars(LAYERS, 84)
    bar = first.split("  ")[-2]
    assert [bar.count(glyph) for glyph in "█▓▒·"] == [6, 6, 6, 12]
    assert (first.count("■"), second.count("■")) == (round(22 * 0.2), 22)
    assert max(map(len, (key, first, second))) <= 84


def test_the_picture_marks_the_layers_that_are_advised():
    with_advice, without = (layer_svg({**LAYERS, "advised": advised}) for advised in ((3,), ()))
    assert with_advice != without
    heights = [float(height) for height in re.findall(r'height="([\d.]+)" fill="#b3424a"', with_advice)]
    assert heights[-1] == pytest.approx(5 * heights[-2])  # harm 0.05 and 0.01
