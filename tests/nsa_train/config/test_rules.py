"""Rules between settings; a config cannot change once it is built."""

import pickle

import pytest
from pydantic import ValidationError

from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa_train.config import RunConfig, load
from nsa_train.config.model_sections import ModelConfig
from nsa_train.config.schema import sections, settings
from nsa_train.config.setting_types import kind
from tests.attention_options import LLAMA3, PHIS, PHIS_OF_UNROTATED_KEYS, YARN


@pytest.fixture
def resolve(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train:\n")
    return lambda *overrides: load(file, overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.n_kv_groups=5"], ["model.n_kv_groups (5)", "model.n_heads (12)", "Set e.g. model.n_kv_groups=4."]),
        (["model.d_k=63"], ["model.d_k (63)", "Set e.g. model.d_k=64."]),
        (["nsa.d=64"], ["nsa.d (64)", "nsa.l (32)"]),
        (["nsa.d=12", "nsa.l_sel=60"], ["nsa.d (12)", "nsa.l (32)"]),
        (["nsa.d=12", "nsa.l=24"], ["nsa.d (12)", "nsa.l_sel (64)"]),
        (["nsa.n_sel=2"], ["nsa.n_sel (2)", "at least 3"]),
        (["nsa.phi_pos_emb=true", "nsa.phi=avg"], ["nsa.phi_pos_emb (true)", "nsa.phi (avg)"]),
        (["nsa.phi_pos_emb=true"], ["nsa.phi_pos_emb (true)", "nsa.phi (softmax)"]),
        (["nsa.phi_pos_emb=true", "nsa.phi=weighted"], ["nsa.phi_pos_emb (true)", "nsa.phi (weighted)"]),
        (
            ["model.rope_scaling.rope_type=linear", "model.rope_scaling.factor=2", "model.rope_scale=4"],
            ["model.rope_scale (4.0)", "model.rope_scaling.rope_type (linear)", "Set model.rope_scale=1"],
        ),
        (
            ["model.rope_scaling.rope_type=yarn", "model.rope_scaling.factor=2"],
            ["model.rope_scaling.original_max_position_embeddings (null)", "model.rope_scaling.rope_type (yarn)"],
        ),
        (
            ["model.rope_scaling.factor=2"],
            ["model.rope_scaling.factor ", "model.rope_scaling.rope_type (default)"],
        ),
        (
            ["model.rope_scaling.rope_type=linear", "model.rope_scaling.factor=2", "model.rope_scaling.truncate=true"],
            ["model.rope_scaling.truncate ", "model.rope_scaling.rope_type (linear)"],
        ),
        (
            [f"model.rope_scaling.{key}={value}" for key, value in (LLAMA3 | dict(low_freq_factor=4.0)).items()],
            ["model.rope_scaling.low_freq_factor (4.0)", "model.rope_scaling.high_freq_factor (4.0)"],
        ),
        (
            [f"model.rope_scaling.{key}={value}" for key, value in (YARN | dict(beta_fast=0.5)).items()],
            ["model.rope_scaling.beta_fast (0.5)", "model.rope_scaling.beta_slow (1.0)"],
        ),
        (["train.warmup_steps=1001"], ["train.warmup_steps (1001)", "train.steps (1000)"]),
        (
            ["nsa.phi=avg", "nsa.selector_loss=1"],
            ["nsa.selector_loss (1.0)", "nsa.kv (shared)", "nsa.phi (avg)"],
        ),
        (["train.checkpoint_store=/data/run"], ["train.checkpoint_store (/data/run)", "s3://BUCKET/PATH"]),
        (["train.checkpoint_store=s3://bucket"], ["train.checkpoint_store (s3://bucket)"]),
        (["train.checkpoint_store=s3://bucket/run?regoin=x"], ["train.checkpoint_store", "regoin"]),
        (["train.checkpoint_store=s3://[bucket/run"], ["train.checkpoint_store", "is no address"]),
        (["train.checkpoint_store=s3://me:word@bucket/run"], ["train.checkpoint_store", "user or password"]),
        (["train.checkpoint_store=s3://b/run?endpoint=http://me:word@host"], ["of host carries a user or password"]),
        (["train.keep_every=1500"], ["train.keep_every (1500)", "train.save_every (1000)"]),
        (["data.dataset=local"], ["data.dataset (local)", "data.path (null)"]),
        (["data.dataset=prepared"], ["data.dataset (prepared)", "data.path (null)"]),
    ],
)
def test_a_broken_rule_gives_values_reason_and_fix(resolve, overrides, named):
    with pytest.raises(ConfigError) as caught:
        resolve(*overrides)
    (problem,) = str(caught.value).splitlines()[1:]
    assert "command line" in problem
    assert all(text in problem for text in named)
    assert "Set " in problem


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.n_kv_groups=1"],
        ["model.n_kv_groups=12"],
        ["model.d_v=63"],
        ["nsa.d=32"],
        ["nsa.d=1"],
        ["nsa.l=64", "nsa.l_sel=32"],
        ["nsa.n_sel=3"],
        ["nsa.phi=mlp", "nsa.phi_pos_emb=true"],
        ["model.rope_scaling.rope_type=linear", "model.rope_scaling.factor=0.5"],
        [f"model.rope_scaling.{key}={value}" for key, value in LLAMA3.items()],
        [f"model.rope_scaling.{key}={value}" for key, value in YARN.items()],
        ["nsa.kv=shared", "nsa.phi=mlp", "model.qk_norm=true", "model.qkv_bias=true"],
        ["train.warmup_steps=1000"],
        ["train.checkpoint_store=s3://bucket/run"],
        ["train.keep_every=3000"],
        ["train.keep_every=3000", "train.save_every=0"],
        ["data.dataset=local", "data.path=somewhere"],
        ["data.dataset=synthetic"],
    ],
)
def test_the_edge_of_a_rule_is_allowed(resolve, overrides):
    resolve(*overrides)


def test_the_suggested_fix_satisfies_the_rule(resolve):
    for overrides in (
        ["model.n_kv_groups=5"],
        ["nsa.d=12"],
        ["nsa.d=64"],
        ["nsa.n_sel=1"],
        ["train.warmup_steps=2000"],
        ["train.keep_every=700"],
    ):
        tried = list(overrides)
        for _ in range(3):
            try:
                resolve(*tried)
                break
            except ConfigError as error:
                tried.append(str(error).rpartition("Set e.g. ")[2].rstrip("."))
        else:
            pytest.fail(f"{tried} still fails")


def test_a_rule_that_meets_a_default_says_so(resolve):
    with pytest.raises(ConfigError, match=r"command line, default train\.steps: "):
        resolve("train.warmup_steps=2000")


def test_sizes_must_be_positive(resolve):
    with pytest.raises(ConfigError) as caught:
        resolve("model.dim=0", "nsa.w=-1", "train.seq_len=0", "train.batch_size=0", "runtime.prefill_chunk=0")
    assert len(str(caught.value).splitlines()) == 6


def test_rules_hold_for_configs_made_in_code_too():
    with pytest.raises(ValidationError, match="n_kv_groups"):
        ModelConfig(n_heads=12, n_kv_groups=5)
    with pytest.raises(ValidationError, match=r"nsa\.d "):
        RunConfig.model_validate({"nsa": {"l": 32, "d": 12, "l_sel": 24}})


def test_nothing_can_be_changed_or_added(resolve):
    config = resolve()
    with pytest.raises(ValidationError):
        config.train = config.train
    with pytest.raises(ValidationError):
        config.train.lr = 1.0
    with pytest.raises(ValidationError):
        RunConfig.model_validate({"train": {"lrr": 1}})


def test_a_config_survives_a_dump_and_a_pickle(resolve):
    config = resolve("train.lr=1e-4")
    assert RunConfig.model_validate(config.model_dump(mode="json")).model_dump() == config.model_dump()
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.origin("train.lr") == "command line"


def test_origin_of_a_config_made_in_code():
    config = RunConfig.model_validate({"train": {"lr": 1.0}})
    assert (config.origin("train.lr"), config.origin("train.steps")) == ("code", "default")
    with pytest.raises(ConfigError, match="lrr"):
        config.origin("train.lrr")


@pytest.mark.parametrize(("dim", "hidden"), [(768, 2048), (512, 1408), (24, 64), (72, 192), (73, 256)])
def test_ffn_size_is_eight_thirds_rounded_up_to_64(dim, hidden):
    assert ModelConfig(dim=dim).ffn_size == hidden
    assert ModelConfig(dim=dim, ffn_dim=100).ffn_size == 100


def test_every_setting_is_described_in_one_sentence():
    for key, field in settings().items():
        assert field.description, key
        assert field.description.endswith("."), key
        assert "\n" not in field.description, key
        assert kind(field), key


def test_the_keys_users_already_have_are_all_known():
    known = {
        "model": "dim n_layers n_heads n_kv_groups d_k d_v",
        "nsa": "l d l_sel n_sel w phi",
        "runtime": "device precision gradient_checkpointing use_flash",
        "train": "steps seq_len batch_size accumulate_grad_batches lr lr_schedule warmup_steps weight_decay grad_clip "
        "log_every eval_every save_every seed out_dir",
    }
    for section, names in known.items():
        assert set(names.split()) <= sections()[section].model_fields.keys()


def test_auto_rotation_of_compressed_keys_follows_the_operator(resolve):
    chosen = {phi: resolve(f"nsa.phi={phi}").nsa.rope_compressed for phi in PHIS}
    assert chosen == {"avg": "before", "weighted": "before", "softmax": "after", "linear": "after", "mlp": "after"}
    assert resolve("nsa.rope_compressed=after").nsa.rope_compressed == "after"


def test_the_block_sizes_are_one_geometry(resolve):
    assert resolve().nsa.geometry == Geometry()
    changed = resolve("nsa.l=16", "nsa.d=8", "nsa.l_sel=32", "nsa.n_sel=5", "nsa.w=100")
    assert changed.nsa.geometry == Geometry(l=16, d=8, l_sel=32, n_sel=5, w=100)


def test_a_resolved_auto_is_recorded_as_what_it_came_to_and_counts_as_default(resolve):
    """A record of settings must still say so when the rule behind `auto` has changed."""
    config = resolve("nsa.phi=mlp")
    assert config.model_dump(mode="json")["nsa"]["rope_compressed"] == "after"
    assert config.origin("nsa.rope_compressed") == "default"


@pytest.mark.parametrize("phi", PHIS_OF_UNROTATED_KEYS)
def test_learned_compression_of_rotated_keys_is_refused(resolve, phi):
    with pytest.raises(ConfigError, match="rope_compressed"):
        resolve(f"nsa.phi={phi}", "nsa.rope_compressed=before")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("heads", [12, 2**31 - 1, 2**61 - 1])
@pytest.mark.parametrize("groups", [2**31, 2**62])
def test_huge_sizes_are_refused_at_once(resolve, groups, heads):
    with pytest.raises(ConfigError, match="n_kv_groups"):
        resolve(f"model.n_kv_groups={groups}", f"model.n_heads={heads}")


@pytest.mark.parametrize("value", [True, "true", "yes", "on", "full"])
def test_checkpointing_that_was_true_is_full(value):
    assert (
        RunConfig.model_validate({"runtime": {"gradient_checkpointing": value}}).runtime.gradient_checkpointing
        == "full"
    )


@pytest.mark.parametrize("value", [False, "false", "no", "off"])
def test_checkpointing_that_was_false_is_off(value):
    assert (
        RunConfig.model_validate({"runtime": {"gradient_checkpointing": value}}).runtime.gradient_checkpointing == "off"
    )


@pytest.mark.parametrize(
    ("value", "read"), [(True, "on"), ("true", "on"), ("on", "on"), ("off", "off"), ("auto", "auto")]
)
def test_compile_is_on_off_or_auto(value, read):
    assert RunConfig.model_validate({"runtime": {"compile": value}}).runtime.compile == read
