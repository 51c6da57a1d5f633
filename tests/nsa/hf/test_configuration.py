"""`NSAConfig`: the settings of a run arrive unchanged, files are read back equal, and nonsense is refused."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, DynamicCache

import nsa.hf  # noqa: F401 (registers)
from nsa.errors import ConfigError
from nsa.hf.cache import NSACacheLayer
from nsa.hf.configuration import NSAConfig
from nsa_train.config.model_sections import ModelConfig, RopeScalingConfig, SparseAttentionConfig
from nsa_train.config.schema import RunConfig, TrainConfig
from nsa_train.convert.export_folder import exported_config
from nsa_train.run_model import build_model
from tests.nsa.hf.tiny_model import tiny_config

RUN = RunConfig(
    model=ModelConfig(
        dim=48,
        n_layers=2,
        n_heads=4,
        n_kv_groups=2,
        d_k=16,
        d_v=12,
        qk_norm=True,
        qkv_bias=True,
        norm_eps=1e-4,
        init_std=0.08,
        rope_scaling=RopeScalingConfig(rope_type="linear", factor=2.0),
        tie_embeddings=True,
    ),
    nsa=SparseAttentionConfig(l=8, d=4, l_sel=16, n_sel=4, w=24, phi="mlp", gate="sigmoid", gate_temperature=2.0),
    train=TrainConfig(seq_len=640),
)


@pytest.mark.parametrize("run", [RunConfig(), RUN], ids=["default", "changed"])
def test_a_runs_settings_become_the_same_arguments_of_the_attention(run):
    assert exported_config(run, 300, 256).attention_config() == run.attention


def test_the_rest_of_a_runs_settings():
    config, model = exported_config(RUN, 300, 256), build_model(RUN, 300)
    assert config.vocab_size == model.embeddings.num_embeddings == 300
    assert config.num_hidden_layers == len(model.blocks)
    assert config.intermediate_size == model.blocks[0].feed_forward.w1.out_features
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (model.lm_head.norm.eps, model.tie_embeddings)
    assert (config.initializer_range, NSAConfig().initializer_range) == (0.08, 0.02)
    assert (config.eos_token_id, config.max_position_embeddings) == (256, 640)
    fixed = RunConfig(model=ModelConfig(vocab_size=512))
    assert exported_config(fixed, 300, None).vocab_size == 512


def test_a_saved_config_is_read_back_equal(tmp_path):
    config = exported_config(RUN, 300, 256)
    config.save_pretrained(tmp_path / "first")
    read = AutoConfig.from_pretrained(tmp_path / "first")
    assert type(read) is NSAConfig
    read.save_pretrained(tmp_path / "again")
    first, again = ((tmp_path / name / "config.json").read_text() for name in ("first", "again"))
    assert first == again
    assert read.attention_config() == config.attention_config()


def test_whole_numbers_in_a_file_are_accepted_as_floats(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nsa", "rope_theta": 10000, "rope_scale": 2}))
    assert NSAConfig.from_pretrained(tmp_path).rope_theta == 10000


def test_rope_parameters_are_rope_theta_and_rope_scaling(recwarn):
    """The one name that Transformers 5 has for both; `rope_scaling` alone is deprecated there."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = tiny_config(rope_parameters={"rope_theta": 1e4, **scaling})
    assert config.to_dict() == tiny_config(rope_theta=1e4, rope_scaling=scaling).to_dict()
    assert tiny_config(rope_parameters={"rope_theta": 1e4, "rope_type": "default"}).rope_scaling is None
    assert not [warning for warning in recwarn if "rope" in str(warning.message)]


@pytest.mark.parametrize(
    "changes",
    [
        dict(rope_parameters={"rope_type": "default", "factor": 2.0}),
        dict(rope_parameters={"rope_type": "linear", "factor": 2.0}, rope_scaling={"rope_type": "linear", "factor": 4}),
        dict(hidden_size="48"),
        dict(hidden_size=0),
        dict(vocab_size=-1),
        dict(initializer_range=0.0),
        dict(initializer_range=-0.02),
        dict(initializer_range="0.02"),
        dict(num_hidden_layers=None),
        dict(num_attention_heads=5),
        dict(head_dim=15),
        dict(d=3),
        dict(n_sel=1),
        dict(phi="max"),
        dict(phi="mlp", rope_compressed="before"),
        dict(phi_pos_emb=True),
        dict(kv="none"),
        dict(selector_loss=-1.0),
        dict(selector_loss_share=0.0),
        dict(tie_word_embeddings="yes"),
        dict(rope_scaling={"rope_type": "linear"}),
        dict(rope_scaling={"rope_type": "unknown"}),
        dict(rope_scaling="linear"),
    ],
    ids=str,
)
def test_wrong_types_and_broken_rules_are_refused(changes):
    with pytest.raises((ConfigError, StrictDataclassError)):
        tiny_config(**changes)


def test_transformers_makes_our_cache_for_this_config():
    """`layer_types` and the registry of cache layers are Transformers' own business: an upgrade may change it."""
    cache = DynamicCache(config=tiny_config(num_hidden_layers=3))
    assert [type(layer) for layer in cache.layers] == [NSACacheLayer] * 3


def test_a_config_with_a_billion_layers_is_refused_before_lists_of_them_are_made(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nsa", "num_hidden_layers": 1000000000}')
    with pytest.raises(ConfigError, match="up to 10,000"):
        AutoConfig.from_pretrained(tmp_path)
