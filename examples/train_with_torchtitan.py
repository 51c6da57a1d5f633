"""NSA as the attention of torchtitan's Llama 3, in its own configuration, for its own trainer.

pip install nsa-attention torchtitan==0.3.0

    python train_with_torchtitan.py                  the model beside its dense one, 20 steps each on a CPU: seconds
    torchrun --nproc-per-node 8 -m torchtitan.train --module train_with_torchtitan --config nsa_debugmodel

The second needs GPUs and was not run; its model was, sharded by torchtitan's FSDP2 over two processes on a CPU.
"""

import pydoc_data.topics
from dataclasses import dataclass, fields
from typing import Any

import torch
from torchtitan.models.common.attention import BaseAttention, ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3 import config_registry, model_registry
from torchtitan.models.llama3.model import Llama3Model

from nsa import AttentionConfig, Geometry, NSAAttention
from nsa.core.attention_config import RopeConfig


class SparseAttention(BaseAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseAttention.Config):
        layer: AttentionConfig
        rope: Any  # of which torchtitan reads the longest row; the layer has its own

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layer = NSAAttention(config.layer)

    def forward(self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        # Where documents begin, rows end to end: they do not see each other.
        return self.layer(x, cu_doc_lens=None if attention_masks is None else attention_masks.cu_seq_q)

    def _init_self_parameters(self) -> None:
        self.layer.reset_parameters()


class SparseLlama(Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            # Without the tensor parallelism of GQAttention: rows are sharded by FSDP and HSDP alone.
            Decoder.Config.update_from_config(self, config=config, **kwargs)

    def verify_module_protocol(self) -> None:
        """The layer consists of plain modules, which FSDP2 shards as any others."""


def sparse_spec(flavor: str, **blocks: int) -> Any:
    """A flavor of Llama 3 with NSA in every block, of the paper's block sizes where none are given."""
    spec = model_registry(flavor, attn_backend="varlen")  # so that documents reach the attention as their lengths
    for block in spec.model.layers:
        dense = block.attention
        width, groups = dense.head_dim or dense.dim // dense.n_heads, dense.n_kv_heads or dense.n_heads
        sizes = dict(dim=dense.dim, n_heads=dense.n_heads, n_kv_groups=groups, d_k=width, d_v=width)
        layer = AttentionConfig(**sizes, geometry=Geometry(**blocks), rope=RopeConfig(base=dense.rope.theta))
        dense_fields = {name: getattr(dense, name) for name in ("n_heads", "inner_attention", "rope")}
        block.attention = SparseAttention.Config(layer=layer, **dense_fields)
    values = {each.name: getattr(spec.model, each.name) for each in fields(spec.model) if each.init}
    spec.model, spec.name, spec.state_dict_adapter = SparseLlama.Config(**values), "nsa_llama3", None
    return spec


def nsa_debugmodel() -> Any:
    config = config_registry.llama3_debugmodel()
    config.model_spec, config.parallelism.spmd_backend = sparse_spec("debugmodel"), "partial_dtensor"
    return config


def losses(config: Llama3Model.Config, rows: torch.Tensor) -> list[float]:
    torch.manual_seed(0)
    model, values = config.build(), []
    model.init_states()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in rows.long():
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


if __name__ == "__main__":
    text = "\n".join(pydoc_data.topics.topics.values()).encode()[: 20 * 4 * 257]
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).view(20, 4, 257)
    dense = model_registry("debugmodel", attn_backend="varlen").model
    for block in dense.layers:
        block.attention.inner_attention = ScaledDotProductAttention.Config()  # the others train on GPUs alone
    sparse = sparse_spec("debugmodel", l=16, d=8, l_sel=32, n_sel=4, w=64).model
    dense.layers, sparse.layers = dense.layers[:2], sparse.layers[:2]
    print("loss, nats per byte\n  step   dense     nsa")
    for step, (one, other) in enumerate(zip(losses(dense, rows), losses(sparse, rows), strict=True), 1):
        print(f"{step:6d}{one:8.3f}{other:8.3f}")
