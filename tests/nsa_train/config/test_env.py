"""The table of NSA_* names is complete, and each name does what the table says."""

import pytest

from nsa.errors import ConfigError
from nsa_train.config import env, load
from nsa_train.config.schema import settings

# Every name that the runbook and the reports of the earlier system mention.
NAMES_IN_USE_SOMEWHERE = [
    "NSA_DEBUG_COMPARE",
    "NSA_DISABLE_AUX_STATS",
    "NSA_DISABLE_CSV_LOGS",
    "NSA_ENV_STATIC",
    "NSA_FA2_MIN_LEN_CMP",
    "NSA_FA2_MIN_LEN_WIN",
    "NSA_FORCE_PARITY",
    "NSA_FORCE_SEL_MASK",
    "NSA_FWE_PREFETCH",
    "NSA_FWE_Q",
    "NSA_FWE_WARMUP_BATCHES",
    "NSA_FWE_WARMUP_TIMEOUT",
    "NSA_PREFILL_BATCHED",
    "NSA_PREFILL_TILE",
    "NSA_ROPE_SCALE",
    "NSA_SDPA_NO_FLASH",
    "NSA_STRICT_ASSERTS",
    "NSA_TB_DISABLE",
    "NSA_TOKENIZER",
    "NSA_USE_FA2",
    "NSA_USE_FA2_CMP",
    "NSA_USE_FA2_WIN",
    "NSA_USE_SEL_MASK",
    "NSA_USE_SEL_PACK",
    "NSA_USE_SEL_VARLEN",
    "NSA_USE_TRITON_SEL",
]


@pytest.fixture
def resolve(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train:\n")
    return lambda **environ: load(file, environ=environ)


@pytest.mark.parametrize("name", NAMES_IN_USE_SOMEWHERE)
def test_every_name_users_may_have_is_mapped_or_retired(name):
    assert (name in env.VARIABLES) != (name in env.RETIRED)


def test_every_variable_sets_a_real_setting():
    for name, variable in env.VARIABLES.items():
        assert name.startswith(env.PREFIX)
        assert set(variable.keys) <= settings().keys()


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("NSA_TOKENIZER", "bpe.json", "data.tokenizer", "bpe.json"),
        ("NSA_FWE_PREFETCH", "0", "data.prefetch", False),
        ("NSA_FWE_Q", "16", "data.queue_depth", 16),
        ("NSA_FWE_WARMUP_BATCHES", "32", "data.warmup_batches", 32),
        ("NSA_FWE_WARMUP_TIMEOUT", "30", "data.warmup_timeout_s", 30.0),
        ("NSA_PREFILL_TILE", "4096", "runtime.prefill_chunk", 4096),
        ("NSA_ROPE_SCALE", "2", "model.rope_scale", 2.0),
        ("NSA_SDPA_NO_FLASH", "1", "runtime.use_flash", False),
        ("NSA_SDPA_NO_FLASH", "t", "runtime.use_flash", False),
        ("NSA_SDPA_NO_FLASH", "0", "runtime.use_flash", True),
        ("NSA_KERNEL_SELECTED", "triton", "kernels.selected", "triton"),
    ],
)
def test_a_variable_sets_its_setting(resolve, name, text, key, value):
    config = resolve(**{name: text})
    assert config.value(key) == value
    assert type(config.value(key)) is type(value)
    assert config.origin(key) == f"environment {name}"


@pytest.mark.parametrize("name", env.RETIRED)
def test_a_retired_name_gives_one_notice_and_changes_nothing(resolve, name):
    config = resolve(**{name: "1"})
    (notice,) = config.notices
    assert notice.startswith(f"environment {name} ")
    assert env.RETIRED[name] in notice
    assert config.model_dump() == resolve().model_dump()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("NSA_TOKENISER", "Did you mean NSA_TOKENIZER?"),
        ("NSA_USE_FA3", "Did you mean NSA_USE_FA2?"),
        ("NSA_zzz", "docs/ENV.md lists them all."),
    ],
)
def test_an_unknown_name_is_an_error(resolve, name, hint):
    with pytest.raises(ConfigError) as caught:
        resolve(**{name: "1"})
    (problem,) = str(caught.value).splitlines()[1:]
    assert problem.startswith(f"  - environment {name}: ")
    assert problem.endswith(hint)


def test_variables_of_other_programs_are_ignored(resolve):
    assert resolve(PATH="/bin", CUDA_LAUNCH_BLOCKING="0", MY_NSA_THING="1").notices == ()


def test_an_empty_variable_counts_as_unset(resolve):
    config = resolve(NSA_FWE_Q="", NSA_USE_FA2=" ")
    assert (config.data.queue_depth, config.notices) == (8, ())


def test_a_bad_value_names_the_variable_and_the_setting(resolve):
    with pytest.raises(ConfigError, match=r"environment NSA_SDPA_NO_FLASH: runtime\.use_flash "):
        resolve(NSA_SDPA_NO_FLASH="maybe")


def test_the_process_environment_is_read_in_one_call(monkeypatch):
    monkeypatch.setenv("NSA_FWE_Q", "9")
    monkeypatch.setenv("CONFIG", "x.yaml")
    monkeypatch.setenv("NOT_OURS", "1")
    variables = env.snapshot()
    assert (variables["NSA_FWE_Q"], variables["CONFIG"]) == ("9", "x.yaml")
    assert "NOT_OURS" not in variables
