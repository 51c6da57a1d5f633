import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nsa.errors import ConfigError, DataError
from nsa_train.cli.main import app
from nsa_train.data.shards.manifest import read_manifest
from nsa_train.storage import StorageFolder
from proofs import import_path

ROOT = Path(__file__).parents[3]
RUNNER = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "src"
    path.mkdir()
    lines = [json.dumps({"id": f"doc-{i}", "text": "some words of a document " * (1 + i % 9)}) for i in range(300)]
    (path / "a.jsonl").write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def prepared(source: Path) -> Path:
    out = source.parent / "out"
    arguments = ["--tokenizer", "byte", "--workers", "1", "--held-out", "0.1", "--shard-tokens", "5000"]
    result = RUNNER.invoke(app, ["data", "prepare", str(source), str(out), *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    assert "train" in result.output
    return out


@pytest.mark.parametrize("command", ["prepare", "inspect", "verify", "stats", "smoke", "bootstrap"])
def test_help_has_an_example(command: str) -> None:
    result = RUNNER.invoke(app, ["data", command, "--help"])
    assert result.exit_code == 0
    assert f"nsa data {command}" in result.output


def test_help_does_not_load_the_data_libraries() -> None:
    heavy = "('pyarrow', 'tokenizers', 'torch')"
    program = f"import sys; import nsa_train.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_inspect_finds_a_document(prepared: Path) -> None:
    arguments = ["data", "inspect", str(prepared), "--document", "3", "--shards"]
    result = RUNNER.invoke(app, arguments, catch_exceptions=False)
    assert "doc-3" in result.output
    assert "train/000000-000" in result.output
    with pytest.raises(DataError):
        RUNNER.invoke(app, ["data", "inspect", str(prepared), "--document", "99999"], catch_exceptions=False)


def test_stats_count_what_is_there(prepared: Path) -> None:
    result = RUNNER.invoke(app, ["data", "stats", str(prepared)], catch_exceptions=False)
    totals = read_manifest(StorageFolder(str(prepared))).totals("train")
    assert f"{totals['tokens']:,}" in result.output
    assert f"{25 * 9 + 1}" in result.output  # the longest document


def test_verify_names_every_damaged_file(prepared: Path) -> None:
    result = RUNNER.invoke(app, ["data", "verify", str(prepared)], catch_exceptions=False)
    assert "all files match" in result.output
    victims = sorted(prepared.glob("train/*.*"))[:3]
    raw = [v.read_bytes() for v in victims]
    for victim, content in zip(victims, raw, strict=True):
        victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        result = RUNNER.invoke(app, ["data", "verify", str(prepared)])
        assert isinstance(result.exception, DataError)
        assert all(v.name in result.output for v in victims)
    finally:
        for victim, content in zip(victims, raw, strict=True):
            victim.write_bytes(content)


def test_slurm_without_a_shared_folder_is_refused(source: Path, tmp_path: Path) -> None:
    arguments = ["data", "prepare", str(source), str(tmp_path / "o"), "--tokenizer", "byte", "--slurm-partition", "cpu"]
    with pytest.raises(ConfigError, match="--slurm-log"):
        RUNNER.invoke(app, arguments, catch_exceptions=False)


def _script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"scripts/automation/{name}", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": import_path(), "PATH": ""}, capture_output=True, text=True, timeout=90
    )


def test_the_runbooks_scripts_work_on_a_local_source(source: Path, tmp_path: Path) -> None:
    smoke = ["--seq-len", "64", "--batch", "2", "--timeout", "60", "--tokenizer", "byte", "--source", str(source)]
    done = _script("fwe_smoke.py", *smoke)
    assert done.returncode == 0, done.stderr
    assert "first batch after" in done.stdout
    done = _script("fwe_bootstrap.py", "--gb", "0.00005", "--source", str(source), "--out", str(tmp_path / "staged"))
    assert done.returncode == 0, done.stderr
    assert read_manifest(StorageFolder(str(tmp_path / "staged"))).totals("train")["documents"] > 0


def test_a_script_ends_with_the_data_exit_code(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "1", "text": ""}\n')
    done = _script("fwe_smoke.py", "--timeout", "20", "--source", str(tmp_path))
    assert done.returncode == 21
    assert "Traceback" not in done.stderr


def test_scripts_are_thin() -> None:
    for path in (ROOT / "scripts" / "automation").glob("fwe_*.py"):
        assert len(path.read_text().splitlines()) <= 10
