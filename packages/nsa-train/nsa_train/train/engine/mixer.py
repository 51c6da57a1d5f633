"""Registers NSA as OLMo-core sequence mixer "nsa", for every architecture the engine can build."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from olmo_core.nn.attention import (
    RingContextParallelStyle,
    SequenceMixer,
    SequenceMixerConfig,
    UlyssesContextParallelStyle,
)
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from nsa.core.attention_config import AttentionConfig, attention_config
from nsa.core.compression import store_as_rows
from nsa.core.init import init_weights
from nsa.core.initial_values import fill
from nsa.core.layer_pattern import layer_config
from nsa.core.model_layers import AttentionHolder, layer_of_kind
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import Positions
from nsa.errors import ConfigError
from nsa.kernels.registry import BackendRequest
from nsa.options import AttentionKind, RopeLayer
from nsa_train.config.schema import RunConfig
from nsa_train.run_model import wanted_kernels
from nsa_train.train.parallel.context_parallel import ContextGroup, context_group
from nsa_train.train.parallel.tensor_parallel import shard_by_group

_SEEDS = 2**62


@SequenceMixerConfig.register("nsa")
@dataclass
class NSAMixerConfig(SequenceMixerConfig):
    """The attention as the `sequence_mixer` of a block of OLMo-core: an `AttentionConfig` in plain values, with the
    kind of layer and the backends."""

    options: dict[str, Any]
    """Options of the attention by name; the model's width is that of `build`."""
    kind: AttentionKind = "nsa"
    kernels: dict[str, str] = field(default_factory=dict)
    """By branch; missing ones are `auto`."""

    @classmethod
    def of_run(cls, config: RunConfig, kind: AttentionKind = "nsa", rope: RopeLayer = "scaled") -> "NSAMixerConfig":
        attention = layer_config(config.attention, kind, rope, config.model.window)
        return cls(attention.options(), kind, wanted_kernels(config)._asdict())

    def layer(self, d_model: int) -> tuple[AttentionConfig, BackendRequest]:
        return attention_config(**{**self.options, "dim": d_model}), BackendRequest(**self.kernels)

    def on_meta(self, d_model: int) -> NSAAttention:
        """The layer without values, to count its parameters and FLOPs."""
        config, kernels = self.layer(d_model)
        with torch.device("meta"):
            return NSAAttention(config, kind=self.kind, kernels=kernels)

    def num_params(self, d_model: int) -> int:
        return sum(p.numel() for p in self.on_meta(d_model).parameters())

    def build(
        self, d_model: int, *, layer_idx: int, n_layers: int, init_device: str = "cpu", cache: Any = None
    ) -> "NSAMixer":
        with torch.device(init_device):
            return NSAMixer(d_model, self)


class NSAMixer(AttentionHolder, SequenceMixer):
    """An attention layer as the engine's blocks hold it."""

    def __init__(self, dim: int, config: NSAMixerConfig) -> None:
        attention, kernels = config.layer(dim)
        super().__init__(NSAAttention(attention, kind=config.kind, kernels=kernels))
        store_as_rows(self)
        self.mixer_config = config
        self.context: ContextGroup | None = None

    def forward(
        self,
        x_BSD: Tensor,
        *,
        cu_doc_lens: Tensor | Sequence[int] | None = None,
        max_doc_len: int | None = None,
        positions: Positions | None = None,
        **unknown: Any,
    ) -> Tensor:
        """`cu_doc_lens`: where documents packed into the batch begin, rows end to end; they do not see each other.

        `positions`: those of this batch, if the model has made them for all its layers.
        """
        if unknown:
            raise ConfigError(
                f"the nsa mixer was given {', '.join(sorted(unknown))}: it trains on whole rows, plain or packed. "
                f"Decode with nsa.model instead."
            )
        if positions is None:
            if self.context is not None:
                raise ConfigError(
                    "the nsa mixer shares rows with other ranks and was given no positions: they are those of a part "
                    "of a row. Call the whole model, which makes them."
                )
            return self.layer(x_BSD, cu_doc_lens=cu_doc_lens)
        packed = positions.tables[0].shape[:2] != x_BSD.shape[:2]
        rows = x_BSD.flatten(0, 1)[None] if packed else x_BSD
        return self.layer(rows, where=positions).view(x_BSD.shape)

    def num_flops_per_token(self, seq_len: int) -> int:
        """Forward and backward of the whole layer, however it is sharded; choosing blocks has no backward."""
        parts = self.mixer_config.on_meta(self.layer.dim).flops(seq_len)
        return int(3 * sum(parts.values()) - 2 * parts["select"])

    def init_weights(self, *, num_blocks: int, generator: torch.Generator | None = None, **_: Any) -> None:
        """Initialize as `nsa.core.init`, whatever the engine's own method; equal for every sharding.

        The engine hands out one generator for all layers. A seed drawn from it makes a whole layer, of which each rank
        keeps its part. A layer of another kind takes its parameters from an NSA layer made so.
        """
        device = generator.device if generator is not None else torch.device("cpu")
        seed = int(torch.randint(_SEEDS, (), generator=generator, device=device))
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            config, kernels = self.mixer_config.layer(self.layer.dim)
            whole = NSAAttention(config, kernels=kernels)
            init_weights(nn.ModuleDict({"attention": whole}), num_blocks, config.init_std)
            values = dict(layer_of_kind(self.layer.kind, whole).named_parameters())
        for name, parameter in self.named_parameters():
            fill(parameter, values[name].detach().view(parameter.shape))

    def apply_tp(self, tp_mesh: DeviceMesh, *, float8_enabled: bool = False, **layouts: Any) -> None:
        assert not float8_enabled  # no setting asks for it
        shard_by_group(self, tp_mesh, **layouts)

    def apply_cp(
        self,
        cp_mesh: DeviceMesh,
        ring: RingContextParallelStyle | None = None,
        uly: UlyssesContextParallelStyle | None = None,
    ) -> None:
        """The engine's styles choose the split of rows: `ring` zig-zag, `uly` contiguous; the exchange is ours."""
        self.context = context_group(cp_mesh, zigzag=ring is not None)
