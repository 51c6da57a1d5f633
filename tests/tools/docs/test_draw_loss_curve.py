"""The axis of the loss curve has round numbers, with their labels in the picture."""

import re
import sys

import pytest

from tools.docs import draw_loss_curve


@pytest.mark.parametrize("steps", [3, 60, 100, 150, 300, 800, 50000])
def test_ticks_are_few_and_within_the_run(steps):
    ticks = draw_loss_curve.ticks(steps)
    assert ticks[0] == 0
    assert 3 <= len(ticks) <= 7
    assert ticks[-1] <= steps


def test_every_tick_has_a_label_inside_the_picture(tmp_path, monkeypatch):
    (tmp_path / "training.csv").write_text("step,loss\n1,5.5\n150,2.5\n300,2.1\n")
    (tmp_path / "val.csv").write_text("step,val_loss\n300,2.0\n")
    (tmp_path / "env.json").write_text('{"tokenizer": {"name": "byte"}}')
    out = tmp_path / "curve.svg"
    monkeypatch.setattr(sys, "argv", ["draw", str(tmp_path), str(out)])
    draw_loss_curve.main()
    text = out.read_text()
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', text)[0])
    labels = {
        label: (float(x), float(y))
        for x, y, label in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>(\d+)</text>', text)
    }
    assert {"0", "100", "200", "300", "2", "5"} <= labels.keys()
    assert all(0 < x < width - 10 and 0 < y < height for x, y in labels.values())
