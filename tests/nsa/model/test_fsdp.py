"""FSDP2 with mixed precision: among the arguments of a block, positions must reach the layers as they are."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from nsa.model.transformer import NSATransformer
from tests.shapes import attention_args

OPTIONS = [{}, dict(selector_loss=0.5, selector_loss_share=0.5), dict(rope_layers=["scaled", "none"])]


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def second_of_four():
    """A world of four in one process, whose collectives carry nothing: only what needs none can be right in it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [dict(phi="mlp", phi_pos_emb=True), dict(layers=["nsa", "merged"])], ids=str)
def test_a_model_made_on_the_meta_device_and_sharded_gets_its_part_of_the_initial_values(second_of_four, options):
    def model() -> NSATransformer:
        return NSATransformer(50, n_layers=2, **attention_args("tiny", **options))

    with torch.device("meta"):
        sharded = model()
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded).to_empty(device="cpu")
    whole = model()
    for each in (sharded, whole):
        torch.manual_seed(3)
        each.reset_parameters()
    for name, parameter in whole.named_parameters():
        parts = parameter.chunk(4)
        mine = parts[1] if len(parts) > 1 else parameter[:0]
        assert torch.equal(sharded.get_parameter(name).to_local(), mine), name


def sharded_step(options: dict, packed: bool, **policy: bool) -> tuple[torch.Tensor, dict, set]:
    """Loss, gradients and the dtypes of the RoPE tables that layers received, of a model in bf16."""
    torch.manual_seed(0)
    model = NSATransformer(50, n_layers=2, **attention_args("tiny"), **options)
    dtypes: set[torch.dtype] = set()

    def note(layer, args, kwargs):
        dtypes.update(table.dtype for table in kwargs["where"].tables)

    for block in model.blocks:
        block.attention.register_forward_pre_hook(note, with_kwargs=True)
        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, **policy))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, **policy))
    register_fsdp_forward_method(model, "loss")
    tokens = torch.randint(50, (2, 65), generator=torch.Generator().manual_seed(1))
    documents = dict(cu_doc_lens=[0, 40, 64, 128]) if packed else {}
    loss = model.loss(tokens[:, :-1], tokens[:, 1:], **documents)
    (16 * loss).backward()  # as a gradient scaler would
    return loss.detach(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}, dtypes


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("options", OPTIONS, ids=["nsa", "selector_loss", "two_rotations"])
def test_inputs_cast_by_fsdp_change_neither_positions_nor_gradients(world_of_one, options, packed):
    """Hidden states are in bf16 already, so that torch's default has nothing left to cast."""
    loss, gradients, dtypes = sharded_step(options, packed)
    expected, of_uncast, _ = sharded_step(options, packed, cast_forward_inputs=False)
    assert dtypes == {torch.float32}
    assert torch.equal(loss, expected)
    for name, gradient in of_uncast.items():
        assert torch.equal(gradients[name], gradient), name
