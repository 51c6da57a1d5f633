"""Each measurement runs and gives figures; their values are not checked."""

import json

import pytest

from tools import bench_generation

SMALL = ["--layers", "1", "--tokens", "2", "--rounds", "1", "--threads", "1", "--contexts", "130", "--batches", "1,3"]


@pytest.mark.parametrize(
    ("measurement", "figure", "cells"),
    [
        ("decode", "ratio", 2),
        ("first-token", "ratio", 2),
        ("prefill", "speed_of_training", 1),
        ("overhead", "ratio", 1),
    ],
)
def test_every_cell_gets_its_figure(measurement, figure, cells, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_generation, "VOCABULARY", 257)
    file = tmp_path / "found.json"
    measured_cells = bench_generation.main([measurement, *SMALL, "--context", "130", "--json", str(file)])
    assert [cell[figure] > 0 for cell in measured_cells] == [True] * cells
    record = json.loads(file.read_text())
    assert (record["measurement"], record["cells"]) == (measurement, measured_cells)
    assert record["machine"]["cores"] >= 1
    assert len(capsys.readouterr().out.splitlines()) == cells


def test_a_cell_that_does_not_fit_has_fewer_layers_or_is_left_out(monkeypatch):
    monkeypatch.setattr(bench_generation, "VOCABULARY", 257)
    one_layer = bench_generation.cache_bytes_per_layer(3, 130) / bench_generation.MEMORY_SHARE
    small = [*SMALL, "--layers", "4"]
    monkeypatch.setattr(bench_generation, "available_bytes", lambda: int(2.5 * one_layer))
    assert [cell["layers"] for cell in bench_generation.main(["decode", *small, "--batches", "3"])] == [2]
    monkeypatch.setattr(bench_generation, "available_bytes", lambda: int(0.5 * one_layer))
    (cell,) = bench_generation.main(["decode", *small, "--batches", "3"])
    assert "left_out" in cell


def test_filled_caches_are_as_long_as_they_say():
    model = bench_generation.our_model(1)
    cache = bench_generation.our_cache(model, 2, 70, 5)
    assert cache.get_seq_length() == 70
    assert cache.layers[0].open(model.model.layers[0].attention, 2, 5).length_B.tolist() == [70, 70]
