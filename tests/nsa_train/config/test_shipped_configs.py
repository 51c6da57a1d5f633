"""Every config in the repository loads, states its purpose, and has the settings that its header names."""

from pathlib import Path

import pytest

from nsa.errors import ConfigError
from nsa_train.config import load
from nsa_train.config.schema import settings

CONFIGS = Path(__file__).parents[3] / "configs"
RUNS = sorted(CONFIGS.glob("*.yaml"))
PROFILES = sorted((CONFIGS / "profiles").glob("*.yaml"))


def test_the_names_users_know_are_there():
    assert {file.stem for file in RUNS} >= {
        "train_showcase",
        "train_50k",
        "m7c_125m_1xa100_prod_v1",
        "m7c_125m_2xa100_production",
        "m7c_125m_24g",
        "m7c_125m_40g",
        "m7c_125m_80g",
        "m7c_125m_fast_log",
        "m7c_3090_smoke",
    }
    assert {file.stem for file in PROFILES} >= {"a100", "h100", "rtx4090", "rtx3090", "cpu"}


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_a_shipped_config_loads_without_notices_and_has_a_header(file):
    assert load(file).notices == ()
    header = [line for line in file.read_text().splitlines() if line.startswith("#")]
    for word in ("# Purpose:", "# Hardware:", "# Expect:"):
        assert any(line.startswith(word) for line in header)


@pytest.mark.parametrize("file", PROFILES, ids=lambda file: file.stem)
def test_a_profile_can_stand_under_any_run(file):
    config = load(CONFIGS / "train_showcase.yaml", overrides=[f"profile={file.stem}"])
    assert f"profile {file.stem}" in config.origins().values()


def test_no_two_configs_share_a_run_folder():
    folders = [load(file).train.out_dir for file in RUNS]
    assert len(set(folders)) == len(folders)
    assert all(folder.startswith("artifacts/") for folder in folders)


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_a_name_is_enough_in_any_folder(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = load(file).model_dump()
    assert all(load(name).model_dump() == expected for name in (file.stem, file.name, f"configs/{file.name}"))


@pytest.mark.parametrize("name", ["train_50k", "configs/train_50k.yaml"])
def test_a_file_of_the_user_comes_before_the_shipped_one(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path(name).write_text("train:\n  steps: 7\n")
    assert load(name).train.steps == 7


def test_a_run_folder_of_the_same_name_is_no_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train_50k").mkdir()
    assert load("train_50k").train.steps == 50_000


@pytest.mark.parametrize(("name", "answer"), [("base_125_8k", "base_125m_8k"), ("zebra", "nsa init --list")])
def test_an_unknown_name_is_refused_with_the_nearest_one(name, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=answer):
        load(name)


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_a_long_run_has_what_the_guardrails_ask_for(file):
    config = load(file)
    if config.train.steps < 5000:
        return
    assert config.profile != config.TOY
    assert config.runtime.precision == "bf16"
    assert config.runtime.gradient_checkpointing != "off"
    assert config.runtime.use_flash
    assert config.train.save_every > 0
    # Spelled out in the file itself, so that reading it is enough.
    for key in ("runtime.precision", "runtime.gradient_checkpointing", "runtime.use_flash", "train.save_every"):
        assert config.origin(key).startswith(str(file))


def test_the_toy_is_marked():
    config = load(CONFIGS / "train_showcase.yaml")
    assert config.profile == config.TOY
    assert config.train.steps < 5000
    assert (config.model.dim, config.train.seq_len, config.train.batch_size) == (128, 128, 8)


def test_the_canonical_long_run():
    train = load(CONFIGS / "train_50k.yaml").train
    assert (train.steps, train.save_every) == (50_000, 5_000)


def test_the_production_run_has_the_published_values():
    wanted = {
        "model": {"dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_groups": 2, "d_k": 64, "d_v": 64},
        "nsa": {"l": 32, "d": 16, "l_sel": 64, "n_sel": 16, "w": 512},
        "runtime": {"device": "cuda", "precision": "bf16", "gradient_checkpointing": "full", "use_flash": True},
        "train": {
            "steps": 50000,
            "seq_len": 2048,
            "batch_size": 2,
            "accumulate_grad_batches": 2,
            "lr": 2e-4,
            "lr_schedule": "cosine",
            "warmup_steps": 2000,
            "weight_decay": 0.01,
            "grad_clip": 1.0,
            "save_every": 5000,
        },
    }
    config = load(CONFIGS / "m7c_125m_1xa100_prod_v1.yaml")
    for section, values in wanted.items():
        for name, value in values.items():
            assert config.value(f"{section}.{name}") == value
    assert config.value("train.out_dir") == "artifacts/m7c_125m_1xa100_prod"


def test_two_gpus_get_one_row_each():
    train = load(CONFIGS / "m7c_125m_2xa100_production.yaml").train
    assert (train.batch_size, train.accumulate_grad_batches, train.seq_len) == (2, 1, 2048)


def test_memory_sizes_differ_in_how_a_step_is_cut_and_in_nothing_else():
    configs = [load(CONFIGS / f"m7c_125m_{size}.yaml") for size in ("24g", "40g", "80g")]
    cut = {"train.batch_size", "train.accumulate_grad_batches", "train.out_dir"}
    for key in settings().keys() - cut:
        assert len({config.value(key) for config in configs}) == 1, key
    assert len({config.train.batch_size * config.train.accumulate_grad_batches for config in configs}) == 1
