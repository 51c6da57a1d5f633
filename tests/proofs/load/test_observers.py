"""The load test of exporter and views, small; and that it notices an exporter that serves old values."""

import pytest

pytest.importorskip("prometheus_client", reason="pip install -e packages/nsa-attention -e 'packages/nsa-train[ops]'")

from nsa_train.record.heartbeat_record import beat_fields
from nsa_train.record.record_files import RecordTail
from proofs.load.observers import measure_exporter, measure_views
from proofs.load.run_folders import append_steps, write_run_folder


def test_written_run_folders_are_read_without_damage(tmp_path):
    run = write_run_folder(tmp_path / "run", 20, saves=4)
    append_steps(run, 21, 2)
    tail = RecordTail(run / "heartbeat_rank0.jsonl", beat_fields())
    assert [beat["step"] for beat in tail.read()] == list(range(23))
    assert tail.unreadable == 0


def test_every_scraper_sees_every_run_and_the_newest_step():
    figures = measure_exporter(runs=3, scrapers=4, steps=20, seconds=3.0)
    assert figures["wrong"] == []
    assert figures["scrapes"] > 8
    assert figures["open files before, after"][0] == figures["open files before, after"][1]


def test_the_views_of_a_run_give_an_answer():
    rows = measure_views(200)
    assert [row["exit code"] for row in rows] == [0, 0, 0]
    assert rows[0]["page MB"] > 0.01
