"""Builds a run's model from its settings; the only place where settings become model arguments."""

from nsa.kernels.interface import KernelShape
from nsa.kernels.registry import BackendRequest
from nsa.model.transformer import NSATransformer
from nsa_train.config.schema import RunConfig


def wanted_kernels(config: RunConfig) -> BackendRequest:
    """The backends a run requests; without fused kernels, `auto` means the portable one."""
    named = BackendRequest(**config.kernels.model_dump())
    if config.runtime.use_flash:
        return named
    return BackendRequest(*("portable" if name == "auto" else name for name in named))


def kernel_shape(config: RunConfig) -> KernelShape:
    model = config.model
    return KernelShape(model.n_kv_groups, model.n_heads // model.n_kv_groups, model.d_k, model.d_v, config.nsa.geometry)


def build_model(config: RunConfig, vocab_size: int) -> NSATransformer:
    """The run's model on the current default device, in fp32. `model.vocab_size`, if set, wins over the tokenizer's."""
    model = config.model
    return NSATransformer(
        model.vocab_size or vocab_size,
        config.attention,
        model.n_layers,
        ffn_dim=model.ffn_size,
        ffn_bias=model.ffn_bias,
        post_norm=model.post_norm,
        tie_embeddings=model.tie_embeddings,
        norm_eps=model.norm_eps,
        layers=model.attention,
        rope_layers=model.rope_layers,
        window=model.window,
        kernels=wanted_kernels(config),
    )
