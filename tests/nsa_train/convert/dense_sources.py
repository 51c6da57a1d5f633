"""Tiny dense models of every family that `nsa convert` reads, made and saved by Transformers."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    rope_theta=1000.0,
)
_LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama biases": ("llama", dict(attention_bias=True, mlp_bias=True, head_dim=20)),
    "llama tied": ("llama", dict(tie_word_embeddings=True)),
    "llama linear": ("llama", dict(rope_scaling=dict(rope_type="linear", factor=4.0))),
    "llama llama3": ("llama", dict(rope_scaling=_LLAMA3)),
    "llama yarn": ("llama", dict(rope_scaling=_YARN)),
    "qwen2": ("qwen2", {}),
    "qwen2 sliding": ("qwen2", dict(use_sliding_window=True, sliding_window=16, max_window_layers=2)),
    "qwen3": ("qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "mistral": ("mistral", dict(sliding_window=None, head_dim=16)),
    "mistral sliding": ("mistral", dict(sliding_window=16)),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", dict(sliding_window=16, rope_theta=500_000.0, rope_scaling=_YARN)),
    "smollm3": ("smollm3", {}),
    "phi3": ("phi3", {}),
    "phi3 partial": ("phi3", dict(partial_rotary_factor=0.5)),
}


def dense_model(case: str, **changes: Any) -> PreTrainedModel:
    """A model whose norms and biases are random too, so that each of them matters for the logits."""
    kind, options = CASES[case]
    config = AutoConfig.for_model(kind, **deepcopy({**SIZES, **options, **changes}))  # it adds to the RoPE it is given
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(len(case))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(mean=float(is_norm), std=0.3 if is_norm else 0.15, generator=generator)
    return model


def save_dense(
    folder: Path, case: str = "llama", *, dtype: torch.dtype = torch.float32, shard: str = "5GB", **changes: Any
) -> PreTrainedModel:
    """The model in a folder, as Transformers writes it."""
    model = dense_model(case, **changes).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def token_ids(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(7))
