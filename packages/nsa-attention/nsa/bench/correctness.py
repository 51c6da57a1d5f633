"""Correctness check that must pass before `nsa bench` prints a speed-up.

Outputs and gradients are compared with the reference in fp64 on the tensors that are timed. Up to a few blocks more
than selection needs to matter, all queries and gradients are checked. Beyond, the reference would not fit into memory:
a short case of the same shape and dtype is checked completely, and of the long one some query rows, which the reference
computes exactly. The last rows are among them: keys that only they see get gradients from them alone, so those
gradients are checked at full length too.

B batch · S queries · C compressed blocks · G kv groups · N chosen blocks
"""

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from nsa.bench.case import BenchCase, BenchRunner, BenchTask, Results
from nsa.bench.implementations import BenchImplementation
from nsa.bench.nsa_backends import compressed_by_phi
from nsa.check.comparison import ROW_LIMITS, blocks_error, worst_row_error
from nsa.core.branches import BRANCH_ORDER
from nsa.geometry import Geometry
from nsa.kernels import reference

_TAIL_ROWS, _SCATTERED_ROWS = 24, 8
_DECODE_STEPS = 20  # more than a compression stride, so that a block is completed on the way


@dataclass(frozen=True)
class CorrectnessCheck:
    agrees: bool
    errors: dict[str, float] = field(default_factory=dict)
    """Relative error of the worst row: output, each gradient, scores of the chosen blocks."""
    limit: float = 0.0
    checked: str = ""
    reason: str = ""
    """Why it does not agree; empty if it does."""

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=0.0)


def check_correctness(
    implementation: BenchImplementation, task: BenchTask, case: BenchCase, runner: BenchRunner
) -> CorrectnessCheck:
    """Run the implementation once, which also warms it up, and compare."""
    if implementation.kind == "other":
        runner.results(task.backward)
        return CorrectnessCheck(False, reason=implementation.differs)
    errors_of, short = partial(_errors, implementation.kind), short_length(case)
    if task.op == "decode":
        steps = min(_DECODE_STEPS, case.length - task.length)
        out = torch.cat([runner.results(False)["out"] for _ in range(steps)], 1)
        errors = errors_of(task, case, runner, {"out": out}, torch.arange(task.length, task.length + steps))
        checked = f"{steps} steps after {task.length} tokens, exactly"
    elif case.length <= short:
        errors = errors_of(task, case, runner, runner.results(task.backward), torch.arange(case.length))
        checked = f"all {case.length} queries"
    else:
        short_case = BenchCase(case.shape, short, case.dtype, case.data, device=case.device)
        short_task = replace(task, length=short)
        short_runner = implementation.make[task.op](short_case, short_task)
        results = short_runner.results(task.backward)
        errors = errors_of(short_task, short_case, short_runner, results, torch.arange(short))
        rows = _sampled_rows(case.length)
        at_length = errors_of(task, case, runner, runner.results(task.backward), rows)
        errors = {name: max(errors[name], at_length[name]) for name in errors}
        checked = f"all {short} queries of a short case and {len(rows)} of {case.length}"
    limit = ROW_LIMITS[case.dtype]
    wrong = [f"{name} by {error:.2g}" for name, error in errors.items() if not error <= limit]
    reason = f"differs from the reference: {', '.join(wrong)} (at most {limit:g})" if wrong else ""
    return CorrectnessCheck(not wrong, errors, limit, checked, reason)


def short_length(case: BenchCase) -> int:
    """Long enough that some queries choose among blocks, the window is full, and the last block is partial."""
    g = case.shape.geometry
    return g.n_sel * g.l_sel + g.w + g.l_sel + 1


def _sampled_rows(length: int) -> Tensor:
    begin = length - _TAIL_ROWS
    scattered = torch.randperm(begin, generator=torch.Generator().manual_seed(length))[:_SCATTERED_ROWS]
    return torch.cat((scattered.sort().values, torch.arange(begin, length)))


def _errors(
    kind: str, task: BenchTask, case: BenchCase, runner: BenchRunner, got: Results, rows: Tensor
) -> dict[str, float]:
    """Error of each result. A decoded output holds the rows alone."""
    errors = {}
    compressed = compressed_by_phi(case) if task.op in ("prefill", "decode") else (case.k_BCGK, case.v_BCGV)
    idx_BSGN = runner.chosen(rows) if runner.chosen else None
    if task.part == "select" and kind == "nsa":
        return {"blocks": _choice_error(case, compressed[0], rows, got["out"][:, rows])}
    if idx_BSGN is not None:
        errors["blocks"] = _choice_error(case, compressed[0], rows, idx_BSGN)
    want = _exact(case, kind, task.part, rows, idx_BSGN, compressed)
    # The first key that only the checked rows can see; 0 where every query is checked.
    seen_from = 0 if len(rows) == case.length else case.length - _TAIL_ROWS
    first_block = max(0, -(-(seen_from - case.shape.geometry.l + 1) // case.shape.geometry.d))
    for name, x in got.items():
        if name in ("out", "q", "gates"):
            errors[name] = worst_row_error(x if x.shape[1] == len(rows) else x[:, rows], want[name])
        else:
            begin = first_block if name.endswith("cmp") else seen_from
            errors[name] = worst_row_error(x[:, begin:], want[name][:, begin:])
    return errors


def _exact(
    case: BenchCase, kind: str, part: str, rows: Tensor, idx_BSGN: Tensor | None, compressed: tuple[Tensor, Tensor]
) -> Results:
    """Output and all gradients of these query rows by the reference, in fp64 on the CPU, one group after the other."""
    inputs = case.inputs() | {"k_cmp": compressed[0], "v_cmp": compressed[1]}
    by_group = []
    for group in range(case.shape.n_kv_groups):
        here = slice(group, group + 1)
        leaves = {
            name: (x[:, rows] if name in ("q", "gates") else x)[:, :, here].cpu().double().requires_grad_()
            for name, x in inputs.items()
        }
        chosen = idx_BSGN[:, :, here].cpu() if idx_BSGN is not None else None
        out = _reference(case, kind, part, leaves, rows, chosen)
        gradients = torch.autograd.grad(
            out, tuple(leaves.values()), case.dout_BSGRV[:, rows][:, :, here].cpu().double(), materialize_grads=True
        )
        by_group.append({"out": out.detach(), **dict(zip(leaves, gradients, strict=True))})
    return {name: torch.cat([results[name] for results in by_group], 2) for name in by_group[0]}


def _reference(
    case: BenchCase, kind: str, part: str, x: dict[str, Tensor], rows: Tensor, idx_BSGN: Tensor | None
) -> Tensor:
    g, scale, pos_BS, zero_BS = case.shape.geometry, case.scale, rows[None], torch.zeros_like(rows)[None]

    def sliding(k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
        return reference.sliding_attention(x["q"], k, v, pos_BS, zero_BS, geometry=geometry, scale=scale)  # type: ignore[return-value]

    if kind == "dense":
        return sliding(x["k_sel"], x["v_sel"], replace(g, w=case.length))
    branches = {
        "compressed": lambda: reference.compressed_attention(
            x["q"], x["k_cmp"], x["v_cmp"], pos_BS, zero_BS, geometry=g, scale=scale
        ),
        "selected": lambda: reference.selected_attention(
            x["q"], x["k_sel"], x["v_sel"], idx_BSGN, pos_BS, zero_BS, geometry=g, scale=scale  # type: ignore[arg-type]
        ),
        "sliding": lambda: sliding(x["k_win"], x["v_win"], g),
    }  # fmt: skip
    if part != "all":
        return branches[part]()  # type: ignore[return-value]
    gates = x["gates"].unbind(-1)
    return sum(gate[..., None] * branches[name]() for gate, name in zip(gates, BRANCH_ORDER, strict=True))  # type: ignore


def _choice_error(case: BenchCase, k_BCGK: Tensor, rows: Tensor, idx_BSGN: Tensor) -> float:
    """Return how much worse the worst query's blocks score than the reference's choice, relative; 0 if all are the
    same."""
    pos_BS = rows[None]
    g, zero_BS = case.shape.geometry, torch.zeros_like(pos_BS)
    return blocks_error(case.q_BSGRK[:, rows], k_BCGK, pos_BS, zero_BS, idx_BSGN, g, case.scale).max().item()
