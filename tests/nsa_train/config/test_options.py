"""The options of every enumerated setting are those the code accepts, and no others."""

import re
from pathlib import Path
from typing import get_args

import pytest

from nsa import options
from nsa.core.attention_config import CHOICES, OPTIONS, RopeType
from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError
from nsa.kernels import registry
from nsa_train.config.env import _BRANCHES
from nsa_train.config.schema import RunConfig, settings
from nsa_train.config.setting_types import choices

ENUMERATED = {key: choices(field) for key, field in settings().items() if choices(field)}
OF_THE_ATTENTION = {each.setting: each.name for each in OPTIONS if each.choices and not each.per_layer}
CHECKED = {
    **{key: CHOICES[name] for key, name in OF_THE_ATTENTION.items()},
    "model.rope_scaling.rope_type": get_args(RopeType),
    "data.synthetic_task": options.SYNTHETIC_TASKS,
    "runtime.gradient_checkpointing": options.CHECKPOINTING,
}
APPLIED_BY_THE_SCHEMA = {"nsa.preset"}  # tests/nsa_train/config/test_attention_pattern.py
USED_BY_THE_TRAINER = {
    "runtime.precision", "runtime.compile", "train.lr_schedule", "parallel.data", "parallel.cp_split", "data.dataset",
    "data.packing", "data.on_end",
}  # fmt: skip


def test_every_enumerated_setting_has_a_case():
    assert ENUMERATED.keys() == CHECKED.keys() | APPLIED_BY_THE_SCHEMA | USED_BY_THE_TRAINER


@pytest.mark.parametrize("key", CHECKED)
def test_the_schema_offers_the_tuple_that_the_code_checks(key):
    assert ENUMERATED[key] == CHECKED[key]


@pytest.mark.parametrize(("key", "option"), [(key, option) for key in OF_THE_ATTENTION for option in ENUMERATED[key]])
def test_the_attention_accepts_every_option_and_refuses_others(key, option):
    name = OF_THE_ATTENTION[key]
    sizes = dict(dim=16, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, l=4, d=2, l_sel=4, n_sel=3, w=4)
    others = {"phi": "avg", "qk_norm": True}  # a mean of keys may be rotated before or after
    others.pop(name, None)
    NSAAttention(**sizes, **others, **{name: option})
    with pytest.raises(ConfigError, match=re.escape(name)):
        NSAAttention(**sizes, **{name: f"no_{option}"})


@pytest.mark.parametrize("task", ENUMERATED["data.synthetic_task"])
def test_synthetic_data_accepts_every_task_and_refuses_others(task):
    pytest.importorskip("numpy", reason="in the data extra")
    from nsa_train.data.rows.synthetic import SyntheticRows

    SyntheticRows(task, vocab_size=320, seq_len=128, seed=0)
    with pytest.raises(ConfigError):
        SyntheticRows(f"no_{task}", vocab_size=64, seq_len=64, seed=0)


@pytest.mark.parametrize("key", ["data.dataset", "data.packing", "data.on_end"])
def test_the_trainer_has_rows_for_every_data_option(key):
    pytest.importorskip("olmo_core", reason="in the train extra")
    from nsa_train.train.datasets import training_rows

    kinds = set()
    for option in ENUMERATED[key]:
        data = {"dataset": "local", "path": str(Path(__file__).parent), key.removeprefix("data."): option}
        kinds.add(repr(training_rows(RunConfig.model_validate({"data": data}), vocab_size=257)))
    assert len(kinds) == len(ENUMERATED[key]) - (key == "data.dataset")  # fineweb_edu with a path is local data


def test_the_engine_knows_every_data_parallel_option_and_schedule():
    pytest.importorskip("olmo_core", reason="in the train extra")
    from olmo_core.distributed.parallel import DataParallelType

    from nsa_train.train.engine import build

    assert [DataParallelType(option).value for option in ENUMERATED["parallel.data"]] == list(
        ENUMERATED["parallel.data"]
    )
    schedules = {
        type(build._schedule(RunConfig.model_validate({"train": {"lr_schedule": option}})))
        for option in ENUMERATED["train.lr_schedule"]
    }
    assert len(schedules) == len(ENUMERATED["train.lr_schedule"])


def test_the_kernel_settings_are_the_branches_of_the_registry():
    assert set(_BRANCHES) == set(registry.BRANCHES)
