"""Text from files, chosen by somebody else, reaches no terminal raw: run folders, checkpoints, data sets, errors."""

import json
import re
import sys
import time
from contextlib import suppress
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from nsa_train import names
from nsa_train.checkpoint.manifest import CheckpointManifest, ManifestEntry, encode
from nsa_train.cli.main import main
from nsa_train.names import COMMIT
from nsa_train.record.events import EventKind
from nsa_train.terminal_text import printable
from nsa_train.watch.exporter import RunsCollector
from tests.nsa_train.data.shard_sets import documents, write_set
from tests.nsa_train.record.beats import a_beat, a_run
from tests.nsa_train.record.written import CONFIG, write_run

MARKUP = "[red]mark[/red]"
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"
CONTROLS = "\x1b]52;c;eA==\x07\x1b]8;;http://evil\x1b\\\x1b[2J\x9b31m\u202eevil\u2066\x00\x7f\ud800\r"
HOSTILE = f"{CONTROLS}\nfake line {MARKUP}{SCRIPT}"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture
def nsa(capsys, monkeypatch):
    """Runs a command as the shell does; returns what it printed, both streams, after checking that it is harmless."""

    def run(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["nsa", *map(str, words)])
        with suppress(SystemExit):
            main()
        printed = capsys.readouterr()
        text = printed.out + printed.err
        assert not RAW.search(text), f"{RAW.search(text)} in {text!r}"
        assert not re.search(r"^fake line", text, re.MULTILINE), text
        return text

    return run


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """Hostile in every place that takes text: name, beats, events, env.json, .HALT, .anomaly_type, health_check.log."""
    now = time.time() - 200
    beats = [replace(beat, data=HOSTILE, kernel_select=HOSTILE, allowed=(HOSTILE,)) for beat in a_run(40, began=now)]
    beats.append(a_beat(names.FAILED, 41, beats[-1].ts, detail=f"{HOSTILE}: {HOSTILE}"))
    texts = dict.fromkeys(("reason", "error", "problem", "why", "message", "condition", "level", "origin"), HOSTILE)
    events = [(kind, now + 1, 1, texts) for kind in EventKind]
    config = json.loads(json.dumps(CONFIG)) | {HOSTILE: {HOSTILE: HOSTILE}, "data": {"dataset": HOSTILE}}
    config["train"]["note"] = HOSTILE
    folder = write_run(tmp_path / "run [red] \x1b[2J\u202e", beats, events, config=config)
    env = json.loads((folder / names.ENV).read_text())
    env |= {"nsa": HOSTILE, "device": HOSTILE, "host": HOSTILE, HOSTILE: HOSTILE, "packages": {"torch": HOSTILE}}
    env["origins"] = {"train.lr": HOSTILE, HOSTILE: HOSTILE}
    (folder / names.ENV).write_text(json.dumps(env))
    raw = HOSTILE.encode("utf-8", "surrogatepass")
    (folder / names.HALT).write_bytes(b"halt: " + raw + b"\nby: " + raw)
    (folder / names.ANOMALY).write_bytes(raw)
    (folder / names.HEALTH_LOG).write_bytes(raw * 3)
    return folder


@pytest.mark.parametrize("command", [["status"], ["smoke"], ["monitor", "--once"], ["monitor", "--once", "--height=50"],
                                     ["watch", "--once"], ["halt"], ["status", "--json"]])  # fmt: skip
def test_a_run_folder(run_folder, nsa, command):
    text = nsa(command[0], run_folder, *command[1:])
    assert text
    if command == ["status"]:
        assert "run [red]" in text.splitlines()[0], "the name of the folder is not markup"
        assert text.count(MARKUP) >= 3, "neither is .HALT or an error"
        assert r"\x1b]52" in text


def test_the_health_log_that_watch_writes(run_folder, nsa):
    (run_folder / names.HEALTH_LOG).unlink()
    nsa("watch", run_folder, "--once")
    lines = (run_folder / names.HEALTH_LOG).read_text()
    assert "run_failed" in lines
    assert not RAW.search(lines)


@pytest.mark.parametrize("command", ["report", "compare"])
def test_pages(run_folder, nsa, tmp_path, command):
    other = write_run(tmp_path / "other", a_run(20))
    page = tmp_path / "page.html"
    nsa(*((command, run_folder) if command == "report" else (command, run_folder, other)), "--out", page)
    text = page.read_text(encoding="utf-8")
    assert not RAW.search(text)
    parser = Tags()
    parser.feed(text)
    assert parser.tags.count("script") == 1, "only the page's own"
    assert all(uri.startswith("data:image/png;base64,") for uri in parser.sources)
    assert not parser.handlers
    assert "&lt;script&gt;alert(1)" in text


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.sources += [value or "" for name, value in attrs if name == "src"]


def test_labels_for_prometheus(run_folder):
    collector = RunsCollector([run_folder.parent])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        text = generate_latest(registry).decode()
    finally:
        collector.close()
    assert not RAW.search(text)
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {printable(run_folder.name)}


def test_checkpoints(tmp_path, nsa):
    listed: dict[int, dict[str, ManifestEntry]] = {5: {HOSTILE: ManifestEntry(3, "0" * 64)}, 7: {}, 9: {}}
    for step, files in listed.items():
        folder = tmp_path / "checkpoints" / f"step{step}"
        folder.mkdir(parents=True)
        (folder / COMMIT).write_bytes(encode(CheckpointManifest(step, HOSTILE, files)))
    (tmp_path / "checkpoints" / "step7" / "x\x1b[2J\u202e").write_text("x")
    for command in (["ls"], ["verify"], ["export", "--out", tmp_path / "out"]):
        assert "step" in nsa("checkpoint", command[0], tmp_path, *command[1:])
    nsa("checkpoint", "verify", tmp_path / "no\x1b[2Jwhere")


def test_prepared_sets(tmp_path, nsa):
    manifest = write_set(tmp_path / "set", [(HOSTILE.replace("\ud800", ""), tokens) for _, tokens in documents(5)])
    made_from = {"source": HOSTILE, "held_out_fraction": HOSTILE}
    hostile = replace(manifest, tokenizer_fingerprint=HOSTILE, made_from=made_from)
    (tmp_path / "set" / "manifest.json").write_bytes(hostile.to_bytes())
    assert r"\x1b]52" in nsa("data", "inspect", tmp_path / "set", "--shards", "--document", 0)
    nsa("data", "verify", tmp_path / "set")
    (next((tmp_path / "set" / "train").glob("*.tok"))).write_bytes(b"damaged")
    nsa("data", "verify", tmp_path / "set")
    nsa("data", "stats", tmp_path / "set")
    nsa("data", "inspect", tmp_path / "no\x1b[2Jset")


def test_configs(tmp_path, nsa):
    path = tmp_path / "evil\x1b[2J.yaml"
    path.write_text(f"train:\n  out_dir: {json.dumps('a' + HOSTILE.replace(chr(0xD800), ''))}\n")
    nsa("config", "check", path)
    assert "out_dir" in nsa("config", "show", path, "--all") + nsa("config", "show", path)
    path.write_text('train:\n  "st\\e[2Jeps": 3\n')
    assert r"\x1b" in nsa("config", "check", path)


def test_a_run_that_is_started_over_a_hostile_halt_file(tmp_path, nsa):
    (tmp_path / names.HALT).write_bytes(b"halt: " + HOSTILE.encode("utf-8", "surrogatepass"))
    words = ["data.dataset=synthetic", f"train.out_dir={tmp_path}", "train.steps=1", "train.eval_every=0"]
    assert "not started" in nsa("train", "configs/cpu_quickstart.yaml", *words)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [x] é 字 \\", "plain [x] é 字 \\"),
        ("a\x1b[31mb\n\r\t\x00", r"a\x1b[31mb\n\r\t\x00"),
        ("\u202e\u2066\u200b\ufeff\ud800\x9b", r"\u202e\u2066\u200b\ufeff\ud800\x9b"),
        (3, "3"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown
    assert printable(printable(text)) == shown


def test_printable_cuts_what_is_too_long_and_may_keep_lines():
    assert printable("x" * 900, 5) == "xxxx…"
    assert len(printable("\x1b" * 900, 50)) == 50
    assert printable("a\n\x1bb", keep_newlines=True) == "a\n\\x1bb"
