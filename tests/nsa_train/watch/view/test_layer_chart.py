"""Layers of a comparison as bars of characters and as a picture."""

import re

import pytest

from nsa_train.watch.view.layer_chart import layer_bars, layer_svg
from tests.nsa_train.watch.view.test_evaluation_tables import LAYERS


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
