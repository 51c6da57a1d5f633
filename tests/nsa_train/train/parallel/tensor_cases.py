"""Tensor-parallel training steps for tests: one process forks the ranks of a group once, and they run all cases.

As a program: `python -m tests.nsa_train.train.parallel.tensor_cases FOLDER NAME…` runs the named cases on WORLD
ranks each and on one process, and writes what each gave to FOLDER.
"""

import datetime
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.distributed import parallel as engine_parallel
from torch import Tensor
from torch.distributed.tensor import DTensor

from nsa_train.config.schema import RunConfig
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.build import build_train_module
from nsa_train.train.engine.train_module import StepSkippingTrainModule
from tests.attention_options import GATES_PER, KV_PROJECTIONS, PHIS, PHIS_WITH_POS_EMB

ROWS, SEQ_LEN, VOCAB = 2, 64, 97
CPU = torch.device("cpu")
MODEL = dict(dim=32, n_layers=2, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, vocab_size=VOCAB)
BLOCKS = dict(l=8, d=4, l_sel=8, n_sel=3, w=8)


@dataclass(frozen=True)
class TensorCase:
    """One model and its parallelism."""

    model: dict[str, Any] = field(default_factory=dict)
    nsa: dict[str, Any] = field(default_factory=dict)
    runtime: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    packed: bool = True
    steps: int = 2
    world: int = 2

    def config(self, tp: int) -> RunConfig:
        return RunConfig.model_validate(
            {
                "model": MODEL | self.model,
                "nsa": BLOCKS | self.nsa,
                "runtime": dict(device="cpu", precision="fp32") | self.runtime,
                "parallel": dict(data="fsdp", tp=tp) | self.parallel,
                "train": dict(seq_len=SEQ_LEN, batch_size=ROWS, steps=self.steps, lr=3e-3, warmup_steps=0),
                "data": dict(dataset="synthetic"),
            }
        )


EVERYTHING = dict(qk_norm=True, qkv_bias=True, attention_out_bias=True)
FAST = {
    "tp": TensorCase(nsa=dict(phi="softmax"), steps=8),
    "fsdp": TensorCase(EVERYTHING, dict(phi="mlp", phi_pos_emb=True, kv="per_branch"), world=4),
    "kinds": TensorCase(dict(attention="dense,nsa,window,global", n_layers=4, tie_embeddings=True), packed=False),
    "merged": TensorCase(dict(attention="merged"), dict(selector_loss=1.0)),
    "families": TensorCase(
        dict(post_norm=True, ffn_bias=True, rotary_dim=4, rope_layers="scaled,none", attention="window,nsa", window=5)
    ),
    "checkpointed": TensorCase(
        dict(qk_norm=True),
        dict(phi="linear", kv="per_branch", gate_per="group", selector_loss=1.0),
        dict(gradient_checkpointing="full"),
    ),
}
SLOW = {
    "many steps": TensorCase(nsa=dict(phi="softmax"), steps=20),
    "all blocks": TensorCase(dict(attention="merged"), dict(selector_loss=1.0, selector_blocks="all")),
    **{f"phi_{phi}": TensorCase(nsa=dict(phi=phi)) for phi in PHIS},
    **{f"pos_emb_{phi}": TensorCase(nsa=dict(phi=phi, phi_pos_emb=True), world=4) for phi in PHIS_WITH_POS_EMB},
    **{f"kv_{kv}": TensorCase(nsa=dict(kv=kv)) for kv in KV_PROJECTIONS},
    **{f"gate_{per}": TensorCase(nsa=dict(gate="sigmoid", gate_per=per)) for per in GATES_PER},
    "options": TensorCase(EVERYTHING, dict(kv="per_branch", rope_compressed="after")),
    "selector": TensorCase(EVERYTHING, dict(selector_loss=2.0, kv="per_branch")),
    "selective": TensorCase(runtime=dict(gradient_checkpointing="selective"), world=4),
    "tied_fsdp": TensorCase(dict(tie_embeddings=True), world=4, steps=20),
    "hsdp": TensorCase(parallel=dict(data="hsdp", shard_ranks=2), world=4),
    "compiled": TensorCase(runtime=dict(compile="on")),
    "compiled_selective": TensorCase(
        EVERYTHING, dict(phi="mlp"), dict(compile="on", gradient_checkpointing="selective"), world=4
    ),
}
CASES = FAST | SLOW


def batch_of(case: TensorCase, step: int) -> dict[str, Any]:
    """Two rows with the same number of labels, each of two documents whose border lies elsewhere every step."""
    tokens = torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(step))
    labels = tokens.roll(-1, 1)
    labels[:, [3 + step % 5, -1]] = -100
    batch: dict[str, Any] = {"input_ids": tokens, "labels": labels}
    if case.packed:
        cut = 9 + step % 11
        doc_lens = torch.tensor([[cut, SEQ_LEN - cut], [SEQ_LEN - cut, cut]], dtype=torch.int32)
        batch |= {"doc_lens": doc_lens, "max_doc_lens": doc_lens.amax(1).tolist()}
    return batch


def own_rows(batch: dict[str, Any], ranks: RankInfo) -> dict[str, Any]:
    each = ROWS // ranks.data_world
    return {name: value[ranks.data_rank * each :][:each] for name, value in batch.items()}


def run_case(case: TensorCase, ranks: RankInfo) -> dict[str, Any]:
    """Losses, norms, first gradients and last weights of some steps, whole; loss and hits of an evaluation."""
    torch._dynamo.reset()
    engine_parallel._WORLD_MESH = None  # the engine makes one per process
    config = case.config(tp=2 if ranks.distributed else 1)
    ranks = ranks.divided(config.parallel)
    module = build_train_module(config, VOCAB, ranks, CPU)
    record: dict[str, Any] = {"initial": whole(dict(module.model.named_parameters())), "steps": []}
    record["flops"] = module.model.num_flops_per_token(SEQ_LEN)
    for step in range(case.steps):
        batch = own_rows(batch_of(case, step), ranks)
        record["steps"].append(train_step(module, batch, record))
    record["weights"] = whole(dict(module.model.named_parameters()))
    sums = module.score_batch(own_rows(batch_of(case, case.steps), ranks))
    record["scores"] = torch.stack([value.double() for value in sums])
    if ranks.distributed:
        dist.all_reduce(record["scores"])
    return record


def train_step(module: StepSkippingTrainModule, batch: dict[str, Any], record: dict[str, Any]) -> tuple[float, float]:
    """Train as `train_batch` and `optim_step` do; returns the loss averaged over ranks and the gradient norm."""
    counted = (batch["labels"] != -100).sum()
    output = module.model_forward(**batch, loss_reduction="sum", loss_div_factor=counted, return_logits=False)
    output.loss.backward()
    if "gradients" not in record:
        record["gradients"] = whole({name: p.grad for name, p in module.model.named_parameters()})
    norm = float(module.clip_gradients(1.0))
    module.optim.step()
    module.zero_grads()
    loss = output.ce_loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return float(loss), norm


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace("_checkpoint_wrapped_module.", ""): (
            tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        ).detach().clone()
        for name, tensor in tensors.items()
    }  # fmt: skip


def _rank(rank: int, world: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting{world}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
    ranks = RankInfo(rank=rank, world=world, local_rank=rank, local_world=world, distributed=True)
    for name in names:
        record = run_case(CASES[name], ranks)
        if rank == 0:
            torch.save(record, folder / f"{name}.divided")
    dist.destroy_process_group()


def main(folder: Path, names: list[str]) -> int:
    children = []
    for world in sorted({CASES[name].world for name in names}):
        of_world = [name for name in names if CASES[name].world == world]
        for rank in range(world):
            if child := os.fork():
                children.append(child)
                continue
            code = 1
            try:
                _rank(rank, world, folder, of_world)
                code = 0
            except BaseException:  # noqa: BLE001 - a forked rank must not run the code of its parent
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
    torch.set_num_threads(1)
    for name in names:
        torch.save(run_case(CASES[name], RankInfo()), folder / f"{name}.alone")
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
