"""Folders exported, and a checkpoint trained, by the code of 2026-11-18 (commit 7db3787), with their logits.

`fixtures/earlier_exports.json` holds the config.json, the parameters' shapes and the settings of each case; weights are
drawn from the name of each parameter (`drawn_weights`). `fixtures/earlier_logits.safetensors` holds every third logit
in fp32, every fifth of the two below.
`fixtures/earlier_export` is one folder as `nsa export hf` wrote it, `fixtures/earlier_run.tar.xz` the checkpoint of
step 2 of a training run of 4 steps, whose losses and settings are in `earlier_exports.json` too.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FIXTURES = Path(__file__).with_name("fixtures")
FOLDER, RUN = FIXTURES / "earlier_export", FIXTURES / "earlier_run.tar.xz"
LOGITS = FIXTURES / "earlier_logits.safetensors"

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "truncate": False}
SIZES: dict[str, dict[str, Any]] = {
    "model": {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 6, "vocab_size": 24},
    "nsa": {"l": 8, "d": 4, "l_sel": 8, "n_sel": 4, "w": 12},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1},
    "train": {"seq_len": 96, "steps": 4, "warmup_steps": 1, "batch_size": 2},
    "data": {"dataset": "synthetic", "synthetic_task": "uniform"},
}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "paper": {"nsa": {"preset": "paper"}},
    "merged": {"model": {"attention": "merged"}, "nsa": {"selector_loss": 1.0, "selector_blocks": "all"}},
    "mixed": {"model": {"attention": ["window", "dense", "nsa", "global"], "n_layers": 4, "window": 5}},
    "coarse": {"nsa": {"coarse_block": 4, "n_coarse": 3}},
    "tanh": {"nsa": {"gate": "tanh", "gate_per": "group", "gate_temperature": 2.0, "phi": "weighted"}},
    "rope": {
        "model": {
            "rope_layers": ["scaled", "plain", "none"], "n_layers": 3, "rope_scaling": YARN, "rotary_dim": 4,
            "rope_angles": "fp32", "rope_base": 10_000.0,
        },
        "nsa": {"phi": "avg", "rope_compressed": "after"},
    },
    "norms": {
        "model": {
            "qk_norm": True, "qk_norm_per": "layer", "qkv_bias": True, "attention_out_bias": True, "ffn_bias": True,
            "post_norm": True, "norm_eps": 1e-4, "rope_scale": 2.0, "init_std": 0.08, "tie_embeddings": True,
        },
        "nsa": {"kv": "shared_keys", "phi": "linear", "phi_pos_emb": True, "selector_loss": 0.5},
    },
}  # fmt: skip


def record() -> dict[str, Any]:
    """Read what was recorded about the cases, by name, about the training run and about the machine."""
    recorded: dict[str, Any] = json.loads((FIXTURES / "earlier_exports.json").read_text())
    return recorded


def settings_of(case: str) -> dict[str, dict[str, Any]]:
    return {section: values | CASES[case].get(section, {}) for section, values in SIZES.items()}


def drawn_weights(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Weights far from zero, from the names of the parameters alone; norms around one."""
    weights = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weights[name] = torch.randn(shape, generator=generator) * 0.3 + ("norm" in name)
    return weights


def tokens(vocab_size: int) -> Tensor:
    return torch.arange(70).mul(7).square().remainder(vocab_size).view(2, 35)


def this_machine() -> dict[str, str]:
    """Describe what the last bits of a matrix product depend on."""
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
