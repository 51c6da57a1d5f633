"""Training step benchmark: one optimizer step of the 125M configuration, with NSA and with dense attention.

Both in one process on the same tokens: forward, loss, backward, clip, AdamW, as `nsa train` does them (bf16 is
autocast over fp32 weights). The dense model has the same queries, one set of keys and values per group, RoPE, SDPA.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.bench.case import BenchCase, BenchShape, BenchTask
from nsa.bench.correctness import CorrectnessCheck, short_length
from nsa.bench.implementations import DENSE, BenchImplementation
from nsa.bench.machine import clock_of, interleave
from nsa.bench.measurement import BenchMeasurement, ImplementationResult, Log, finish
from nsa.bench.roofline import BACKWARD_FACTOR
from nsa.core.branches import AttendedKeys, BranchesOutput
from nsa.core.layer_kinds import AllTokens
from nsa.core.probe import attention_layers
from nsa.kernels.registry import KernelPlan
from nsa.model.transformer import NSATransformer

_VOCABULARY, DIM, LAYERS = 32_768, 768, 12
_GRADIENT_LIMIT = {"fp32": 1e-3, "bf16": 5e-2}


class _TorchAttention(AllTokens):
    """Dense attention by PyTorch, also where our kernels are faster."""

    def attend(
        self, run: KernelPlan, q_BSGRK: Tensor, gates_BSGR3: Tensor | None, keys: AttendedKeys
    ) -> BranchesOutput:
        q, k, v = (x.transpose(1, 2) for x in (q_BSGRK.flatten(2, 3), *keys[2][:2]))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.options["scale"], enable_gqa=True)
        return BranchesOutput(out.transpose(1, 2).unflatten(2, q_BSGRK.shape[2:4]), None, ())


def _build(
    shape: BenchShape, n_layers: int, dim: int, vocabulary: int, kernels: str, *, dense: bool = False
) -> NSATransformer:
    """The model with a backend's kernels; the same random seed for all. dense: kernels may be DENSE."""
    torch.manual_seed(0)
    model = NSATransformer(
        vocabulary, dim, n_layers, n_heads=shape.n_heads, n_kv_groups=shape.n_kv_groups, d_k=shape.d_k, d_v=shape.d_v,
        **vars(shape.geometry), layers=("dense" if dense else "nsa",), kernels="auto" if kernels == DENSE else kernels,
    )  # fmt: skip
    if kernels == DENSE:
        for layer in attention_layers(model).values():
            s = layer.strategy
            layer.strategy = _TorchAttention(s.shape, s.kernels, s.options["scale"], s.branches)
    return model


class _TrainStep:
    """A callable that does one training step on fixed tokens."""

    def __init__(self, model: NSATransformer, length: int, dtype: str, device: str = "cpu") -> None:
        self.model, self.dtype, self.device = model.to(device), dtype, torch.device(device)
        generator = torch.Generator().manual_seed(1)
        vocabulary = model.embeddings.num_embeddings
        self.tokens_BS, self.labels_BS = (
            torch.randint(vocabulary, (1, length), generator=generator).to(device) for _ in range(2)
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def gradients(self) -> dict[str, Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bf16"):
            loss = self.model.loss(self.tokens_BS, self.labels_BS)
        loss.backward()
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def __call__(self) -> None:
        self.gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _check_step(shape: BenchShape, kernels: str, dtype: str, dim: int, device: str) -> CorrectnessCheck:
    """Gradients of every weight of a one-layer model on a short row, against the reference's in fp32.

    Not against its gradients in bf16: there the reference itself differs, on small models by more than the limit,
    so twice its own error is allowed too.
    """
    length = short_length(BenchCase(shape, 1, torch.float32))
    want, plain_got, got = (
        _TrainStep(_build(shape, 1, dim, 257, which, dense=kernels == DENSE), length, arithmetic, device).gradients()
        for which, arithmetic in (("reference", "fp32"), ("reference", dtype), (kernels, dtype))
    )
    assert got.keys() == want.keys()
    scale = max(g.norm() for g in want.values())

    def errors_of(gradients: dict[str, Tensor]) -> dict[str, float]:
        return {
            name: ((gradients[name] - g).norm() / g.norm().clamp(min=1e-3 * scale)).nan_to_num(nan=torch.inf).item()
            for name, g in want.items()
        }

    errors, plain_errors, limit = errors_of(got), errors_of(plain_got), _GRADIENT_LIMIT[dtype]
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
    vocabulary: int = _VOCABULARY,
) -> BenchMeasurement:
    entries, steps = {}, {}
    for implementation in implementations:
        name, kind = implementation.name, implementation.kind
        if kind == "other" or "decode" not in implementation.make:
            continue
        if reason := implementation.refusal(replace(task, op="attention")):
            entries[name] = ImplementationResult(name, kind, absent=reason)
            continue
        log(f"checking {name}")
        agreement = _check_step(task.shape, name, task.dtype, dim, task.device)
        entries[name] = ImplementationResult(name, kind, agreement=agreement)
        model = _build(task.shape, n_layers, dim, vocabulary, name, dense=name == DENSE)
        steps[name] = _TrainStep(model, task.length, task.dtype, task.device)
        log(f"warming up {name}")
        steps[name]()
    log(f"timing {', '.join(steps)}")
    samples = interleave(steps, budget_s=budget_s, now=clock_of(torch.device(task.device)))
    with torch.device("meta"):
        dense_flops, nsa_flops = (
            _step_flops(_build(task.shape, n_layers, dim, vocabulary, "portable", dense=dense), task, dense=dense)
            for dense in (True, False)
        )
    finished = [finish(entry, samples, entries, task, None) for entry in entries.values()]
    return BenchMeasurement(task, "random tokens", threads, "FLOPs", dense_flops / nsa_flops, finished)


def _step_flops(model: NSATransformer, task: BenchTask, *, dense: bool) -> float:
    """Least FLOPs per token of a step: 6 per weight, attention forward and backward; selection reuses scores."""
    s, n = task.shape, task.length
    reads = n * (n + 1) / 2 if dense else sum(s.geometry.total_reads(n).values())
    attention = 2 * s.n_heads * (s.d_k + s.d_v) * reads / n * (1 + BACKWARD_FACTOR)
    weights = model.lm_head.w_out.weight.numel() + sum(p.numel() for p in model.blocks.parameters())
    return 6.0 * weights + len(model.blocks) * attention
