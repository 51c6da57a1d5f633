"""Which architectures of the installed Transformers run sparse: `python -m nsa.hf.sparse_architectures`.

Each model is tiny, with random weights. With `use_sparse_attention` it must give the logits of its own dense attention
for the covered tokens: in one pass, token by token with a cache, and with padding on the left. Beyond them the two must
differ; else nothing was sparse.
"""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.hf.sparse_attention import use_sparse_attention

GEOMETRY = Geometry(l=4, d=2, l_sel=8, n_sel=4, w=16)
COVERED = GEOMETRY.n_sel * GEOMETRY.l_sel + GEOMETRY.w
LIMIT = 1e-5
"""Largest difference of logits, divided by the largest logit, of models that count as equal."""
_LENGTH, _PROMPT, _PADDING = 2 * COVERED, 30, 7
_SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_MIXED: dict[str, Any] = dict(sliding_window=12, layer_types=["sliding_attention", "full_attention"])
_EXPERTS: dict[str, Any] = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
_LATENT: dict[str, Any] = dict(
    _EXPERTS, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=12, head_dim=4,
    num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "arcee": {},
    "cohere": {},
    "cohere2": _MIXED,
    "deepseek_v3": _LATENT,
    "ernie4_5": {},
    "exaone4": _MIXED,
    "gemma": {},
    "gemma3_text": _MIXED,
    "glm": {},
    "glm4": {},
    "gpt_neox": {},
    "granite": {},
    "granitemoe": _EXPERTS,
    "helium": {},
    "hunyuan_v1_dense": {},
    "ministral3": {},
    "mistral": dict(sliding_window=None),
    "mixtral": dict(_EXPERTS, sliding_window=None),
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _MIXED,
    "olmoe": _EXPERTS,
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": dict(_EXPERTS, decoder_sparse_step=1, mlp_only_layers=[]),
    "seed_oss": {},
    "smollm3": {},
    "starcoder2": {},
    "gemma2": _MIXED,
    "gpt_oss": dict(_EXPERTS, **_MIXED),
    "bloom": dict(n_layer=2, n_head=4),
    "t5": dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
}
"""Model type and what its tiny config has beside the sizes that all share."""


class ArchitectureResult(NamedTuple):
    """What became of one architecture."""

    name: str
    differences: tuple[float, ...] = ()
    """Of one pass, of decoding and of left padding, over the covered tokens; and of one pass beyond them."""
    refusal: str = ""

    @property
    def is_equal(self) -> bool:
        *covered, beyond = self.differences or (1.0, 0.0)
        return max(covered) <= LIMIT < beyond


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """Build a model whose weights are far from zero, so that attention is far from uniform."""
    config = AutoConfig.for_model(name, **deepcopy(_SIZES | ARCHITECTURES[name]))  # it adds to what it is given
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.15 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)  # norms and biases keep their mean
    return model


@torch.no_grad()
def compare_architecture(name: str) -> ArchitectureResult:
    """Compare a sparse model with its own dense attention."""
    model = tiny_model(name)
    tokens_BS = torch.randint(3, _SIZES["vocab_size"], (2, _LENGTH), generator=torch.Generator().manual_seed(1))
    mask_BS = torch.ones(2, COVERED, dtype=torch.int64)
    mask_BS[0, :_PADDING] = 0
    if not model.config.is_encoder_decoder:
        dense = model(tokens_BS).logits
        dense_padded = model(tokens_BS[:, :COVERED], attention_mask=mask_BS).logits
    try:
        use_sparse_attention(model, GEOMETRY)
        sparse = model(tokens_BS).logits
        decoded = _decoded(model, tokens_BS[:, :COVERED])
        padded = model(tokens_BS[:, :COVERED], attention_mask=mask_BS).logits
    except ConfigError as error:
        return ArchitectureResult(name, refusal=str(error))
    pairs = (
        (sparse[:, :COVERED], dense[:, :COVERED]),
        (decoded, dense[:, :COVERED]),
        (padded[mask_BS.bool()], dense_padded[mask_BS.bool()]),
        (sparse[:, COVERED:], dense[:, COVERED:]),
    )
    return ArchitectureResult(name, tuple(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))


def _decoded(model: PreTrainedModel, tokens_BS: Tensor) -> Tensor:
    """Logits of a prompt in two chunks and then of one token at a time, with a cache."""
    parts, cache = [], None
    for part_BS in tokens_BS.split([_PROMPT // 2, _PROMPT // 2] + [1] * (tokens_BS.shape[1] - _PROMPT), 1):
        output = model(part_BS, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, 1)


def main() -> None:
    """Print one line per architecture, and how many are equal."""
    results = [compare_architecture(name) for name in ARCHITECTURES]
    print(f"{'architecture':18}{'one pass':>10}{'decoding':>10}{'padding':>10}{'beyond':>10}")
    for name, differences, refusal in results:
        print(f"{name:18}" + "".join(f"{x:10.1e}" for x in differences) + (f"  refused: {refusal}" if refusal else ""))
    n_equal, n_refused = sum(r.is_equal for r in results), sum(bool(r.refusal) for r in results)
    print(
        f"{len(results)} architectures: {n_equal} equal over the {COVERED} covered tokens (up to {LIMIT:g} of the "
        f"largest logit), {n_refused} refused"
    )


if __name__ == "__main__":
    main()
