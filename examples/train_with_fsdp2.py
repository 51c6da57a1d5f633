"""A plain FSDP2 training loop around an NSA model, without our trainer: two ranks compute the losses of one.

pip install nsa-attention

    python train_with_fsdp2.py                               one process
    torchrun --nproc-per-node 2 train_with_fsdp2.py          each block sharded over two: the same losses
"""

import os
import pydoc_data.topics

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from nsa import NSATransformer

LENGTH, BATCH, STEPS = 256, 4, 10


def build_model(device: torch.device) -> NSATransformer:
    torch.manual_seed(0)  # the same weights on every rank
    blocks = dict(l=16, d=8, l_sel=32, n_sel=4, w=64)  # for rows of 256 bytes; leave out in long rows
    return NSATransformer(256, dim=64, n_layers=2, n_heads=4, n_kv_groups=2, d_k=16, d_v=16, **blocks).to(device)


def shard(model: NSATransformer) -> None:
    # In bf16: MixedPrecisionPolicy(torch.bfloat16, torch.float32) as mp_policy of each call.
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    register_fsdp_forward_method(model, "loss")  # the loss of a chunk of tokens at a time; `forward` returns logits


def batches(rank: int, world: int) -> torch.Tensor:
    """This rank's rows of every step: [steps, rows, tokens]."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: STEPS * BATCH * (LENGTH + 1)].view(STEPS, BATCH, LENGTH + 1)[:, rank::world]


def main() -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    model = build_model(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, tokens in enumerate(batches(rank, world).to(device), 1):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()  # FSDP2 averages the gradients; all ranks have equally many labels
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        if world > 1:
            norm = norm.full_tensor()
            dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step:2d}   loss {mean.item():.5f}   gradient norm {norm.item():.4f}", flush=True)
    if rank == 0:
        own_weights = sum(p.to_local().numel() if world > 1 else p.numel() for p in model.parameters())
        print(f"rank 0 holds {own_weights:,} of {sum(p.numel() for p in model.parameters()):,} weights")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
