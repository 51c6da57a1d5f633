"""Compares two forward passes where rounding may exchange selected blocks with nearly equal scores (near ties).

An exchanged block changes its query's output although nothing is wrong. So outputs are compared for queries with the
same selection, and the scores of exchanged blocks must be equal up to rounding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nsa.bench.correctness import LIMITS
from nsa.check.gpu_check.check_result import CheckResult, bounded
from nsa.core.branches import AttendedKeys
from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import Probe
from nsa.kernels.self_check.comparison import FP32_LIMIT, blocks_error, relative_rms

HALF_LIMIT = 2e-2  # relative RMS of two ways of rounding
MOST_EXCHANGED = 0.1  # of the queries: a comparison of the others must still mean something


class ForwardRecorder(Probe):
    """Probe that keeps the selected blocks of the last forward and, without a cache, q and compressed keys."""

    idx_BSGN: Tensor
    q_BSGRK: Tensor
    k_BCGK: Tensor

    def record(self, gates: Tensor | None, gate_kind: str, idx_BSGN: Tensor, *_: object) -> None:
        self.idx_BSGN = idx_BSGN

    def record_selection(self, q_BSGRK: Tensor, idx_BSGN: Tensor, keys: AttendedKeys, *_: object) -> None:
        self.q_BSGRK, self.k_BCGK = q_BSGRK.detach(), keys[0].k.detach()


@dataclass(frozen=True)
class RecordedForward:
    """Output [B, S, D] and selected blocks [B, S, G, N] of one forward pass."""

    out_BSD: Tensor
    idx_BSGN: Tensor

    @classmethod
    def of(cls, module: NSAAttention, out_BSD: Tensor) -> Self:
        """The forward pass that gave `out`, the module's last."""
        assert isinstance(module.probe, ForwardRecorder)
        return cls(out_BSD, module.probe.idx_BSGN)


def same_selection(got: RecordedForward, want: RecordedForward) -> Tensor:
    """Queries with the same selected blocks: bool [B, S]."""
    return (got.idx_BSGN == want.idx_BSGN).flatten(2).all(-1)


def compared(claim: str, module: NSAAttention, got: RecordedForward, want: RecordedForward) -> Iterator[CheckResult]:
    """Results for output and selection; `module`, whose probe is a `ForwardRecorder`, must have computed `want` last,
    one document per row."""
    recorded = module.probe
    assert isinstance(recorded, ForwardRecorder)
    same_BS = same_selection(got, want)
    exchanged = int((~same_BS).sum())
    dtype = want.out_BSD.dtype
    note = f"{exchanged} of {same_BS.numel()} queries chose another block of the same score" if exchanged else ""
    yield bounded(f"{claim}, output, relative RMS", relative_rms(got.out_BSD[same_BS], want.out_BSD[same_BS]),
                  limit(dtype), note)  # fmt: skip
    pos_BS = torch.arange(same_BS.shape[1], device=same_BS.device).expand_as(same_BS)
    error_BSG = blocks_error(
        recorded.q_BSGRK, recorded.k_BCGK, pos_BS, torch.zeros_like(pos_BS), got.idx_BSGN, module.geometry, module.scale
    )
    too_many = exchanged > MOST_EXCHANGED * same_BS.numel()
    yield bounded(f"{claim}, scores of exchanged blocks, relative", torch.inf if too_many else error_BSG.max().item(),
                  LIMITS[dtype], note)  # fmt: skip


def compared_gradients(
    claim: str, module: NSAAttention, x: Tensor, got: RecordedForward, want: RecordedForward, most: float
) -> CheckResult:
    """Gradients of the input and all weights. Queries whose selection differs are left out of the loss, and so out of
    every gradient."""
    dout = torch.ones_like(want.out_BSD) * same_selection(got, want)[..., None]
    leaves = {"x": x, **dict(module.named_parameters())}
    mine, its = (torch.autograd.grad(one.out_BSD, list(leaves.values()), dout) for one in (got, want))
    figures = {name: relative_rms(a, b) for name, a, b in zip(leaves, mine, its, strict=True)}
    worst = max(figures, key=lambda name: figures[name])
    return bounded(f"{claim}, gradients, relative RMS", figures[worst], most, worst)


def limit(dtype: torch.dtype) -> float:
    return FP32_LIMIT if dtype == torch.float32 else HALF_LIMIT
