"""Dense baseline: causal, grouped scaled_dot_product_attention in its fastest layout.

Keys and values are one set per group. Of the variants that compute the same function, the fastest at the task's own
length is timed: `enable_gqa`, heads repeated beforehand, on a GPU cuDNN's kernel instead of PyTorch's own choice and
FlashAttention 2 and 4 where they are installed, or, for one query, the heads of a group as rows of one matrix.

B batch · H heads · G kv groups · R heads per group · S tokens · X width
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.bench.case import TORCH_DTYPES, BenchCase, BenchRunner, BenchShape, BenchTask, Results, leaf
from nsa.bench.machine import clock_of

_TRIALS, _TRIALS_S = 3, 2.0
"""Timed rounds of every variant, and when to stop after fewer: a round of long rows on a CPU takes minutes."""


class _FastestForm(NamedTuple):
    name: str
    note: str
    """What every variant took, the fastest first, or why it did not run."""


def attention(case: BenchCase, task: BenchTask) -> BenchRunner:
    form = _fastest_form(case.shape, case.dtype, case.length, task.backward, case.device)
    leaves = _tensors(case)
    attend, (q, k, v) = _FORMS[form.name], leaves.values()

    def forward() -> Tensor:
        return attend(q, k, v, case.shape)

    dout = F.pad(_heads_first(case.dout_BSGRV.flatten(2, 3)), (0, leaves["v_sel"].shape[-1] - case.shape.d_v))
    return BenchRunner(forward, leaves, dout, lambda results: _to_case(results, case), note=form.note)


def prefill(case: BenchCase, task: BenchTask) -> BenchRunner:
    """Copy the prompt's keys and values into a new cache and attend over the whole prompt at once."""
    attend = _FORMS[_fastest_form(case.shape, case.dtype, case.length, False, case.device).name]
    q, k, v = (x.detach() for x in _tensors(case).values())

    def forward() -> Tensor:
        cached_k, cached_v = torch.zeros_like(k), torch.zeros_like(v)
        return attend(q, cached_k.copy_(k), cached_v.copy_(v), case.shape)

    return BenchRunner(forward, to_case=lambda results: _to_case(results, case))


def decode(case: BenchCase, task: BenchTask) -> BenchRunner:
    """Write one token's key and value into a preallocated cache and attend with its query over all that it holds."""
    form = _fastest_decode_form(case.shape, case.dtype, task.length, case.device)
    attend = _DECODE_FORMS[form.name]
    q, k, v = (x.detach() for x in _tensors(case).values())
    cached_k, cached_v = k.clone(), v.clone()
    steps = [(q[:, :, t : t + 1], k[:, :, t], v[:, :, t], t) for t in range(task.length, case.length)]
    step = 0

    def forward() -> Tensor:
        nonlocal step
        new_q, new_k, new_v, t = steps[step]
        step = (step + 1) % len(steps)
        cached_k[:, :, t], cached_v[:, :, t] = new_k, new_v
        return attend(new_q, cached_k[:, :, : t + 1], cached_v[:, :, : t + 1], case.shape)

    return BenchRunner(forward, to_case=lambda results: _to_case(results, case), note=form.note)


@cache
def _fastest_form(
    shape: BenchShape, dtype: torch.dtype, length: int, backward: bool, device: torch.device
) -> _FastestForm:
    case = BenchCase(shape, length, dtype, device=device)
    q, k, v = _tensors(case).values()

    def trial(attend: Callable[..., Tensor]) -> Callable[[], object]:
        def run() -> None:
            with torch.set_grad_enabled(backward):
                out = attend(q, k, v, shape)
                if backward:
                    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        return run

    every = {name: trial(attend) for name, attend in _FORMS.items() if name not in _GPU_FORMS or device.type == "cuda"}
    return _fastest(every, device)


@cache
def _fastest_decode_form(shape: BenchShape, dtype: torch.dtype, length: int, device: torch.device) -> _FastestForm:
    k = torch.randn(1, shape.n_kv_groups, length, shape.d_k).to(device, dtype)
    q = torch.randn(1, shape.n_heads, 1, shape.d_k).to(device, dtype)
    return _fastest({name: partial(attend, q, k, k, shape) for name, attend in _DECODE_FORMS.items()}, device)


def _fastest(trials: dict[str, Callable[[], object]], device: torch.device) -> _FastestForm:
    """The fastest of the variants that run, each once to warm up and a few times more in turns."""
    best, why_not, now = dict.fromkeys(trials, float("inf")), {}, clock_of(device)
    begin = now()
    for _ in range(_TRIALS + 1):
        for name in [name for name in trials if name not in why_not]:
            start = now()
            try:
                trials[name]()
            except (RuntimeError, ImportError, TypeError, ValueError, AssertionError, AttributeError) as error:
                if name not in _GPU_FORMS:  # the others may lack a kernel for this GPU, dtype or width
                    raise
                why_not[name] = "not installed" if isinstance(error, ImportError) else type(error).__name__
                continue
            best[name] = min(best[name], now() - start)
        if device.type == "cpu" and now() - begin > _TRIALS_S:  # on a GPU the first round may compile
            break
    order = sorted(best, key=lambda name: best[name])
    parts = [f"{name} {why_not.get(name) or f'{1e3 * best[name]:.3g} ms'}" for name in order]
    return _FastestForm(order[0], ", ".join(parts))


def _grouped(q: Tensor, k: Tensor, v: Tensor, shape: BenchShape) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _repeated(q: Tensor, k: Tensor, v: Tensor, shape: BenchShape) -> Tensor:
    k, v = (x.repeat_interleave(shape.heads_per_group, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, shape: BenchShape) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _grouped(q, k, v, shape)


def _flash(module: str, q: Tensor, k: Tensor, v: Tensor, shape: BenchShape) -> Tensor:
    """flash_attn_func of the package flash-attn (FlashAttention 2) or flash-attn-4; the latter also returns
    log-sum-exps."""
    attend = import_module(module).flash_attn_func
    out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
    tensor: Tensor = out[0] if isinstance(out, tuple) else out
    return tensor.transpose(1, 2)


def _grouped_decode(q: Tensor, k: Tensor, v: Tensor, shape: BenchShape) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _rows_decode(q: Tensor, k: Tensor, v: Tensor, shape: BenchShape) -> Tensor:
    rows = q.view(q.shape[0], shape.n_kv_groups, shape.heads_per_group, -1)
    return F.scaled_dot_product_attention(rows, k, v).view(q.shape[0], shape.n_heads, 1, -1)


_FORMS: dict[str, Callable[[Tensor, Tensor, Tensor, BenchShape], Tensor]] = {
    "enable_gqa": _grouped,
    "repeated heads": _repeated,
    "cuDNN": _cudnn,
    "FlashAttention 2": partial(_flash, "flash_attn.flash_attn_interface"),
    "FlashAttention 4": partial(_flash, "flash_attn.cute"),
}
_GPU_FORMS = ("cuDNN", "FlashAttention 2", "FlashAttention 4")
_DECODE_FORMS = {"enable_gqa": _grouped_decode, "heads as rows": _rows_decode}


def _tensors(case: BenchCase) -> dict[str, Tensor]:
    """q, k, v in SDPA's layout. It has no kernel for d_k ≠ d_v, so values are stored padded, which costs least."""
    q, k, v = (_heads_first(x) for x in (case.q_BSGRK.flatten(2, 3), case.raw.k_sel, case.raw.v_sel))
    if case.shape.d_v < case.shape.d_k:
        v = F.pad(v, (0, case.shape.d_k - case.shape.d_v))
    return {"q": leaf(q), "k_sel": leaf(k), "v_sel": leaf(v)}


def _heads_first(x_BSHX: Tensor) -> Tensor:
    return x_BSHX.transpose(1, 2).contiguous()


def _to_case(results: Results, case: BenchCase) -> Results:
    moved = {name: x.transpose(1, 2) for name, x in results.items()}
    for name in ("out", "v_sel"):
        if name in moved:
            moved[name] = moved[name][..., : case.shape.d_v]
    for name in ("out", "q"):
        if name in moved:
            moved[name] = moved[name].unflatten(2, (case.shape.n_kv_groups, -1))
    return moved


def needs_bytes(task: BenchTask) -> int:
    """Inputs, output and gradients, heads repeated."""
    s = task.shape
    return 8 * task.length * s.n_heads * max(s.d_k, s.d_v) * TORCH_DTYPES[task.dtype].itemsize


def why_not(task: BenchTask) -> str | None:
    return None if task.shape.d_v <= task.shape.d_k else "it has no kernel for d_v above d_k"
