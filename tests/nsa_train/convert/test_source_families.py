"""Config files of published models, in the forms of several Transformers versions, become the settings they mean."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="Transformers is in the hf extra")
from nsa.errors import CheckpointError
from nsa_train.convert.dense.conversion_plan import converted_config, covered_tokens, layer_reads
from nsa_train.convert.dense.source_families import FAMILIES, parse_dense_config
from nsa_train.convert.dense.source_model import SourceModel, shortest_pattern

COMMON = {"hidden_act": "silu", "initializer_range": 0.02, "attention_dropout": 0.0, "use_cache": True}
LLAMA_3_2_1B: dict[str, Any] = COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256,
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"}, "tie_word_embeddings": True, "eos_token_id": [128001, 128008, 128009],
    "bos_token_id": 128000, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
    "transformers_version": "4.45.0.dev0",
}  # fmt: skip
QWEN_2_5_YARN: dict[str, Any] = COMMON | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "rope_scaling": {
        "factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}, "use_mrope": False,
    "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28,
}  # fmt: skip
OLMO_3_7B: dict[str, Any] = COMMON | {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "dtype": "bfloat16", "vocab_size": 100278,
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 65536, "rms_norm_eps": 1e-06, "rope_theta": 500000,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "sliding_window": 4096,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "eos_token_id": 100257,
}  # fmt: skip
SMOLLM_3_3B: dict[str, Any] = COMMON | {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048,
    "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 65536, "max_window_layers": 28, "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
PHI_3_MINI_4K: dict[str, Any] = COMMON | {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "auto_map": {"AutoConfig": "configuration_phi3.Phi3"},
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
    "original_max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_bias": False,
}  # fmt: skip


def parse(values: dict[str, Any]) -> SourceModel:
    return parse_dense_config(values, Path("config.json"))


def test_llama_3_2():
    model = parse(LLAMA_3_2_1B)
    assert model.arguments["rope_scaling"] == LLAMA_3_2_1B["rope_scaling"]
    config = converted_config(model, None)
    assert (config.attention, config.rope_theta, config.tie_word_embeddings) == ("merged", 500000.0, True)
    reads = layer_reads(config, model.kinds)
    assert covered_tokens(reads) == 16 * 64 + 512
    assert reads["merged"].keys == 16 * 64 + 512
    assert reads["merged"].scored == (131072 - 512 - 32) // 16 + 1


def test_qwen_2_5_with_the_older_name_of_a_rope_type():
    arguments = parse(QWEN_2_5_YARN).arguments
    expected = {"factor": 4.0, "original_max_position_embeddings": 32768, "rope_type": "yarn"}
    assert (arguments["rope_scaling"], arguments["window"], arguments["bias"]) == (expected, None, True)


def test_olmo_3_scales_the_rope_of_full_layers_only():
    model = parse(OLMO_3_7B)
    assert model.arguments["rope_layers"] == ["plain", "plain", "plain", "scaled"]
    assert model.arguments["rope_scaling"] == OLMO_3_7B["rope_scaling"]
    assert (model.arguments["window"], model.arguments["post_norm"]) == (4096, True)
    assert converted_config(model, None).attention == ["window", "window", "window", "merged"]


def test_smollm_3_has_layers_without_rope():
    assert parse(SMOLLM_3_3B).arguments["rope_layers"] == ["scaled", "scaled", "scaled", "none"]


def test_phi_3_mini_slides_everywhere():
    model = parse(PHI_3_MINI_4K)
    assert set(model.kinds) == {"window"}
    assert covered_tokens(layer_reads(converted_config(model, None), model.kinds)) is None


def test_a_key_that_is_not_known_is_refused_unless_it_is_off():
    parse(LLAMA_3_2_1B | {"dual_chunk_attention_config": None, "use_qk_norm": False, "n_routed_experts": 0})
    with pytest.raises(CheckpointError, match="dual_chunk_attention_config"):
        parse(QWEN_2_5_YARN | {"dual_chunk_attention_config": {"chunk_size": 262144}})


def test_nothing_given_is_changed():
    values = QWEN_2_5_YARN | {"rope_scaling": dict(QWEN_2_5_YARN["rope_scaling"])}
    parse(values)
    assert values == QWEN_2_5_YARN


def test_every_family_is_named_by_its_own_class():
    assert {family.config_class.model_type for family in FAMILIES.values()} == {
        *("llama", "qwen2", "qwen3", "mistral", "olmo2", "olmo3", "smollm3", "phi3")
    }


@pytest.mark.parametrize(
    ("values", "pattern"),
    [("aaaa", "a"), ("abab", ["a", "b"]), ("aab", ["a", "a", "b"]), ("aba", ["a", "b"]), ("a", "a")],
)
def test_the_shortest_pattern_is_repeated_and_cut(values, pattern):
    assert shortest_pattern(values) == pattern
