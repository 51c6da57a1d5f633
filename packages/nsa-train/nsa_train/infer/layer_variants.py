"""Models with the weights of a loaded one and other kinds of attention layers; the tensors are shared, not copied."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nsa.core.attention_config import OPTIONS
from nsa.errors import ConfigError
from nsa.hf.configuration import NSAConfig
from nsa.hf.modeling import NSAForCausalLM
from nsa.options import AttentionKind
from nsa_train.convert.dense.source_model import shortest_pattern

_OF_SPARSE_LAYERS = {"attention", *(each.exported for each in OPTIONS if each.setting.startswith("nsa."))}
_NOT_COMPUTED_WITH = {
    *("max_position_embeddings", "initializer_range", "use_cache", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}


def with_layer_kinds(
    config: NSAConfig, kinds: Sequence[AttentionKind], tensors: Mapping[str, Tensor]
) -> NSAForCausalLM:
    """The model of a config with layers of these kinds, and those of the tensors that it has."""
    arguments = {name: getattr(config, name) for name in NSAConfig.names()}
    arguments["attention"] = shortest_pattern(kinds)
    with torch.device("meta"):  # its tensors are replaced by those that exist
        model = NSAForCausalLM(NSAConfig(**arguments))
    model.load_state_dict({name: tensors[name] for name in model.state_dict()}, assign=True)
    model.tie_weights()
    return model.eval()


def require_same_but_kinds(model: NSAForCausalLM, reference: NSAForCausalLM) -> None:
    """Raise unless the two differ in kinds and options of sparse layers alone, so that layers can be exchanged."""
    free = _OF_SPARSE_LAYERS | _NOT_COMPUTED_WITH | (set() if model.config.qk_norm else {"qk_norm_eps", "qk_norm_per"})
    for name in NSAConfig.names():
        values = getattr(model.config, name), getattr(reference.config, name)
        if name not in free and (values[0] or None) != (values[1] or None):
            raise ConfigError(
                f"the models have {name} {values[0]} and {values[1]}: layers can be exchanged only between a model and "
                f"the dense model it was converted from. Leave the task out, or name that model with --against."
            )
    own, other = model.state_dict(), reference.state_dict()
    for name in sorted(own.keys() & other.keys()):
        if own[name].shape != other[name].shape:
            raise ConfigError(
                f"{name} is {list(own[name].shape)} in one model and {list(other[name].shape)} in the other: layers "
                f"can be exchanged only if they share keys and values (nsa.kv=shared), as after `nsa convert`. Leave "
                f"the task out."
            )
