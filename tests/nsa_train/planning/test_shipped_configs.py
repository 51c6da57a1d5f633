"""Preflight of every config in the repository on the hardware its header names."""

import inspect
import re
from pathlib import Path

import pytest

from nsa.geometry import Geometry
from nsa_train.config import load
from nsa_train.planning.preflight_rules import RuleStatus, check_rules, is_long
from nsa_train.shipped import CORPUS

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from typer.testing import CliRunner

from nsa_train.cli.data import train_tokenizer
from nsa_train.cli.main import app
from nsa_train.data.source.hub import FINEWEB_EDU
from nsa_train.planning.hardware import parse_target
from nsa_train.train.gather_preflight_facts import gather
from tests.docs.blocks import tokenizer_command
from tools.docs.plan_pages import PLANNED

CONFIGS = Path(__file__).parents[3] / "configs"
INTENDED = {
    "base_125m_8k": "a100-80gb",
    "base_1b_32k": "h100-80gb:8",
    "base_7b_128k": "h100-80gb:128",
    "base_7b_1m": "h100-80gb:1024",
    "cpu_demo": "cpu",
    "cpu_stories": "cpu",
    "cpu_quickstart": "cpu",
    "m7c_125m_1xa100_prod_v1": "a100-80gb",
    "m7c_125m_24g": "rtx3090",
    "m7c_125m_2xa100_production": "a100-80gb:2",
    "m7c_125m_40g": "a100-40gb",
    "m7c_125m_80g": "h100-80gb",
    "m7c_125m_fast_log": "a100-80gb",
    "m7c_3090_smoke": "rtx3090",
    "train_50k": "a100-80gb",
    "train_showcase": "a100-80gb",
}


def verdicts(name: str, target: str, *changes: str):
    # Prepared data is made by the commands in the config's header, so its vocabulary is given here.
    sizes = {"cpu_demo": 4096, "cpu_quickstart": 257, "cpu_stories": 2048}
    vocabulary = {each: [f"model.vocab_size={size}"] for each, size in sizes.items()}
    config = load(CONFIGS / f"{name}.yaml", overrides=[*vocabulary.get(name, []), *changes])
    facts = gather(config, parse_target(target), try_it=False)
    return check_rules(facts), facts


def broken(rule_verdicts) -> set[str]:
    return {verdict.rule for verdict in rule_verdicts if verdict.status == RuleStatus.FAIL}


def test_every_config_has_its_hardware():
    assert INTENDED.keys() == {file.stem for file in CONFIGS.glob("*.yaml")}


@pytest.mark.parametrize("name", INTENDED)
def test_a_shipped_config_breaks_no_rule_on_its_hardware(name):
    rule_verdicts, facts = verdicts(name, INTENDED[name])
    assert broken(rule_verdicts) == set()
    assert facts.estimate.memory.fits
    assert is_long(facts) == (facts.config.train.steps >= 5000)


@pytest.mark.parametrize("target", ["rtx4090", "a10", "l4"])
def test_the_24_gb_config_fits_every_gpu_its_header_names(target):
    assert broken(verdicts("m7c_125m_24g", target)[0]) == set()


def test_the_post_mortems_run_is_refused_with_every_reason_at_once():
    rule_verdicts, _ = verdicts("train_showcase", "a100-80gb:2", "train.steps=50000", "train.save_every=0")
    assert broken(rule_verdicts) == {
        "precision", "flash", "save_every", "toy_profile", "toy_model", "toy_sequence",
    }  # fmt: skip
    header = (CONFIGS / "train_showcase.yaml").read_text().partition("profile:")[0]
    assert "Not for long runs: preflight refuses" in header


BASE = sorted(file.stem for file in CONFIGS.glob("base_*.yaml"))


def header(name: str) -> str:
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


def test_the_base_configs_are_for_long_sequences():
    assert sorted(load(CONFIGS / f"{name}.yaml").train.seq_len for name in BASE) == [8192, 32768, 131072, 1048576]


@pytest.mark.parametrize("name", BASE)
def test_the_numbers_in_the_header_of_a_base_config_are_the_estimates(name):
    _, facts = verdicts(name, INTENDED[name])
    text, run_estimate = header(name), facts.estimate
    used, available = re.search(r"(\d+) of (\d+) GiB by `nsa estimate`", text).groups()
    assert (int(used), int(available)) == (
        round(run_estimate.memory.total / 2**30),
        round(run_estimate.memory.available / 2**30),
    )
    count, unit = re.search(r"([\d.]+) (million|billion) parameters", text).groups()
    assert float(count) == round(
        run_estimate.parameters.total / {"million": 1e6, "billion": 1e9}[unit], len(count.partition(".")[2])
    )
    billions, steps, per_step = re.search(
        r"([\d.]+) billion tokens in ([\d,]+) steps \(([\d,]+) per step\)", text
    ).groups()
    assert (int(steps.replace(",", "")), int(per_step.replace(",", ""))) == (
        run_estimate.steps,
        run_estimate.tokens_per_step,
    )
    assert float(billions) == pytest.approx(run_estimate.steps * run_estimate.tokens_per_step / 1e9, rel=0.02)
    assert f"--target {INTENDED[name]}" in text


def test_the_125m_header_names_what_a_query_reads_and_a_smaller_gpu():
    config = load(CONFIGS / "base_125m_8k.yaml")
    keys = config.nsa.geometry.reads(config.train.seq_len)
    assert f"the last query reads {keys:,} keys instead of {config.train.seq_len:,}" in header("base_125m_8k")
    assert broken(verdicts("base_125m_8k", "rtx3090")[0]) == set()


def test_the_7b_config_has_the_papers_attention_and_hardly_room_for_undivided_rows():
    config = load(CONFIGS / "base_7b_128k.yaml")
    model, nsa = config.model, config.nsa
    assert (model.n_kv_groups, model.n_heads // model.n_kv_groups, model.d_k, model.d_v) == (4, 16, 192, 128)
    assert (nsa.l, nsa.d, nsa.l_sel, nsa.n_sel, nsa.w) == (32, 16, 64, 16, 512)
    assert (nsa.phi, nsa.phi_pos_emb, nsa.gate, nsa.rope_compressed) == ("mlp", True, "sigmoid", "after")
    undivided = ("parallel.cp=1", "train.batch_size=512", "runtime.gradient_checkpointing=full")
    rule_verdicts, facts = verdicts("base_7b_128k", "h100-80gb:512", *undivided)
    assert broken(rule_verdicts) == set()
    memory = facts.estimate.memory
    assert memory.total > 0.94 * memory.available
    activations, total = (round(each / 2**30) for each in (memory.activations.peak("full"), memory.total))
    assert f"{activations} GiB of activations, {total} GiB in all on 512 GPUs" in header("base_7b_128k")
    assert f"a checkpoint takes {round(facts.estimate.checkpoint_bytes / 2**30)} GiB" in header("base_7b_128k")


def test_the_million_token_config_reads_what_its_header_says():
    config = load(CONFIGS / "base_7b_1m.yaml")
    assert f"reads {config.nsa.geometry.reads(config.train.seq_len):,} keys" in header("base_7b_1m")
    assert f"the {Geometry().reads(config.train.seq_len):,} of stride 16" in header("base_7b_1m")


def test_plans_are_committed_for_the_hardware_of_their_configs():
    assert {name: INTENDED[name] for name in PLANNED} == PLANNED


@pytest.mark.parametrize("name", ["base_7b_128k", "base_7b_1m"])
def test_the_config_of_many_gpus_has_the_first_layout_of_its_committed_plan(name):
    lines = (CONFIGS.parent / f"docs/plans/{name}.txt").read_text().splitlines()
    settings = lines[lines.index("Settings of the first, to add after the config:") + 1].split()
    planned, config = dict(word.split("=") for word in settings), load(CONFIGS / f"{name}.yaml")
    # A long run recomputes something until a GPU has confirmed its memory
    # (tests/nsa_train/config/test_shipped_configs.py).
    checkpointing = planned.pop("runtime.gradient_checkpointing")
    assert config.runtime.gradient_checkpointing == {"off": "selective"}.get(checkpointing, checkpointing)
    assert {key: str(config.value(key)) for key in planned} == planned


def test_a_missing_tokenizer_is_refused_before_the_run_and_the_command_in_the_header_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load(CONFIGS / "train_50k.yaml")
    assert config.data.tokenizer != "byte"

    def data_rule():
        rule_verdicts = check_rules(gather(config, parse_target("here", "cpu"), try_it=False))
        return next(verdict for verdict in rule_verdicts if verdict.rule == "data")

    assert data_rule().status == RuleStatus.FAIL
    assert config.data.tokenizer in data_rule().message
    source, path = tokenizer_command(CONFIGS / "train_50k.yaml")
    assert source == FINEWEB_EDU  # what the run trains on; the hub is out of reach of a test
    done = CliRunner().invoke(app, ["data", "tokenizer", "train", str(CORPUS), path])
    assert done.exit_code == 0, done.output
    assert data_rule().status != RuleStatus.FAIL


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_config_says_how_its_tokenizer_is_made(file):
    config = load(file)
    if config.data.tokenizer == "byte":
        return
    source, path = tokenizer_command(file)
    assert path == config.data.tokenizer
    if config.data.dataset == "prepared":
        assert f"nsa data prepare {source} {config.data.path} --tokenizer {path} " in file.read_text()
        return
    assert source == (config.data.path or FINEWEB_EDU)
    default = inspect.signature(train_tokenizer).parameters["vocab_size"].default.default
    assert default <= config.model.vocab_size


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused():
    config = load(CONFIGS / "train_50k.yaml", overrides=["data.tokenizer=byte", "model.vocab_size=256"])
    rule_verdicts = check_rules(gather(config, parse_target("here", "cpu"), try_it=False))
    assert "model.vocab_size (256)" in next(verdict for verdict in rule_verdicts if verdict.rule == "data").message
