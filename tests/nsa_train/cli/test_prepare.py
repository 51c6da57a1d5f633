"""`nsa data prepare` on own text: summary, JSON, refusals, and numbers that no terminal cuts."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from nsa.errors import ConfigError, DataError, OutputError
from nsa_train.cli.data import _progress_text
from nsa_train.cli.main import app
from nsa_train.cli.prepared_set import _SHIPPED_MODELS, advise
from nsa_train.cli.train import _progress
from nsa_train.config import load
from nsa_train.data.prepare.run import PrepareProgress
from nsa_train.data.source.file import LocalFile
from nsa_train.data.source.jsonl import JsonlSource
from nsa_train.data.source.read_report import BAD_LINES, ReadReport
from nsa_train.data.tokenizer import load_tokenizer, train_bpe

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(8):
        (folder / f"{number}.md").write_text(f"# Title {number}\n" + "words " * 500)
    (folder / "evil\x1b[2J.pdf").write_text("x")
    (folder / "a.jsonl").write_text('{"text": "one line of a file"}\n')
    return folder


@pytest.fixture(scope="module")
def prepared(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("prepared") / "out"
    arguments = ["data", "prepare", str(texts), str(out), "--workers", "1", "--held-out", "0.2"]
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    return out, done.stdout


def invoke(*words: str, columns: int = 80) -> str:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(words), catch_exceptions=False).stdout


def test_the_summary_has_every_kind_reason_and_a_preview(prepared: tuple[Path, str]) -> None:
    _, summary = prepared
    for part in ("markdown", "jsonl", "unknown ending", "⟨end⟩", "one line of a file", "20 tokens per parameter"):
        assert part in summary
    assert "\x1b[2J" not in summary


def test_json_holds_the_same_and_nothing_else(texts: Path, prepared: tuple[Path, str]) -> None:
    out, _ = prepared
    summary = json.loads(
        invoke("data", "prepare", str(texts), str(out), "--workers", "1", "--held-out", "0.2", "--json")
    )
    assert summary["read"]["kinds"]["markdown"]["files"] == 8
    assert sum(split["documents"] for split in summary["splits"].values()) == 9
    assert summary["model_size"]["nearest_config"] == "cpu_quickstart"
    assert summary["preview"][0]["ids"][-1] == summary["tokenizer"]["eos_id"] or not summary["preview"][0]["complete"]
    for command in ("inspect", "stats", "verify"):
        assert json.loads(invoke("data", command, str(out), "--json"))["set"] == str(out)
    assert json.loads(invoke("data", "verify", str(out), "--json"))["ok"] is True


def test_verify_reports_damage_as_json_with_exit_code_21(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    invoke("data", "prepare", str(texts), str(out), "--workers", "1")
    (victim,) = out.glob("train/000001-000.tok")
    victim.write_bytes(b"x" + victim.read_bytes()[1:])
    done = CliRunner().invoke(app, ["data", "verify", str(out), "--json"])
    assert json.loads(done.stdout)["damaged"][0]["name"] == "train/000001-000.tok"
    assert isinstance(done.exception, DataError)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_number_is_cut(prepared: tuple[Path, str], columns: int) -> None:
    out, _ = prepared
    longest = max(of["longest"] for of in json.loads(invoke("data", "stats", str(out), "--json"))["lengths"].values())
    shown = invoke("data", "stats", str(out), columns=columns)
    assert f"{longest:,}" in shown
    assert "…" not in shown


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_the_live_line_drops_parts_and_cuts_none(width: int) -> None:
    beat = SimpleNamespace(step=123456, loss=3.14159, toks_per_s=1234567.0, lr=3e-4, grad_norm=1.25, step_s=12.5)
    line = _progress(beat, 500000, 75.0, width)  # type: ignore[arg-type]
    assert line.startswith("step 123456/500000")
    assert len(line) <= max(width, 45)
    assert set(line.split(" · ")) <= set(_progress(beat, 500000, 75.0).split(" · "))  # type: ignore[arg-type]


def test_progress_has_a_share_and_the_time_left() -> None:
    progress = PrepareProgress("tokenize", 30, 10, 50, 2_000_000, 10.0)
    assert progress.left_s == pytest.approx(10.0)
    line = _progress_text(progress)
    assert "60%" in line
    assert "0:10 left" in line
    assert len(f"{line} … 3600 s") <= 80


def test_missing_sources_and_sets_are_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        invoke("data", "inspect", str(tmp_path / "none"))
    with pytest.raises(ConfigError):
        invoke("data", "prepare", str(tmp_path / "none"), str(tmp_path / "out"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty"):
        invoke("data", "prepare", str(tmp_path / "empty"), str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="encoding"):
        invoke("data", "prepare", str(ROOT / "README.md"), str(tmp_path / "out"), "--encoding", "rot13")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_is_trained_on_what_prepare_reads_and_says_what_was_skipped(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    lines = [json.dumps({"content": f"line {number} of a corpus"}) for number in range(9)]
    (corpus / "a.jsonl").write_text("\n".join([*lines[:3], "{cut", *lines[3:]]))
    (corpus / "binary.txt").write_bytes(b"\0\1\2" * 99)
    (corpus / "empty.txt").write_text("")
    (corpus / "notes.docx").write_text("x")
    (corpus / "good.txt").write_text("a page of text " * 30)
    words = [str(corpus), str(tmp_path / "bpe.json"), "--vocab-size", "280", "--text-column", "content"]
    said = invoke("data", "tokenizer", "train", *words)
    skipped = said[said.index("Not used:") :].splitlines()[1:5]
    prepared = invoke("data", "prepare", str(corpus), str(tmp_path / "out"), "--workers", "1", *words[-2:])
    assert "1 bad JSON lines: a.jsonl, line 4 is not JSON" in prepared
    assert len(skipped) == 4
    for line in skipped:
        count_and_reason, _, name = line.partition(": ")
        assert count_and_reason in prepared
        assert name.removeprefix(f"{corpus}/") in prepared
    for name in ("good.txt", "a.jsonl"):
        (corpus / name).unlink()
    with pytest.raises(DataError, match="no text"):
        invoke("data", "tokenizer", "train", str(corpus), str(tmp_path / "none.json"))


def test_a_tokenizer_is_trained_on_text_in_the_encoding_that_prepare_takes(tmp_path: Path) -> None:
    """The corpus in Windows-1251 gives the tokenizer of the same corpus in UTF-8."""
    text, fingerprints = "съешь же ещё этих мягких французских булок " * 40, {}
    for name, encoding in (("cp1251", "cp1251"), ("utf-8", "cp1252")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(text, encoding=name)
        path = tmp_path / f"{name}.json"
        words = [str(tmp_path / name), str(path), "--vocab-size", "280", "--encoding", encoding]
        invoke("data", "tokenizer", "train", *words)
        fingerprints[name] = load_tokenizer(str(path)).fingerprint
    assert fingerprints["cp1251"] == fingerprints["utf-8"]
    with pytest.raises(ConfigError, match="encoding"):
        invoke("data", "tokenizer", "train", str(tmp_path), str(tmp_path / "none.json"), "--encoding", "rot13")


@pytest.mark.parametrize("command", ["prepare", "tokenizer train", "smoke --source"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_wrong_key_of_the_text_is_answered_with_the_option_and_the_keys(command, kind, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    corpus = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        damaged = "" if "smoke" in command else "{cut\n"  # without a report the first bad line is the reason
        corpus.write_text(damaged + '{"content": "some text", "url": "x"}\n' * 9)
    else:
        pq.write_table(pa.table({"content": ["some text"] * 9, "url": ["x"] * 9}), corpus)
    out = [] if "smoke" in command else [str(tmp_path / "out")]
    with pytest.raises(DataError) as refused:
        invoke("data", *command.split(), str(corpus), *out)
    for word in ("'text'", "content", "url", "--text-column NAME", str(corpus)):
        assert word in str(refused.value)
    assert not re.search(r"download|restore", str(refused.value), re.IGNORECASE)


def test_a_bad_line_has_a_number_that_leads_to_it(tmp_path: Path) -> None:
    good = json.dumps({"text": "word " * 9}).encode() + b"\n"
    raw = good * 3 + b"{cut\n" + good * 9 + b"[1]\n" + good * 5
    (tmp_path / "a.jsonl").write_bytes(raw)
    block = len(good) * 5
    report = ReadReport()
    source = JsonlSource([LocalFile("a.jsonl", tmp_path / "a.jsonl")], block_bytes=block, report=report)
    assert sum(len(source.read(index)) for index in range(len(source))) == 17
    first, second = report.skipped[BAD_LINES].first
    assert first.startswith("a.jsonl, line 4 is not JSON")
    number, start = map(int, re.match(r"a\.jsonl, line (\d+) after byte (\d+) is list", second).groups())  # type: ignore[union-attr]
    started_there = [at for at in line_starts(raw) if at >= start]
    assert raw[started_there[number - 1] :].startswith(b"[1]")


def line_starts(raw: bytes) -> list[int]:
    return [0, *(match.end() for match in re.finditer(b"\n", raw))]


def test_a_tokenizer_is_not_replaced_unless_told_so(texts: Path, tmp_path: Path) -> None:
    path = tmp_path / "bpe.json"
    words = ["data", "tokenizer", "train", str(texts), str(path), "--vocab-size", "270"]
    invoke(*words)
    before = path.read_bytes()
    with pytest.raises(OutputError, match="--overwrite"):
        invoke(*words[:-1], "280")
    assert path.read_bytes() == before
    invoke(*words[:-1], "280", "--overwrite")
    assert path.read_bytes() != before


def test_another_tokenizer_beside_a_prepared_set_is_refused(prepared: tuple[Path, str], tmp_path: Path) -> None:
    from nsa_train.train.datasets import require_set_tokenizer

    out, _ = prepared
    train_bpe(["some words"] * 9, 300, tmp_path / "bpe.json")

    def config(*more: str):
        return load(
            ROOT / "configs" / "train_50k.yaml",
            overrides=["data.dataset=prepared", f"data.path={out}", *more],
            environ={},
        )

    require_set_tokenizer(config())
    require_set_tokenizer(config("data.tokenizer=byte"))
    require_set_tokenizer(config("data.tokenizer=not_here.json"))
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        require_set_tokenizer(config(f"data.tokenizer={tmp_path / 'bpe.json'}"))


def test_parameters_of_the_shipped_configs_are_those_of_the_code() -> None:
    from nsa_train.planning.estimate import estimate
    from nsa_train.planning.hardware import parse_target

    vocabularies = {"cpu_quickstart": 257, "cpu_stories": 2048}
    for name, parameters in _SHIPPED_MODELS.items():
        config = load(Path(name), environ={})
        run_estimate = estimate(config, parse_target("h100-80gb:8"), vocabularies.get(name, 32768))
        assert run_estimate.parameters.total == parameters, name


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "config", "too_little"),
    [
        (0, 257, "cpu_quickstart", True),
        (10**7, 257, "cpu_quickstart", False),
        (2 * 10**9, 32768, "base_125m_8k", False),
    ],
)
def test_advice_names_the_nearest_config(tokens: int, vocab_size: int, config: str, too_little: bool) -> None:
    advice = advise(tokens, vocab_size)
    assert advice["nearest_config"] == config
    assert (advice["nearest_parameters"] > 2 * advice["parameters_at_most"]) == too_little
    assert advise(4 * tokens, 257)["parameters"] == advise(tokens, 32768)["parameters"]
