"""HTML report of a run: one file that needs nothing else, for every history of a run."""

import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from nsa_train import names
from nsa_train.cli.main import app
from nsa_train.record.events import EventKind
from nsa_train.record.run_data import RunData
from nsa_train.watch.view.measured_goodput import TimeCause
from nsa_train.watch.view.run_report import render
from nsa_train.watch.view.summary import RunSnapshot, summarize, take_snapshot
from tests.nsa_train.record.beats import BEGAN, a_beat, a_run, progress
from tests.nsa_train.record.written import CONFIG, write_run
from tests.nsa_train.watch.view.test_monitor_frame import CASES, START, healthy, not_finite, restarted

SECTIONS = ("curves", "gates", "timeline", "goodput", "findings", "events", "configuration", "environment")
_VOID = {"meta", "img", "input", "br", "link", "hr"}


class Page(HTMLParser):
    """Checks that what is opened is closed, and collects what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.references: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attributes = dict(attrs)
        self.ids.add(attributes.get("id", ""))
        self.references += [attributes[name] for name in ("src", "href", "action", "data") if attributes.get(name)]
        assert not [name for name in attributes if name.startswith("on")], attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def report(folder) -> str:
    return render(take_snapshot(folder))


@pytest.mark.parametrize("make", CASES)
def test_every_run_has_a_whole_page_that_needs_nothing_else(make, tmp_path):
    text = report(make(tmp_path))
    page = Page(text)
    assert set(SECTIONS) <= page.ids
    assert all(reference.startswith(("#", "data:image/png;base64,")) for reference in page.references)
    assert "@import" not in text
    assert "url(" not in text
    assert not re.search(r"https?://", text)
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)
        assert "nan" not in re.sub(r"<title>.*?</title>|<text.*?</text>|aria-label=\".*?\"", "", svg, flags=re.S)


def test_mfu_tokens_per_dollar_and_rows_of_a_mixture_are_there_where_they_are_known(tmp_path):
    def words(name, run, config):
        return " ".join(" ".join(Page(report(write_run(tmp_path / name, run, config=config))).words).split())

    data = {"mixture": {"sets/web": 0.6, "sets/code": 0.3, "sets/math": 0.1}}
    known = a_run(20, lambda step: {"mfu": 0.384, "tokens_per_usd": 1_000_000.0, "tokens_seen": 64 * 13})
    text = words("known", known, {"data": data, "train": {"seq_len": 64}})
    assert "MFU 38 % model FLOPs over the peak" in text
    assert "tokens per dollar 1,693 of all the time; 1,000,000 while it trains" in text
    assert "sets/web 60 % 8 62 % 512" in text
    assert "sets/code 30 % 4 31 % 256" in text
    assert "sets/math 10 % 1 7.7 % 64" in text
    text = words("unknown", a_run(20), {"data": {"mixture": {"a": "x", "b": -1}}, "train": {"seq_len": 64}})
    assert not {"MFU", "tokens per dollar", "Data mixture"} & {*re.findall("MFU|tokens per dollar|Data mixture", text)}


def test_the_plots_of_the_issue_are_there(tmp_path):
    page = Page(report(restarted(tmp_path)))
    words = "\n".join(page.words)
    for plot in ("loss ", "learning rate ", "throughput ", "gradient norm ", "gate shares ", "selected keys ",
                 "memory ", "wait for data "):  # fmt: skip
        assert f"\n{plot}" in words, plot
    assert "restart from step 300" in words
    assert sum(reference.startswith("data:image/png") for reference in page.references) == 3
    assert "200 steps done again" not in words  # no event said so


def test_text_of_files_is_escaped(tmp_path):
    hostile = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
    folder = tmp_path / "a<b>&'\"c"
    config = {**CONFIG, "data": {"path": hostile}, hostile: 3}
    events = [
        START,
        (EventKind.ERROR, BEGAN + 5, 1, {"error": hostile}),
        (EventKind.SKIPPED_STEP, BEGAN + 6, 2, {"reason": hostile}),
    ]
    beats = [*a_run(3), a_beat(names.FAILED, 3, BEGAN + 60, detail=hostile)]
    (write_run(folder, beats, events, config=config) / names.HEALTH_LOG).write_text(f"CRITICAL {hostile}\n")
    page = Page(report(folder))
    assert page.tags.count("script") == 1
    assert "alert" not in "".join(page.references)
    assert sum("<script>alert(1)</script>" in words for words in page.words) >= 4
    assert "a<b>&'\"c" in page.words


def test_not_finite_values_are_marked(tmp_path):
    text = report(not_finite(tmp_path))
    assert 'class="bad"' in text
    assert "loss_nonfinite" in text
    assert 'class="bad"' not in report(healthy(tmp_path / "h"))


def test_settings_come_with_their_origins_and_given_ones_first(tmp_path):
    text = "\n".join(Page(report(healthy(tmp_path))).words)
    assert text.index("train.lr") < text.index("run.yaml:3") < text.index("train.steps")
    assert "1 settings were given" not in text  # what has no origin is not called a default
    assert "4 settings were given, 1 are defaults" in text


def test_findings_of_a_watchdog_have_a_begin_and_an_end(tmp_path):
    which = {"condition": "data_slow", "level": "warning", "ranks": [0]}
    events = [
        START,
        (EventKind.FINDING, BEGAN + 30, 5, {**which, "message": "3.0 s for 5 records"}),
        (EventKind.FINDING, BEGAN + 90, 9, {**which, "over": True}),
    ]
    text = report(write_run(tmp_path, a_run(9), events))
    assert "found by the watchdog" in text
    assert "3.0 s for 5 records" in text
    assert "<td>2023-11-14 22:13:50 UTC</td><td>2023-11-14 22:14:50 UTC</td>" in text


def test_the_command_writes_into_the_run_folder_or_to_the_given_path(tmp_path):
    folder = healthy(tmp_path / "run")
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
    assert (folder / "report.html").exists()
    out = tmp_path / "new" / "r.html"
    result = CliRunner().invoke(app, ["report", str(folder), "--out", str(out)])
    assert result.exit_code == 0
    assert str(out) in result.output
    assert out.read_text().startswith("<!doctype html>")


def long_run(records: int) -> RunData:
    """Fed as the reader feeds it, without the file."""
    run, template = RunData(Path("long")), progress(1, BEGAN).as_dict()
    layers = [[0.3, 0.3, 0.4]] * 12

    def records_():
        yield a_beat(names.START, 0, BEGAN).as_dict()
        for step in range(1, records + 1):
            loss = 77.0 if step == records // 2 else 2 + 8 * step**-0.3 + 0.05 * math.sin(step)
            yield {**template, "ts": BEGAN + step, "step": step, "loss": loss, "gate_shares_by_layer": layers}

    for record in records_():
        run.add(0, record)
    return run


def check_long(run: RunData, seconds: float) -> None:
    began = time.process_time()
    text = render(RunSnapshot(run, summarize(run), "running", [], BEGAN + len(run.lead)))
    assert time.process_time() - began < seconds
    assert len(text.encode()) < 2 * 2**20
    assert "77.00" in text  # the one record that was high


def test_a_long_run_is_one_small_file_with_its_spike():
    check_long(long_run(50_000), 10)


@pytest.mark.nightly
def test_half_a_million_records_in_a_file_make_a_report_in_time(tmp_path):
    from nsa_train.record.record_files import to_line

    template = to_line({**progress(1, BEGAN).as_dict(), "ts": "TS", "step": "STEP", "loss": "LOSS"})
    head, tail = template.split('"TS"')
    with (tmp_path / names.heartbeat(0)).open("w") as file:
        for step in range(1, 500_001):
            loss = 77.0 if step == 250_000 else 2 + 8 * step**-0.3
            rest = tail.replace('"STEP"', str(step)).replace('"LOSS"', repr(loss))
            file.write(f"{head}{BEGAN + step}{rest}\n")
    began = time.process_time()
    text = report(tmp_path)
    assert time.process_time() - began < 40  # 20 s on a machine that does nothing else
    assert len(text.encode()) < 2 * 2**20
    assert "77.00" in text


def test_goodput_is_shown_by_every_cause(tmp_path):
    words = Page(report(restarted(tmp_path))).words
    assert {cause.value for cause in TimeCause} <= set(words)
