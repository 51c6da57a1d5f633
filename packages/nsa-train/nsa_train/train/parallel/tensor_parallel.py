"""Tensor parallelism of an attention layer: every rank computes some of the key/value groups.

Groups are independent of each other between the projections of the input and that of the output: queries, keys, values,
gates and φ are divided by group, the output projection by its input, and attention runs unchanged on fewer groups. One
all-gather of the layer's input and one reduce-scatter of its output are all that is sent.

`w_k`, `w_v` and the gates are ordered (group, branch, width), so that a group's rows lie together.
"""

from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from nsa.core.compression import BlockCompressor
from nsa.core.model_layers import AttentionHolder
from nsa.core.nsa_attention import NSAAttention

_GROUP_AXIS = 2
"""Axis of groups, of queries and keys where they are normalised: [B, S, G, heads or branches, K]."""


def shard_by_group(
    holder: AttentionHolder,
    mesh: DeviceMesh,
    *,
    input_layout: Placement | None = None,
    output_layout: Placement | None = None,
    use_local_output: bool = True,
) -> None:
    """Divide a held layer among the ranks of a mesh of one dimension, whose size must divide the number of groups.

    All parameters become DTensors of the same names and whole shapes; the layer's counts of heads and groups become
    those of one rank. A layout that is not given is `Replicate`.
    """
    layer = holder.layer
    plan: dict[str, ParallelStyle] = {
        **{name: ColwiseParallel() for name in ("w_q", "w_k", "w_v")},
        # The sum over ranks is left to the layer's own output, whose rows packed into one are separate again.
        "w_out": RowwiseParallel(output_layouts=Partial(), use_local_output=False),
    }
    if layer.gates is not None:
        plan["gates.proj"] = ColwiseParallel()
    for module in layer.children():
        if isinstance(module, BlockCompressor):
            _shard_compressor(module, mesh)
    if layer.q_norm is not None:
        plan |= {
            name: SequenceParallel(sequence_dim=_GROUP_AXIS, use_local_output=True) for name in ("q_norm", "k_norm")
        }
    parallelize_module(layer, mesh, plan)
    parallelize_module(
        holder,
        mesh,
        PrepareModuleInput(input_layouts=(input_layout or Replicate(),), desired_input_layouts=(Replicate(),)),
    )
    parallelize_module(
        holder,
        mesh,
        PrepareModuleOutput(
            output_layouts=(Partial(),),
            desired_output_layouts=(output_layout or Replicate(),),
            use_local_output=use_local_output,
        ),
    )
    _count_own_groups(layer, mesh.size())


def _count_own_groups(layer: NSAAttention, ranks: int) -> None:
    assert layer.n_kv_groups % ranks == 0  # nsa_train.config.rules
    layer.n_heads //= ranks
    layer.n_kv_groups //= ranks
    layer.strategy.shape = layer.strategy.shape._replace(n_kv_groups=layer.n_kv_groups)
    if layer.gates is not None:
        layer.gates.n_groups //= ranks
    # The selector loss is a mean over groups, of which every rank has as many.
    layer.selector_weight /= ranks


def _own_groups(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def _shard_compressor(compressor: BlockCompressor, mesh: DeviceMesh) -> None:
    for name, parameter in list(compressor.named_parameters()):
        axis = 1 if name == "pos_emb" else 0  # [l, G, X]; the others begin with G
        sharded = distribute_tensor(parameter.detach(), mesh, [Shard(axis)], src_data_rank=None)
        compressor.register_parameter(name, nn.Parameter(sharded))
    compressor.own = _own_groups
