"""`nsa init`: shipped configs rewritten for a user's folder, nothing overwritten, commands that exist."""

import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from nsa.errors import ConfigError, NSAError, OutputError
from nsa_train.cli.main import app
from nsa_train.config import load
from nsa_train.config.schema import settings
from nsa_train.config.starter_config import make_starter, shipped_configs
from nsa_train.shipped import CONFIGS, CORPUS, STORIES, config_names, config_text
from tests.docs.blocks import unknown_words


def run_init(*words: str) -> str:
    done = CliRunner().invoke(app, ["init", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", config_names())
def test_every_shipped_config_keeps_its_settings_apart_from_its_paths(name):
    run_init("my-run", "--config", name)
    initialized, shipped = load("my-run/config.yaml"), load(CONFIGS / f"{name}.yaml")
    assert initialized.train.out_dir == "my-run/run"
    paths = {"train.out_dir", "data.path", "data.tokenizer"}
    differing = {key for key in settings() if initialized.value(key) != shipped.value(key)}
    assert differing <= paths
    for key in ("data.path", "data.tokenizer"):
        if "artifacts" in str(shipped.value(key)):
            assert str(initialized.value(key)).startswith("my-run/")
    assert "artifacts/" not in Path("my-run/config.yaml").read_text()


@pytest.mark.parametrize("name", config_names())
def test_every_setting_has_a_comment_and_comments_of_the_shipped_file_are_kept(name):
    text = make_starter(name, Path("my-run")).text
    values = [line for line in text.splitlines() if line.strip() and not line.startswith("#") and line[-1] != ":"]
    assert values
    assert all(" # " in line for line in values)
    for line in config_text(name).splitlines():
        if line[:1] == " " and "#" in line:
            assert line[line.index("#") :] in text


@pytest.mark.parametrize("name", config_names())
def test_the_commands_exist_and_name_files_of_the_folder(name):
    starter = make_starter(name, Path("my-run"))
    for command in starter.commands:
        words = shlex.split(command)
        assert words[0] == "nsa"
        assert unknown_words(words[1:]) is None
        assert not [word for word in words if word.startswith(("artifacts/", "configs/", "tests/", "data/"))]
    assert any("my-run/config.yaml" in command for command in starter.commands)


@pytest.mark.parametrize(("words", "corpus"), [((), STORIES), (("--config", "base_125m_8k"), CORPUS)])
def test_the_corpus_is_a_copy_of_the_one_that_the_config_was_written_for(words, corpus):
    run_init("my-run", "--text", *words)
    assert [path.read_bytes() for path in Path("my-run/text").iterdir()] == [corpus.read_bytes()]
    assert "PostgreSQL" in Path("my-run/NOTICES.txt").read_text()


def test_the_first_config_prints_its_commands():
    printed = [line for line in run_init("my-run", "--text").splitlines() if line.startswith("  nsa ")]
    assert [command.split()[1] for command in printed] == ["data", "data", "train", "generate"]


def test_without_text_it_says_where_to_put_it():
    assert "put your text into my-run/text" in run_init("my-run")
    assert list(Path("my-run/text").iterdir()) == []


def test_a_config_that_downloads_its_data_gets_no_text_folder():
    run_init("my-run", "--config", "base_125m_8k")
    assert [path.name for path in Path("my-run").iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("folder", ["two words", "a#b", "it's", "über", "a: b", "deep/er", "*x"])
def test_an_unusual_folder_name_is_quoted_in_yaml_and_in_the_shell(folder):
    output = run_init(folder)
    assert load(Path(folder) / "config.yaml").train.out_dir == f"{folder}/run"
    assert yaml.safe_load((Path(folder) / "config.yaml").read_text())["data"]["path"] == f"{folder}/data"
    (train,) = [line for line in output.splitlines() if line.startswith("  nsa train")]
    assert shlex.split(train)[2] == f"{folder}/config.yaml"


@pytest.mark.parametrize("words", [["my-run"], ["my-run", "--text"], ["my-run", "--config", "train_50k"]])
def test_nothing_is_overwritten(words):
    run_init("my-run", "--text")
    Path("my-run/config.yaml").write_text("mine")
    with pytest.raises(OutputError, match=r"my-run already holds config\.yaml.*Name another folder"):
        run_init(*words)
    assert Path("my-run/config.yaml").read_text() == "mine"


def test_a_refusal_writes_nothing():
    Path("my-run").mkdir()
    Path("my-run/NOTICES.txt").write_text("mine")
    with pytest.raises(OutputError):
        run_init("my-run", "--text")
    assert [path.name for path in Path("my-run").iterdir()] == ["NOTICES.txt"]


def test_a_file_in_the_place_of_the_folder_is_an_error():
    Path("my-run").write_text("")
    with pytest.raises(NSAError):
        run_init("my-run")


def test_an_unknown_config_is_refused_with_a_guess():
    with pytest.raises(ConfigError, match="Did you mean cpu_quickstart"):
        run_init("my-run", "--config", "cpu_quick_start")
    assert not Path("my-run").exists()


def test_a_missing_folder_is_refused():
    with pytest.raises(ConfigError, match="nsa init my-run"):
        run_init()


def test_the_list_has_every_config_for_new_runs_with_purpose_and_hardware():
    output = run_init("--list")
    for each in shipped_configs():
        assert f"\n{each.name}\n" in f"\n{output}"
        assert each.purpose in output
        assert f"hardware: {each.hardware}" in output
    unlisted = set(config_names()) - {each.name for each in shipped_configs()}
    assert unlisted == {name for name in config_names() if name.startswith("m7c_")}
    assert "m7c_" not in output
