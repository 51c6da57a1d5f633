"""Settings of a run as the config of its model in Transformers, and back."""

from typing import Any

from nsa.hf.configuration import LAYER_OPTIONS, NSAConfig
from nsa_train.config.schema import RunConfig

_MODEL_SETTINGS = {
    "num_hidden_layers": "n_layers",
    "intermediate_size": "ffn_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "post_norm": "post_norm",
    "ffn_bias": "ffn_bias",
    "window": "window",
    "attention": "attention",
    "rope_layers": "rope_layers",
}
"""Settings of `model` beside the options of the attention, by their names in `NSAConfig`."""


def exported_config(config: RunConfig, vocab_size: int, eos_token_id: int | None) -> NSAConfig:
    """The config of a run's model; `model.vocab_size`, if set, wins over the tokenizer's."""
    model, values = config.model, config.attention.options()
    of_model = {name: getattr(model, setting) for name, setting in _MODEL_SETTINGS.items()}
    of_model |= {name: v[0] if len(v) == 1 else list(v) for name, v in of_model.items() if isinstance(v, tuple)}
    return NSAConfig(
        vocab_size=model.vocab_size or vocab_size,
        max_position_embeddings=config.train.seq_len,
        eos_token_id=eos_token_id,
        **of_model | {"intermediate_size": model.ffn_size},
        **{each.exported: values[each.name] for each in LAYER_OPTIONS},
    )


def model_settings(config: NSAConfig) -> dict[str, dict[str, Any]]:
    """Sections `model` and `nsa` of a run with this model; `exported_config` undoes it."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "nsa": {}}
    for each in LAYER_OPTIONS:
        section, _, key = each.setting.partition(".")
        sections[section][key] = getattr(config, each.exported)
    sections["model"] |= {setting: getattr(config, name) for name, setting in _MODEL_SETTINGS.items()}
    sections["model"]["rope_scaling"] = config.rope_scaling or {}
    return sections
