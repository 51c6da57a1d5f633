"""Training step benchmark: one optimizer step of the 125M configuration, with NSA and with dense attention.

Both in one process on the same tokens: forward, loss, backward, clip, AdamW, as `nsa train` does them (bf16 is
autocast over fp32 weights). The dense layer has the same queries, one set of keys and values per group, RoPE, SDPA.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa.bench.case import BenchCase, BenchTask
from nsa.bench.correctness import CorrectnessCheck, short_length
from nsa.bench.implementations import DENSE, BenchImplementation
from nsa.bench.machine import clock_of
from nsa.bench.measurement import BenchMeasurement, ImplementationResult, Log, finish
from nsa.bench.roofline import BACKWARD_FACTOR
from nsa.bench.shapes import BenchShape
from nsa.bench.timing import interleave
from nsa.core.init import init_weights
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import Positions
from nsa.core.rope import rotate
from nsa.kernels import reference
from nsa.kernels.registry import BackendRequest
from nsa.model.transformer import NSATransformer

VOCABULARY, DIM, LAYERS = 32_768, 768, 12
GRADIENT_LIMIT = {"fp32": 1e-3, "bf16": 5e-2}

Attend = Callable[[Tensor, Tensor, Tensor, BenchShape], Tensor]


def sdpa(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, shape: BenchShape) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGV))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def plain(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, shape: BenchShape) -> Tensor:
    """Dense attention by the reference: a sliding window over the whole row."""
    pos_BS = torch.arange(q_BSHK.shape[1], device=q_BSHK.device).expand(q_BSHK.shape[0], -1)
    q_BSGRK = q_BSHK.unflatten(2, (shape.n_kv_groups, -1))
    everything = replace(shape.geometry, w=q_BSHK.shape[1])
    out = reference.sliding_attention(
        q_BSGRK, k_BSGK, v_BSGV, pos_BS, torch.zeros_like(pos_BS), geometry=everything, scale=shape.d_k**-0.5
    )
    assert isinstance(out, Tensor)
    return out.flatten(2, 3)


class DenseBenchLayer(nn.Module):
    """A grouped-query attention layer: w_q, one w_k and w_v, RoPE, causal attention, w_out."""

    def __init__(self, nsa: NSAAttention, shape: BenchShape, attend: Attend) -> None:
        super().__init__()
        s = shape
        self.shape, self.attend, self.locate, self.rotary = s, attend, nsa.locate, nsa.rotary
        self.w_q = nn.Linear(nsa.dim, s.n_heads * s.d_k, bias=False)
        self.w_k = nn.Linear(nsa.dim, s.n_kv_groups * s.d_k, bias=False)
        self.w_v = nn.Linear(nsa.dim, s.n_kv_groups * s.d_v, bias=False)
        self.w_out = nn.Linear(s.n_heads * s.d_v, nsa.dim, bias=False)
        init_weights(self)

    def forward(self, x_BSD: Tensor, *, where: Positions, **unused: Any) -> Tensor:
        s = self.shape
        q_BSHK = rotate(self.w_q(x_BSD).unflatten(-1, (s.n_heads, 1, s.d_k)), where.tables).squeeze(3)
        k_BSGK = rotate(self.w_k(x_BSD).unflatten(-1, (s.n_kv_groups, s.d_k)), where.tables)
        v_BSGV = self.w_v(x_BSD).unflatten(-1, (s.n_kv_groups, s.d_v))
        return self.w_out(self.attend(q_BSHK, k_BSGK, v_BSGV, s).flatten(2))


def build(shape: BenchShape, n_layers: int, dim: int, vocabulary: int, kernels: str | Attend) -> NSATransformer:
    """The model with a backend's kernels, or dense with the function given; the same random seed for both."""
    torch.manual_seed(0)
    s, g = shape, shape.geometry
    model = NSATransformer(
        vocabulary, dim, n_layers, n_heads=s.n_heads, n_kv_groups=s.n_kv_groups, d_k=s.d_k, d_v=s.d_v, l=g.l, d=g.d,
        l_sel=g.l_sel, n_sel=g.n_sel, w=g.w, kernels=BackendRequest(*[kernels] * 4) if isinstance(kernels,
        str) else BackendRequest(),
    )  # fmt: skip
    if not isinstance(kernels, str):
        for block in model.blocks:
            block.attention = DenseBenchLayer(block.attention, s, kernels)  # type: ignore[arg-type]
    return model


class TrainStep:
    """A callable that does one training step on fixed tokens."""

    def __init__(self, model: NSATransformer, length: int, dtype: str, device: str = "cpu") -> None:
        self.model, self.dtype, self.device = model.to(device), dtype, torch.device(device)
        generator = torch.Generator().manual_seed(1)
        vocabulary = model.embeddings.num_embeddings
        self.tokens_BS, self.labels_BS = (
            torch.randint(vocabulary, (1, length), generator=generator).to(device) for _ in range(2)
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.dtype == "bf16" else nullcontext()

    def gradients(self) -> dict[str, Tensor]:
        with self._arithmetic():
            loss = self.model.loss(self.tokens_BS, self.labels_BS)
        loss.backward()
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def __call__(self) -> None:
        self.gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def check_step(
    shape: BenchShape, kernels: str | Attend, truth: str | Attend, dtype: str, dim: int, device: str = "cpu"
) -> CorrectnessCheck:
    """Gradients of every weight of a one-layer model on a short row, against the reference's in fp32.

    Not against its gradients in bf16: there the reference itself differs, on small models by more than the limit,
    so twice its own error is allowed too.
    """
    length = short_length(BenchCase(shape, 1, torch.float32))
    want, plain_got, got = (
        TrainStep(build(shape, 1, dim, 257, which), length, arithmetic, device).gradients()
        for which, arithmetic in ((truth, "fp32"), (truth, dtype), (kernels, dtype))
    )
    assert got.keys() == want.keys()
    scale = max(g.norm() for g in want.values())

    def off(found: dict[str, Tensor]) -> dict[str, float]:
        return {
            name: ((found[name] - g).norm() / g.norm().clamp(min=1e-3 * scale)).nan_to_num(nan=torch.inf).item()
            for name, g in want.items()
        }

    errors, plain_errors, limit = off(got), off(plain_got), GRADIENT_LIMIT[dtype]
    wrong = [
        f"the gradient of {name} by {error:.2g}"
        for name, error in errors.items()
        if not error <= max(limit, 2 * plain_errors[name])
    ]
    reason = f"differs from the reference: {', '.join(wrong[:3])} (at most {limit:g})" if wrong else ""
    return CorrectnessCheck(not wrong, errors, limit, f"all gradients of one layer on {length} tokens", reason)


def measure_train(
    task: BenchTask,
    implementations: list[BenchImplementation],
    *,
    threads: int,
    budget_s: float,
    log: Log,
    n_layers: int = LAYERS,
    dim: int = DIM,
    vocabulary: int = VOCABULARY,
) -> BenchMeasurement:
    entries, steps = {}, {}
    for implementation in implementations:
        kernels = sdpa if implementation.name == DENSE else implementation.name
        if implementation.kind == "other" or "decode" not in implementation.make:
            continue
        if reason := implementation.refusal(replace(task, op="attention")):
            entries[implementation.name] = ImplementationResult(implementation.name, implementation.kind, absent=reason)
            continue
        log(f"checking {implementation.name}")
        truth = plain if implementation.name == DENSE else "reference"
        agreement = check_step(task.shape, kernels, truth, task.dtype, dim, task.device)
        entries[implementation.name] = ImplementationResult(
            implementation.name, implementation.kind, agreement=agreement
        )
        model = build(task.shape, n_layers, dim, vocabulary, kernels)
        steps[implementation.name] = TrainStep(model, task.length, task.dtype, task.device)
        log(f"warming up {implementation.name}")
        steps[implementation.name]()
    log(f"timing {', '.join(steps)}")
    samples = interleave(steps, budget_s=budget_s, now=clock_of(torch.device(task.device)))
    nsa = build_meta(task.shape, n_layers, dim, vocabulary)
    dense_flops, nsa_flops = step_flops(nsa, task, dense=True), step_flops(nsa, task, dense=False)
    finished = [finish(entry, samples, entries, task, None) for entry in entries.values()]
    return BenchMeasurement(task, "random tokens", threads, "FLOPs", dense_flops / nsa_flops, finished)


def build_meta(shape: BenchShape, n_layers: int, dim: int, vocabulary: int) -> NSATransformer:
    with torch.device("meta"):
        return build(shape, n_layers, dim, vocabulary, "portable")


def step_flops(model: NSATransformer, task: BenchTask, *, dense: bool) -> float:
    """Least FLOPs per token of a step: 6 per weight, attention forward and backward; selection reuses scores."""
    s, n = task.shape, task.length
    reads = n * (n + 1) / 2 if dense else sum(s.geometry.total_reads(n).values())
    attention = 2 * s.n_heads * (s.d_k + s.d_v) * reads / n * (1 + BACKWARD_FACTOR)
    weights = model.lm_head.w_out.weight.numel()
    for block in model.blocks:
        weights += sum(p.numel() for p in block.parameters())
        if dense:  # one set of keys and values instead of three
            weights -= (block.attention.w_k.weight.numel() + block.attention.w_v.weight.numel()) * 2 // 3  # type: ignore
    return 6.0 * weights + len(model.blocks) * attention
