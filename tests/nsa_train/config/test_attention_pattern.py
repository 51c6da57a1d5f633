"""`model.attention`: one kind or a list, in files and on the command line; `nsa.preset` gives defaults."""

import pytest

from nsa.core.layer_pattern import repeated
from nsa.errors import ConfigError
from nsa_train.config import load
from nsa_train.config.schema import RunConfig
from nsa_train.config.setting_types import plain


def read(tmp_path, text, *overrides):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load(path, overrides=overrides)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("dense", ("dense",)),
        ("[dense, nsa, nsa, nsa]", ("dense", "nsa", "nsa", "nsa")),
        ("'window, global'", ("window", "global")),
        ("\n  - window\n  - global", ("window", "global")),
    ],
)
def test_one_name_or_a_list_in_a_file(tmp_path, text, want):
    assert read(tmp_path, f"model:\n  attention: {text}\n").model.attention == want


@pytest.mark.parametrize("word", ["dense,nsa", "[dense,nsa]", "[dense, nsa]", '["dense", "nsa"]'])
def test_a_list_on_the_command_line(tmp_path, word):
    config = read(tmp_path, "model: {attention: window}\n", f"model.attention={word}")
    assert config.model.attention == ("dense", "nsa")
    assert config.origin("model.attention") == "command line"


def test_the_default_is_nsa_and_values_survive_json():
    assert RunConfig().model.attention == ("nsa",)
    config = RunConfig.model_validate({"model": {"attention": ["window", "global"]}})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert plain(config.model.attention) == "[window, global]"
    assert plain(RunConfig().model.attention) == "nsa"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{n_layers: 3, attention: [dense, nsa, nsa, nsa]}", ("4 layers", "model.n_layers is 3", "run.yaml:1")),
        (
            "{attention: [dense, sparse]}",
            ("model.attention must be nsa, dense, window, global or merged", "run.yaml:1"),
        ),
        ("{attention: []}", ("model.attention", "run.yaml:1")),
        ("{attention: [dense, [nsa]]}", ("model.attention takes", "run.yaml:1")),
        ("{dim: [1, 2]}", ("model.dim takes one value",)),
    ],
)
def test_an_invalid_pattern_is_refused_with_its_place(tmp_path, text, words):
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, f"model: {text}\n")
    assert all(word in str(refused.value) for word in words), refused.value


def test_layers_repeat_the_pattern():
    assert repeated(("dense", "nsa", "nsa"), 5) == ["dense", "nsa", "nsa", "dense", "nsa"]


def test_the_paper_preset_gives_defaults_that_settings_win_over(tmp_path):
    paper = read(tmp_path, "nsa: {preset: paper}\n").nsa
    assert (paper.phi, paper.phi_pos_emb, paper.gate, paper.kv) == ("mlp", True, "sigmoid", "per_branch")
    assert paper.rope_compressed == "after"
    mine = read(tmp_path, "nsa: {preset: paper, gate: softmax}\n", "nsa.phi=linear").nsa
    assert (mine.phi, mine.phi_pos_emb, mine.gate) == ("linear", True, "softmax")
    assert read(tmp_path, "nsa: {preset: base}\n").nsa == RunConfig().nsa


def test_where_a_value_of_the_preset_comes_from_is_reported(tmp_path):
    config = read(tmp_path, "nsa: {preset: paper, gate: softmax}\n")
    assert config.origin("nsa.phi") == "nsa.preset=paper"
    assert config.origin("nsa.gate").endswith("run.yaml:1")
    assert config.origin("nsa.w") == "default"


def test_an_unknown_preset_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="paper"):
        read(tmp_path, "nsa: {preset: papre}\n")


def test_arguments_of_the_attention_are_without_the_preset():
    assert "preset" not in RunConfig().attention.options()
    assert RunConfig().attention.options()["phi"] == "softmax"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {attention: merged}\n", ("model.attention (merged)", "nsa.phi (softmax)", "nsa.selector_loss=1.0")),
        (
            "model: {attention: [dense, merged]}\nnsa: {kv: per_branch, phi: mlp}\n",
            ("run.yaml:2", "(dense, merged)", "(mlp)"),
        ),
        ("model: {attention: merged}\nnsa: {kv: per_branch, phi: avg, selector_loss: 1}\n", ("nothing to train",)),
    ],
)
def test_merged_layers_train_phi_by_the_selector_loss_alone(tmp_path, text, words):
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("nsa", ["{phi: avg}", "{selector_loss: 0.5}"])
def test_merged_layers_in_a_config(tmp_path, nsa):
    assert read(tmp_path, f"model: {{attention: merged}}\nnsa: {nsa}\n").model.attention == ("merged",)
