"""Sizes that the tests share: the ones users have, and the ones that break kernels."""

from typing import Any

import torch

from nsa.geometry import Geometry
from nsa.kernels.registry import BACKENDS, KernelShape

# name: (l, d, l_sel, n_sel, w), as in the shipped configurations and the paper, and one where l is no power of two.
GEOMETRIES: dict[str, dict[str, int]] = {
    "seed": dict(l=32, d=16, l_sel=64, n_sel=16, w=512),
    "showcase": dict(l=16, d=8, l_sel=32, n_sel=8, w=64),
    "runbook": dict(l=32, d=16, l_sel=64, n_sel=4, w=128),
    "odd": dict(l=48, d=16, l_sel=96, n_sel=5, w=100),
    "tiny": dict(l=8, d=4, l_sel=8, n_sel=4, w=12),
    "no_overlap": dict(l=4, d=4, l_sel=12, n_sel=3, w=1),
    "long_blocks": dict(l=24, d=4, l_sel=8, n_sel=5, w=7),
}

# (n_heads, n_kv_groups): 1, 3, 5, 6 and 16 heads per group.
HEADS = [(2, 2), (6, 2), (5, 1), (12, 2), (16, 1)]


def fp64_backends() -> list[str]:
    """The backends that compute in fp64, where a comparison leaves no room for rounding."""
    cpu = torch.device("cpu")
    shape = KernelShape(1, 1, 1, 1, Geometry(**GEOMETRIES["tiny"]))
    return [name for name, b in BACKENDS.items() if not b.why_not("sliding", cpu, torch.float64, shape)]


def attention_args(geometry: str, heads: tuple[int, int] = (6, 2), **changes: Any) -> dict[str, Any]:
    """Arguments of `NSAAttention`: own keys per branch, blocks as means and equal gates, unless changed."""
    sizes = dict(dim=24, n_heads=heads[0], n_kv_groups=heads[1], d_k=8, d_v=6)
    return sizes | dict(phi="avg", kv="per_branch", sliding_gate_init=0.0) | GEOMETRIES[geometry] | changes
