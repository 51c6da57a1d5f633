"""Memory of context parallelism on this machine's CPU: a long row on one rank, and divided among several.

    python -m tools.bench_context_parallel                  # 32k and 64k tokens on 1 and 4 ranks
    python -m tools.bench_context_parallel --step 262144    # one whole training step on 4 ranks

Every rank is a process (gloo). Peak is what torch's allocator has given out at once in one forward and backward pass,
above what existed before it: activations, exchanged keys, temporary memory, and the gradients of a small model. It
counts bytes, so that a busy machine does not change it; the seconds depend on the machine and its load.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from nsa.options import CHECKPOINTING
from nsa_train.config.schema import RunConfig
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.build import build_train_module
from nsa_train.train.engine.train_module import StepSkippingTrainModule

VOCAB = 512
MODEL = dict(dim=192, n_layers=2, n_heads=4, n_kv_groups=1, d_k=32, d_v=32)
BLOCKS = dict(l=64, d=64, l_sel=64, n_sel=16, w=512)
"""A long stride: at 256k tokens the compressed branch would otherwise take most of the time."""


@dataclass
class RowCase:
    tokens: int
    ranks: int
    checkpointing: str
    split: str
    whole_step: bool = False


@dataclass
class RankFigures:
    peak_bytes: int
    resident_bytes: int
    """Largest resident memory of the process."""
    seconds: float
    loss: float


def run_config(case: RowCase) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {**MODEL, "vocab_size": VOCAB},
            "nsa": BLOCKS,
            "runtime": {"device": "cpu", "precision": "fp32", "gradient_checkpointing": case.checkpointing},
            "train": {"seq_len": case.tokens, "batch_size": 1, "steps": 1},
            "parallel": {"data": "fsdp", "cp": case.ranks, "cp_split": case.split},
            "data": {"dataset": "synthetic"},
        }
    )


def measure(case: RowCase, rank: int) -> RankFigures:
    """One pass over a row of random tokens, or a whole step."""
    torch.set_num_threads(1)
    config = run_config(case)
    info = RankInfo(rank, case.ranks, rank, case.ranks, distributed=case.ranks > 1).divided(config.parallel)
    module = build_train_module(config, VOCAB, info, torch.device("cpu"))
    tokens = torch.randint(VOCAB, (1, case.tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens.roll(-1, 1)}
    began = time.perf_counter()
    if case.whole_step:
        loss, peak = _step(module, batch), 0
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as heard:
            loss = module.forward_backward(batch)
        peak = _peak(heard)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return RankFigures(peak, resident, time.perf_counter() - began, loss)


def _step(module: StepSkippingTrainModule, batch: dict[str, torch.Tensor]) -> float:
    loss = module.forward_backward(batch)
    module.clip_gradients(1.0)
    module.optim.step()
    return loss


def _peak(heard: profile) -> int:
    results: Any = heard.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def run(case: RowCase) -> list[RankFigures]:
    """Figures of every rank, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(case.ranks):
            child = os.fork()
            if not child:
                try:
                    if case.ranks > 1:
                        address = f"file://{folder}/rendezvous"
                        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=case.ranks)
                    figures = measure(case, rank)
                    Path(folder, f"{rank}.json").write_text(json.dumps(asdict(figures)))
                    os._exit(0)
                finally:
                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"{case}: ranks ended with {codes}")
        return [RankFigures(**json.loads(Path(folder, f"{rank}.json").read_text())) for rank in range(case.ranks)]


def memory_table(tokens: list[int], ranks: int, split: str) -> None:
    print(f"| tokens | checkpointing | 1 rank, MiB | {ranks} ranks, MiB each | ratio | seconds |")
    print("|---|---|---|---|---|---|", flush=True)
    for n in tokens:
        for mode in CHECKPOINTING:
            (alone,) = run(RowCase(n, 1, mode, split))
            divided = run(RowCase(n, ranks, mode, split))
            worst = max(figures.peak_bytes for figures in divided)
            sizes = f"{alone.peak_bytes / 2**20:.1f} | {worst / 2**20:.1f} | {worst / alone.peak_bytes:.3f}"
            print(f"| {n} | {mode} | {sizes} | {alone.seconds:.0f}, {divided[0].seconds:.0f} |", flush=True)


def whole_step(tokens: int, ranks: int, split: str) -> None:
    divided = run(RowCase(tokens, ranks, "full", split, whole_step=True))
    resident = max(figures.resident_bytes for figures in divided) / 2**30
    loss = sum(figures.loss for figures in divided) / ranks
    what = f"{tokens} tokens on {ranks} ranks ({split}): forward, backward and AdamW"
    print(f"{what} in {divided[0].seconds:.0f} s, loss {loss:.4f}, at most {resident:.2f} GiB resident per rank")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--split", choices=("zigzag", "contiguous"), default="zigzag")
    parser.add_argument("--step", type=int, help="tokens of one whole training step, in place of the table")
    arguments = parser.parse_args()
    if arguments.step:
        whole_step(arguments.step, arguments.ranks, arguments.split)
    else:
        memory_table(arguments.tokens, arguments.ranks, arguments.split)


if __name__ == "__main__":
    main()
