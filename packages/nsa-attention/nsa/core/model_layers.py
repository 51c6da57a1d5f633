"""`attention_layers`: the attention layers of any model."""

from typing import Any

from torch import nn


def attention_layers(model: nn.Module) -> dict[str, Any]:
    """Every `NSAAttention` of a model by the name of its module; of one that is held, that of its `AttentionHolder`."""
    modules = model.named_modules()
    return {name: module.attention_layer for name, module in modules if hasattr(module, "attention_layer")}
