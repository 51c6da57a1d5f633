"""Program that runs the cases of `context_cases`: NSA layers divided among ranks beside the same layers on one rank.

Reads {number of ranks: {name: case}} as JSON from stdin, forks the ranks of each number in turn, and prints for each
case what `compare` found, the largest over the ranks.
"""

import json
import os
import sys
import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from nsa.core.positions import Positions
from nsa.core.probe import Probe
from nsa_train.train.engine.mixer import NSAMixer, NSAMixerConfig
from nsa_train.train.parallel.context_parallel import _own_positions, context_group, own_tokens
from tests.nsa_train.train.parallel.context_cases import ContextCase

DIM = 24
SIZES = dict(n_heads=4, n_kv_groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=8, n_sel=4, w=13)
STEP = 3  # of the sampling


class _BlockProbe(Probe):
    """Keeps the chosen blocks."""

    blocks: Tensor | None = None

    def record_selection(self, q_BSGRK: Tensor, idx_BSGN: Tensor, *_: Any) -> None:
        self.blocks = idx_BSGN


@dataclass
class _Result:
    out: Tensor
    dx: Tensor
    blocks: Tensor | None
    gradients: dict[str, Tensor]
    figures: dict[str, Tensor]


def _layer(case: ContextCase) -> NSAMixer:
    torch.manual_seed(0)
    options = {**SIZES, **case.layer}
    kind, kernels = options.pop("kind", "nsa"), options.pop("kernels", {})
    layer = NSAMixerConfig(options, kind, kernels).build(DIM, layer_idx=0, n_layers=1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    layer.layer.selector_step = STEP
    return layer.to(getattr(torch, case.dtype)).train()


def _inputs(case: ContextCase) -> tuple[Tensor, Tensor]:
    """Hidden states and the gradient of the output; packed rows laid end to end."""
    generator = torch.Generator().manual_seed(1)
    shape = (case.batch, case.length, DIM) if case.documents is None else (1, case.batch * case.length, DIM)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.to(getattr(torch, case.dtype)), weight.to(getattr(torch, case.dtype))


def _run(case: ContextCase, layer: NSAMixer, x: Tensor, weight: Tensor, positions: Positions) -> _Result:
    x = x.clone().requires_grad_()
    layer.layer.probe = probe = _BlockProbe()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if case.compiled else layer
    if case.checkpointed:
        out = torch.utils.checkpoint.checkpoint(run, x, positions=positions, use_reentrant=False)
    else:
        out = run(x, positions=positions)
    (out * weight).sum().backward()
    assert x.grad is not None
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return _Result(out.detach(), x.grad, probe.blocks, gradients, probe.figures)


def compare(case: ContextCase, ranks: int, rank: int) -> dict[str, float]:
    """Differences relative to the largest value of one rank, and the share of queries that chose other blocks."""
    whole, divided = _layer(case), _layer(case)
    x, weight = _inputs(case)
    cu = None if case.documents is None else torch.tensor(case.documents, dtype=torch.int32)
    eager = replace(case, compiled=False, checkpointed=False)
    alone = _run(eager, whole, x, weight, whole.layer.locate(x, cu_doc_lens=cu))

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    styles = {"ring": object()} if case.zigzag else {"uly": object()}
    divided.apply_cp(mesh, **styles)
    context = context_group(mesh, zigzag=case.zigzag)
    shape = (case.batch, case.length) if cu is None else x.shape[:2]
    wide = torch.promote_types(x.dtype, torch.float32)
    where = _own_positions(context, divided.layer, shape, cu, own_tokens(context.split, x), wide)

    def mine(whole_BTx: Tensor) -> Tensor:
        return own_tokens(context.split, whole_BTx)

    # As the engine does: every rank's loss is multiplied by their number, and gradients of weights are averaged.
    ours = _run(case, divided, mine(x), mine(weight) * ranks, where)
    errors = {
        "out": _error(ours.out, mine(alone.out), alone.out),
        "dx": _error(ours.dx / ranks, mine(alone.dx), alone.dx),
    }
    errors["flips"] = 0.0
    if alone.blocks is not None and ours.blocks is not None:
        errors["flips"] = (ours.blocks != mine(alone.blocks)).any(-1).double().mean().item()
    errors["missing"] = float(alone.gradients.keys() != ours.gradients.keys())
    for name, gradient in alone.gradients.items():
        mean = ours.gradients[name].clone()
        dist.all_reduce(mean)
        errors["weights"] = max(errors.get("weights", 0.0), _error(mean / ranks, gradient, gradient))
    for name in ("reads_pred", "reads_act_total"):
        total = ours.figures[name].double().clone()
        dist.all_reduce(total)
        errors[name] = abs(total.item() - alone.figures[name].item())
    return errors


def _error(ours: Tensor, theirs: Tensor, scale: Tensor) -> float:
    return ((ours - theirs).abs().max() / scale.abs().max()).item()


def _serve(rendezvous: str, ranks: int, rank: int, cases: dict[str, ContextCase], writing: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    results = {}
    for name, case in cases.items():
        errors = compare(case, ranks, rank)
        worst = torch.tensor([errors[key] for key in sorted(errors)], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        results[name] = dict(zip(sorted(errors), worst.tolist(), strict=True))
    if rank == 0:
        os.write(writing, json.dumps(results).encode())
    dist.destroy_process_group()


def _fork(rendezvous: str, ranks: int, cases: dict[str, ContextCase]) -> dict[str, dict[str, float]]:
    reading, writing = os.pipe()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            try:
                _serve(rendezvous, ranks, rank, cases, writing)
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    os.close(writing)
    with os.fdopen(reading) as results:
        text = results.read()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"{ranks} ranks ended with {codes}")
    errors: dict[str, dict[str, float]] = json.loads(text)
    return errors


def main(rendezvous: str) -> None:
    fields_by_ranks = json.load(sys.stdin)
    results = {}
    for ranks, cases in fields_by_ranks.items():
        own_cases = {name: ContextCase(**case) for name, case in cases.items()}
        results[ranks] = _fork(f"{rendezvous}_{ranks}", int(ranks), own_cases)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
