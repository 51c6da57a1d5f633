"""Layers of different kinds that start from the same values: `layer_of_kind`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from nsa.core.branches import BRANCH_ORDER
from nsa.core.nsa_attention import NSAAttention
from nsa.options import AttentionKind


def layer_parameters(layer: NSAAttention, of_nsa: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of a layer as parts of an NSA layer's: what kinds share starts from the same values.

    Queries, output and norms are the same. Keys and values are those of the layer's own branches, `dense` as `window`;
    of `merged`, which has one set of them, those of the selected branch.
    """
    own = [BRANCH_ORDER.index(branch) for branch in layer.branches]
    parameters = {}
    for name, parameter in layer.named_parameters():
        whole = of_nsa[name]
        if whole.shape != parameter.shape:
            # w_k and w_v are ordered (group, branch, width), gates (group, head, branch).
            outer, inner = (-1, 1) if name.startswith("gates.") else (layer.n_kv_groups, -1)
            by_branch = whole.unflatten(0, (outer, len(BRANCH_ORDER), inner))
            branches = own[: len(BRANCH_ORDER) * parameter.shape[0] // whole.shape[0]]
            whole = by_branch[:, torch.tensor(branches, device=whole.device)].flatten(0, 2)
        parameters[name] = whole
    return parameters


def layer_of_kind(kind: AttentionKind, whole: NSAAttention) -> NSAAttention:
    """A layer of the same config, with the values that `whole`, an NSA layer, has for its parameters."""
    if kind == whole.kind:
        return whole
    with torch.device("meta"):
        layer = NSAAttention(whole.config, kind=kind, kernels=whole.kernels)
    weight = whole.w_q.weight
    values = layer_parameters(layer, whole.state_dict())
    layer.to_empty(device=weight.device).to(weight.dtype).load_state_dict(values)
    return layer
