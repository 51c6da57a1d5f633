"""Precedence of the layers of settings, and the origin of every value."""

from pathlib import Path

import pytest

from nsa.errors import ConfigError
from nsa_train.config import RunConfig, load
from nsa_train.config.schema import settings

KEY, VARIABLE = "data.queue_depth", "NSA_FWE_Q"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Resolve a run from layers that each give `data.queue_depth` another value."""
    monkeypatch.chdir(tmp_path)
    Path("profiles").mkdir()
    Path("profiles/lab.yaml").write_text("data:\n  queue_depth: 2\n  report_docs: 7\n")

    def resolve(*layers: str) -> RunConfig:
        lines = ["profile: lab"] if "profile" in layers else []
        lines += ["data:", "  queue_depth: 3"] if "file" in layers else []
        Path("run.yaml").write_text("\n".join([*lines, "train:", "  seed: 1"]))
        environ = {VARIABLE: "4"} if "environment" in layers else {}
        overrides = [f"{KEY}=5"] if "command line" in layers else []
        return load("run.yaml", environ=environ, overrides=overrides)

    return resolve


@pytest.mark.parametrize(
    ("layers", "value", "origin"),
    [
        ([], 8, "default"),
        (["profile"], 2, "profile lab"),
        (["profile", "file"], 3, "run.yaml:3"),
        (["file"], 3, "run.yaml:2"),
        (["profile", "environment"], 4, "environment NSA_FWE_Q"),
        (["file", "environment"], 4, "environment NSA_FWE_Q"),
        (["profile", "file", "environment"], 4, "environment NSA_FWE_Q"),
        (["profile", "command line"], 5, "command line"),
        (["file", "command line"], 5, "command line"),
        (["environment", "command line"], 5, "command line"),
        (["profile", "file", "environment", "command line"], 5, "command line"),
    ],
)
def test_the_last_layer_that_gives_a_value_wins(run, layers, value, origin):
    config = run(*layers)
    assert config.data.queue_depth == value
    assert config.origin(KEY) == origin


def test_a_layer_leaves_alone_what_it_does_not_mention(run):
    config = run("profile", "file", "environment", "command line")
    assert (config.data.report_docs, config.origin("data.report_docs")) == (7, "profile lab")
    assert (config.train.steps, config.origin("train.steps")) == (1000, "default")


def test_a_value_equal_to_its_default_still_names_its_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train:\n\n  steps: 1000\n")
    assert load(file).origin("train.steps") == f"{file}:3"


def test_every_setting_has_an_origin(run):
    origins = run("file").origins()
    assert origins.keys() == settings().keys()
    assert {key for key, origin in origins.items() if origin != "default"} == {KEY, "train.seed"}


def test_of_two_overrides_the_later_wins(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train: {lr: 3}")
    assert load(file, overrides=["train.lr=1", "train.lr=2"]).train.lr == 2


def test_a_branch_variable_wins_over_the_one_for_all_branches(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("kernels:\n  sliding: triton\n")
    # Both orders, since a mapping's order must not decide.
    for environ in (
        {"NSA_KERNEL": "portable", "NSA_KERNEL_SELECT": "reference"},
        {"NSA_KERNEL_SELECT": "reference", "NSA_KERNEL": "portable"},
    ):
        config = load(file, environ=environ)
        assert config.kernels.select == "reference"
        assert config.origin("kernels.select") == "environment NSA_KERNEL_SELECT"
        assert config.kernels.sliding == config.kernels.selected == config.kernels.compressed == "portable"
        assert config.origin("kernels.sliding") == "environment NSA_KERNEL"


def test_config_names_the_file_unless_one_is_given(tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("train: {seed: 1}")
    two.write_text("train: {seed: 2}")
    assert load(environ={"CONFIG": str(one)}).train.seed == 1
    assert load(two, environ={"CONFIG": str(one)}).train.seed == 2
    with pytest.raises(ConfigError, match="CONFIG"):
        load()


class TestProfile:
    def test_the_command_line_can_choose_another(self, run):
        Path("profiles/other.yaml").write_text("data: {queue_depth: 11}")
        run("profile")
        config = load("run.yaml", overrides=["profile=other"])
        assert config.data.queue_depth == 11
        assert config.origin("profile") == "command line"
        assert config.origin(KEY) == "profile other"

    def test_may_be_a_path_beside_the_config(self, run):
        run()
        config = load("run.yaml", overrides=["profile=profiles/lab.yaml"])
        assert config.origin(KEY) == "profile profiles/lab.yaml"

    def test_shipped_ones_are_found_from_anywhere(self, run):
        run()
        assert load("run.yaml", overrides=["profile=a100"]).origin("runtime.precision") == "profile a100"

    def test_toy_is_a_flag_and_not_a_file(self, run):
        run()
        config = load("run.yaml", overrides=["profile=toy"])
        assert config.profile == config.TOY
        assert load("run.yaml").profile is None
        assert {config.origin(key) for key in settings()} == {"default", "command line", "run.yaml:2"}

    def test_unknown_name_suggests_a_known_one(self, run):
        run()
        with pytest.raises(ConfigError, match=r"command line: .*'rtx409'.*rtx4090\?"):
            load("run.yaml", overrides=["profile=rtx409"])

    def test_a_mistake_in_it_is_shown_at_its_own_line(self, run):
        Path("profiles/lab.yaml").write_text("runtime:\n  precision: fp8\n  prefil_chunk: 1\n")
        with pytest.raises(ConfigError) as caught:
            run("profile")
        assert "profiles/lab.yaml:2: runtime.precision must be one of bf16, fp16, fp32 (got 'fp8')" in str(caught.value)
        assert "profiles/lab.yaml:3: unknown key runtime.prefil_chunk" in str(caught.value)

    def test_cannot_name_another(self, run):
        Path("profiles/lab.yaml").write_text("profile: a100\n")
        with pytest.raises(ConfigError, match=r"profiles/lab\.yaml:1: "):
            run("profile")


class TestShortProbeOfALongConfig:
    @pytest.fixture
    def long(self, tmp_path):
        file = tmp_path / "long.yaml"
        file.write_text("train:\n  steps: 50000\n  warmup_steps: 2000\n")
        return file

    def test_warmup_is_fitted_to_the_steps_asked_for_and_said(self, long):
        config = load(long, overrides=["train.steps=100"])
        assert config.train.warmup_steps == 100
        assert config.origin("train.warmup_steps") == "command line train.steps=100"
        (notice,) = config.notices
        assert all(text in notice for text in ("train.warmup_steps", "2000", f"{long}:3", "100"))

    def test_a_warmup_that_fits_stays(self, long):
        config = load(long, overrides=["train.steps=3000"])
        assert (config.train.warmup_steps, config.notices) == (2000, ())

    def test_a_contradiction_on_the_command_line_itself_is_an_error(self, long):
        with pytest.raises(ConfigError, match=r"warmup_steps \(20\) .*steps \(10\)"):
            load(long, overrides=["train.steps=10", "train.warmup_steps=20"])
