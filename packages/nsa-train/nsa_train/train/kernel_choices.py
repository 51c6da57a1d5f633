"""The kernel backends of a run: what its train module will compute with."""

from typing import Any

import torch

from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import attention_layers
from nsa.kernels.registry import BackendChoice


def kernel_choices(train_module: Any, device: torch.device) -> tuple[BackendChoice, ...]:
    """The backend of each branch and the reason, in the dtype that the attention of this train module computes in."""
    layers = attention_layers(train_module.model).values()
    layer: NSAAttention = max(layers, key=lambda layer: len(layer.branches))
    halved = train_module.autocast_precision or (train_module.dp_config and train_module.dp_config.param_dtype)
    return layer.plan(device, torch.bfloat16 if halved else torch.float32).choices
