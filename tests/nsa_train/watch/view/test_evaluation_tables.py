"""Results of `nsa eval` as tables and pictures of a report: complete, and harmless when damaged."""

import re

from nsa_train.record.evaluations import checked_results, read_evaluations
from nsa_train.watch.view.evaluation_tables import evaluation_section, result_tables
from nsa_train.watch.view.layer_chart import _MASS_PARTS, layer_advice, layer_svg
from tests.nsa_train.record.test_evaluations import HELD_OUT, HOSTILE, add, cell, far

COMPARED = dict(tokens=228, loss=2.78, against_loss=2.7, difference=0.08, difference_standard_error=0.01, same_top=0.93)
COMPARED |= dict(divergence=0.0417, divergence_standard_error=None)
AGREEMENT = dict(data="a set", rows=4, against="dense", **COMPARED, by_position=[dict(begin=0, end=128, **COMPARED)])
LAYER_ROWS = [
    dict(layer=0, kind="merged", harm=0.01, harm_standard_error=None, gain=0.004, **dict.fromkeys(_MASS_PARTS, 0.2)),
    dict(layer=3, kind="window", harm=0.05, harm_standard_error=0.001, gain=0.045),
]
LAYERS = dict(rows=4, seq_len=8192, against="dense", divergence=0.0613, layers=LAYER_ROWS, keep_dense=[3], advised=[3])
LAYERS["removed"] = 0.71


def test_the_report_shows_every_result(tmp_path):
    assert "nsa eval" in evaluation_section([])
    add(tmp_path, held_out_loss=HELD_OUT, needle=far(cell(1024, 0.5), cell(4096, 1.0, accuracy=0.75)))
    add(tmp_path, 40, held_out_loss=HELD_OUT, **{"lm_eval/ruler_fwe": dict(settings={}, metrics={"4096,none": 0.25})})
    html = evaluation_section(read_evaluations(tmp_path))
    for text in ("step 20", "step 40", "128–255", "2.78", "needle", "4,096", "75", "ruler_fwe", "4096,none", "<svg"):
        assert text in html
    assert {"23 %", "41 %"} <= set(re.findall(r"[\d.]+ %", html))


def test_text_of_a_damaged_file_is_no_markup():
    assert "<script>" not in evaluation_section([checked_results(20, HOSTILE)])


def test_figures_of_a_reference_model_are_kept_beside_the_models_own(tmp_path):
    others = {"against": "dense", "against_accuracy": 0.88, "against_exact_match": 0.12}
    add(
        tmp_path,
        held_out_loss={**HELD_OUT, "against": {**HELD_OUT, "model": "dense", "loss": 2.61}},
        agreement=AGREEMENT,
        layers=LAYERS,
        needle=far({**cell(1024, 0.5), **others}),
    )
    (evaluation,) = read_evaluations(tmp_path)
    assert evaluation.unreadable == 0
    assert (evaluation.held_out["loss"], evaluation.held_out_against["loss"]) == (2.78, 2.61)
    assert (evaluation.agreement["divergence"], evaluation.agreement["by_position"][0]["same_top"]) == (0.0417, 0.93)
    tables = {title: (heads, rows) for title, heads, _, rows in result_tables([evaluation])}
    heads, rows = tables["layers by harm"]
    assert [row[1] for row in rows] == ["3", "0"]  # the most harmful first
    assert (rows[0][-4:], rows[1][-4:]) == (("–",) * 4, ("20 %", "20 %", "20 %", "40 %"))
    heads, rows = tables["far tasks"]
    assert rows[0][1 + heads.index("against: accuracy")] == "88 %"
    html = evaluation_section([evaluation])
    for text in ("--keep-dense 3", "71 %", "0.0417", "93 %", "2.61", "data:image/svg+xml;base64,"):
        assert text in html


def test_without_a_reference_no_column_is_about_one(tmp_path):
    add(tmp_path, held_out_loss=HELD_OUT, needle=far(cell(1024, 0.5)))
    (evaluation,) = read_evaluations(tmp_path)
    for _, heads, numbers, rows in result_tables([evaluation]):
        assert not [head for head in heads if "against" in head]
        assert {len(row) for row in rows} == {len(heads) + 1}
        assert numbers.stop == len(heads)


def test_damaged_figures_of_a_comparison_are_left_out():
    hostile = [{**LAYER_ROWS[0], "harm": -1.0}, {**LAYER_ROWS[0], "window_mass": 7.0, "kind": "<script>"}, 4]
    evaluation = checked_results(
        None,
        {
            "held_out_loss": {**HELD_OUT, "against": {"loss": "<script>"}},
            "agreement": {**AGREEMENT, "same_top": "all"},
            "layers": {**LAYERS, "layers": hostile, "keep_dense": ["<script>"], "removed": float("nan")},
            "selection": {"layers": [], "against": 3},
        },
    )
    assert evaluation.unreadable == 3
    assert (evaluation.held_out_against, evaluation.agreement) == (None, None)
    assert evaluation.held_out is not None
    (row,) = evaluation.layers["layers"]
    assert row["window_mass"] == 7.0
    assert "keep_dense" not in evaluation.layers
    assert "<script>" not in evaluation_section([evaluation])
    assert layer_svg(evaluation.layers).count("<rect") > 4
    assert "keep-dense" not in layer_advice(evaluation.layers)
