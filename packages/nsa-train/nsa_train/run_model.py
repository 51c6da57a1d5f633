"""Builds a run's model from its settings; the only place where settings become model arguments; freezes parameters."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from nsa.errors import ConfigError
from nsa.kernels.interface import KernelShape
from nsa.kernels.registry import BackendRequest
from nsa.model.transformer import NSATransformer
from nsa_train.config.schema import RunConfig

ALL_PARAMETERS = ("*",)
_EXAMPLES = 3


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


def trainable_names(names: Iterable[str], patterns: Sequence[str]) -> frozenset[str]:
    """The names that match a pattern; raises ConfigError if one of the patterns matches none."""
    names = list(names)
    matches = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in patterns}
    if unmatched := [pattern for pattern, names_of_pattern in matches.items() if not names_of_pattern]:
        examples = ", ".join([*names[:_EXAMPLES], "…", *names[-_EXAMPLES:]])
        raise ConfigError(
            f"train.trainable ({', '.join(patterns)}) must name parameters of the model: {', '.join(unmatched)} "
            f"matches none of its {len(names)} ({examples}). Correct the pattern, or leave it out."
        )
    return frozenset(name for names_of_pattern in matches.values() for name in names_of_pattern)


def freeze_others(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter that no pattern matches. Before blocks are wrapped, which changes names."""
    trained = trainable_names((name for name, _ in model.named_parameters()), patterns)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
