"""Figures that the model alone determines, in every layout: parameters, their shapes, FLOPs per token, KV cache."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from nsa.core.branches import ATTENTION_PARTS, DENSE_PART
from nsa.core.compression import store_as_rows
from nsa.core.init import InitSkipped
from nsa.core.layer_pattern import kind_counts, repeated
from nsa.errors import ConfigError
from nsa.model.llama_block_nsa import LlamaBlockNSA
from nsa.model.transformer import NSATransformer
from nsa.options import AttentionKind, Checkpointing
from nsa_train.config.schema import RunConfig, settings
from nsa_train.run_model import ALL_PARAMETERS, build_model, trainable_names

_POSSIBLE_SIZE = 2**24
_FP32 = 4
_EMBEDDINGS, HEAD = "embeddings", "lm_head"
"""Parts of the model outside its blocks, each gathered and reduced on its own by fsdp and hsdp."""
_FIRST_BLOCK = "blocks.0."
_SPLIT_BY_INPUT = ("attention.w_out.weight", "feed_forward.w2.weight", ".pos_emb")
"""Parameters that tensor parallelism divides along their second axis; the others along the first, norms not at all."""


@dataclass(frozen=True)
class ParameterCounts:
    embeddings: int
    attention: int
    feed_forward: int
    norms: int
    head: int
    """0 if the head shares the embedding."""
    tensors: int
    attention_per_layer: Mapping[AttentionKind, int]
    """Parameters of one layer by its kind of attention."""
    feed_forward_per_layer: int

    @property
    def total(self) -> int:
        return self.embeddings + self.attention + self.feed_forward + self.norms + self.head

    @property
    def head_weights(self) -> int:
        """Weights of the matrix that makes logits, shared or not."""
        return self.head or self.embeddings

    @property
    def in_blocks(self) -> int:
        return self.attention + self.feed_forward + self.norms

    @property
    def products_per_layer(self) -> dict[AttentionKind, int]:
        """Weights of one block's attention and feed-forward."""
        return {kind: count + self.feed_forward_per_layer for kind, count in self.attention_per_layer.items()}


@dataclass(frozen=True)
class ParameterShapes:
    """Shapes of parameters that fsdp and hsdp gather together: a block, the embeddings, or the head."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, torch.nn.Parameter]]) -> "ParameterShapes":
        return cls(tuple((name, tuple(parameter.shape)) for name, parameter in named))

    def share(self, shards: int, tp: int = 1) -> int:
        """Numbers that rank 0 holds, the largest share: each parameter is cut along its first axis, after that by
        tensor parallelism, so that one with fewer rows than shards is a whole row."""
        return sum(-(-first // shards) * rest for first, rest in (_of_one_tp_rank(*each, tp) for each in self.shapes))

    def padded(self, shards: int, tp: int = 1) -> int:
        """Numbers that a gather of all shards moves: every rank sends as many as the largest share has."""
        return shards * self.share(shards, tp)


def _of_one_tp_rank(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, int]:
    """Rows, and numbers in a row, that one rank of tensor parallelism has of a parameter."""
    first, rest = shape[0], prod(shape[1:])
    if "norm" in name or name.endswith(("w_out.bias", "w2.bias")):
        return first, rest
    return (first, rest // tp) if name.endswith(_SPLIT_BY_INPUT) else (first // tp, rest)


@dataclass(frozen=True)
class ModelFigures:
    parameters: ParameterCounts
    blocks: Mapping[AttentionKind, ParameterShapes]
    """Shapes of one block of each kind."""
    layers: Mapping[AttentionKind, int]
    outside: Mapping[str, ParameterShapes]
    """Shapes of the embeddings and the head, which holds the last norm; with tied embeddings both are one."""
    flops: Mapping[str, float]
    """Forward and backward for one token, by part, over all layers."""
    recomputed: Mapping[Checkpointing, float]
    """FLOPs for one token that gradient checkpointing adds."""
    cache_bytes: int
    """KV cache of one row at inference, in the run's precision."""
    trained: ParameterShapes | None
    """Shapes of all parameters that are trained, if some are frozen (`train.trainable`)."""

    def share(self, shards: int, tp: int = 1) -> int:
        """Number of parameters that rank 0 holds."""
        in_blocks = sum(self.layers[kind] * shapes.share(shards, tp) for kind, shapes in self.blocks.items())
        return in_blocks + sum(shapes.share(shards, tp) for shapes in self.outside.values())

    def trained_share(self, shards: int, tp: int = 1) -> int:
        """Number of trained parameters that rank 0 holds, with gradients and optimizer state."""
        return self.share(shards, tp) if self.trained is None else self.trained.share(shards, tp)

    def padding(self, shards: int, tp: int = 1) -> float:
        """Numbers that gathers of the whole model move to one rank, as a multiple of those that it needs."""
        parts = [*((self.layers[kind], shapes) for kind, shapes in self.blocks.items())]
        parts += [(1, shapes) for shapes in self.outside.values()]
        moved, needed = (sum(n * shapes.padded(ranks, tp) for n, shapes in parts) for ranks in (shards, 1))
        return moved / needed

    @property
    def trained_tensors(self) -> int:
        return self.parameters.tensors if self.trained is None else len(self.trained.shapes)


def model_figures(config: RunConfig, vocab_size: int) -> ModelFigures:
    try:
        models = _models_of_one_layer(config, vocab_size)
        cache_bytes = _cache_bytes(config, models)
    except (RuntimeError, OverflowError, TypeError) as error:  # raised by torch for a size that does not fit in 64 bits
        raise _explain_impossible_size(config, error) from error
    flops, recomputed = _flops(config, models)
    named = {kind: dict(model.named_parameters()) for kind, model in models.items()}
    first = next(iter(named.values()))

    def part(of: Mapping[str, torch.nn.Parameter], prefix: str) -> ParameterShapes:
        return ParameterShapes.of((name, each) for name, each in of.items() if name.startswith(prefix))

    outside = {name: part(first, f"{name}.") for name in (_EMBEDDINGS, HEAD)}
    if config.model.tie_embeddings:
        outside = {HEAD: ParameterShapes(outside[_EMBEDDINGS].shapes + outside[HEAD].shapes)}
    return ModelFigures(
        parameters=_parameters(config, models),
        blocks={kind: part(of, "blocks.") for kind, of in named.items()},
        layers=_kind_counts(config),
        outside=outside,
        flops=flops,
        recomputed=recomputed,
        cache_bytes=cache_bytes,
        trained=None if config.train.trainable == ALL_PARAMETERS else _trained(config, named),
    )


def _models_of_one_layer(config: RunConfig, vocab_size: int) -> dict[AttentionKind, NSATransformer]:
    """The model with one block of each kind that it has, on the meta device: shapes as the engine stores parameters, no
    memory."""
    models = {}
    for kind in _kind_counts(config):
        one_layer = config.model.model_copy(
            update={"n_layers": 1, "attention": (kind,), "rope_layers": config.model.rope_layers[:1]}
        )
        with torch.device("meta"), InitSkipped():
            models[kind] = build_model(config.model_copy(update={"model": one_layer}), vocab_size)
        store_as_rows(models[kind])
    return models


def _trained(config: RunConfig, models: Mapping[AttentionKind, Mapping[str, torch.nn.Parameter]]) -> ParameterShapes:
    """Parameters that are trained, by their names in the whole model; `models` have one layer each."""
    shapes = {name: p for name, p in next(iter(models.values())).items() if not name.startswith(_FIRST_BLOCK)}
    for place, kind in enumerate(repeated(config.model.attention, config.model.n_layers)):
        of_block = {name: p for name, p in models[kind].items() if name.startswith(_FIRST_BLOCK)}
        shapes |= {f"blocks.{place}.{name.removeprefix(_FIRST_BLOCK)}": p for name, p in of_block.items()}
    trained = trainable_names(shapes, config.train.trainable)
    return ParameterShapes.of((name, p) for name, p in shapes.items() if name in trained)


def _kind_counts(config: RunConfig) -> Counter[AttentionKind]:
    """Count the layers of each kind."""
    return kind_counts(config.model.attention, config.model.n_layers)


def _explain_impossible_size(config: RunConfig, error: Exception) -> Exception:
    """Names the largest size as the cause; if no size is large, returns the original error."""
    keys = [key for key in settings() if key.startswith(("model.", "nsa.")) or key == "train.seq_len"]
    sizes = {key: value for key in keys if isinstance(value := config.value(key), int)}
    key = max(sizes, key=lambda name: sizes[name])
    if sizes[key] < _POSSIBLE_SIZE:
        return error
    return ConfigError(f"{key} is {sizes[key]}: no tensor can be that large. Set a smaller value.")


def _parameters(config: RunConfig, models: Mapping[AttentionKind, NSATransformer]) -> ParameterCounts:
    counts = _kind_counts(config)
    sizes = {kind: {name: p.numel() for name, p in model.named_parameters()} for kind, model in models.items()}
    in_block = {kind: {n: size for n, size in of.items() if n.startswith("blocks.")} for kind, of in sizes.items()}
    outside = {name: size for name, size in sizes[next(iter(sizes))].items() if not name.startswith("blocks.")}

    def per_layer(part: str) -> dict[AttentionKind, int]:
        return {kind: sum(size for name, size in of.items() if part in name) for kind, of in in_block.items()}

    def of_blocks(part: str) -> int:
        return sum(counts[kind] * size for kind, size in per_layer(part).items())

    return ParameterCounts(
        embeddings=outside["embeddings.weight"],
        attention=of_blocks(".attention."),
        feed_forward=of_blocks(".feed_forward."),
        norms=of_blocks(".attention_norm.") + of_blocks(".feed_forward_norm.") + outside["lm_head.norm.weight"],
        head=outside.get("lm_head.w_out.weight", 0),
        tensors=sum(counts[kind] * len(of) for kind, of in in_block.items()) + len(outside),
        attention_per_layer=per_layer(".attention."),
        feed_forward_per_layer=next(iter(per_layer(".feed_forward.").values())),
    )


def _flops(
    config: RunConfig, models: Mapping[AttentionKind, NSATransformer]
) -> tuple[dict[str, float], dict[Checkpointing, float]]:
    """FLOPs per token by part, forward and backward, over all layers; and those repeated by gradient checkpointing."""
    forward: Counter[str] = Counter()
    for kind, layers in _kind_counts(config).items():
        block = models[kind].blocks[0]
        assert isinstance(block, LlamaBlockNSA)
        feed_forward = 2.0 * sum(p.numel() for p in block.feed_forward.parameters())
        for part, count in {"feed_forward": feed_forward, **block.attention.flops(config.train.seq_len)}.items():
            forward[part] += layers * count  # type: ignore[assignment]
    # Backward costs twice the forward pass; block selection has no backward.
    flops = {part: count * (1.0 if part == "select" else 3.0) for part, count in forward.items()}
    # Recomputation ends with the last tensor that the backward pass needs: before the feed-forward's third product.
    full = float(sum(forward.values()) - forward["feed_forward"] / 3)
    operators = sum(forward[part] for part in (*ATTENTION_PARTS, DENSE_PART))
    repeated: dict[Checkpointing, float] = {"off": 0.0, "selective": full - operators, "full": full}
    head = next(iter(models.values())).lm_head.w_out.weight.numel()
    return {**flops, "head": 6.0 * head}, repeated


def _cache_bytes(config: RunConfig, models: Mapping[AttentionKind, NSATransformer]) -> int:
    width = _FP32 if config.runtime.precision == "fp32" else 2
    of_kind = {kind: model.new_cache(1, config.train.seq_len).n_bytes() for kind, model in models.items()}
    return sum(layers * of_kind[kind] for kind, layers in _kind_counts(config).items()) * width // _FP32
