"""Every config in the repository, judged for the hardware its header names."""

from pathlib import Path

import pytest

from nsa.config import load
from nsa.planning.preflight import RuleStatus, judge
from nsa.planning.preflight_rules import is_long

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from nsa.planning.hardware import parse_target
from nsa.train.preflight_facts import gather

CONFIGS = Path(__file__).parents[2] / "configs"
INTENDED = {
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
    # The quickstart's data is made by the command in its header, so its vocabulary is given here.
    config = load(CONFIGS / f"{name}.yaml", overrides=["model.vocab_size=257", *changes])
    facts = gather(config, parse_target(target), try_it=False)
    return judge(facts), facts


def broken(found) -> set[str]:
    return {verdict.rule for verdict in found if verdict.status == RuleStatus.FAIL}


def test_every_config_has_its_hardware():
    assert INTENDED.keys() == {file.stem for file in CONFIGS.glob("*.yaml")}


@pytest.mark.parametrize("name", INTENDED)
def test_a_shipped_config_breaks_no_rule_on_its_hardware(name):
    found, facts = verdicts(name, INTENDED[name])
    assert broken(found) == set()
    assert facts.estimate.memory.fits
    assert is_long(facts) == (facts.config.train.steps >= 5000)


@pytest.mark.parametrize("target", ["rtx4090", "a10", "l4"])
def test_the_24_gb_config_fits_every_gpu_its_header_names(target):
    assert broken(verdicts("m7c_125m_24g", target)[0]) == set()


def test_the_post_mortems_run_is_refused_with_every_reason_at_once():
    found, _ = verdicts("train_showcase", "a100-80gb:2", "train.steps=50000", "train.save_every=0")
    assert broken(found) == {
        "precision", "gradient_checkpointing", "flash", "save_every", "toy_profile", "toy_model", "toy_sequence",
    }  # fmt: skip
    header = (CONFIGS / "train_showcase.yaml").read_text().partition("profile:")[0]
    assert "Not for long runs: preflight refuses" in header
