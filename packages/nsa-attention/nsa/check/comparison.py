"""Result type, error measures and tolerances of all correctness checks.

In fp32 the error itself is bounded. In half precision it may be twice the error of plain PyTorch operators for the same
formula on the same device, every intermediate rounded to that dtype.

B batch · S queries · C compressed blocks · J selection blocks · G kv groups · N chosen blocks
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import isnan
from typing import Any

import torch
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels import reference

SELECTION_LIMIT = 1e-4  # relative, of scores, which are computed in fp32 whatever the inputs' dtype
PLAIN_FACTOR = 2.0  # times the error of plain PyTorch operators
ROW_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # relative, of the worst row
_FP32_LIMIT, _HALF_LIMIT = 1e-5, 2e-2  # relative RMS
_ROW_FLOOR = 0.1  # a row's error is relative to its own length, but at least to this share of a typical row's
_SMALLEST_RMS = 0.05
"""Smallest scale of results from inputs of RMS 1. What is exactly 0, such as the gradient of a softmax over one key,
has only its error."""

Results = dict[str, Tensor]


class CheckStatus(StrEnum):
    HOLDS = "holds"
    FAILS = "FAILS"
    REFUSED = "refused"
    NEEDS_GPU = "needs a GPU"
    FACT = "fact"


@dataclass(frozen=True)
class CheckResult:
    """One claim: what was measured, and the most that it may be."""

    claim: str
    verdict: CheckStatus
    measured: float | str | None = None
    limit: float | None = None
    note: str = ""
    subject: str = ""
    """Filled in by `nsa gpu-check`, like the seconds."""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return self.verdict is not CheckStatus.FAILS

    @property
    def excess(self) -> float:
        """Measured as a multiple of the limit; infinite if it is not a number."""
        assert isinstance(self.measured, float | int)
        assert self.limit
        return torch.inf if isnan(self.measured) else self.measured / self.limit

    @property
    def summary(self) -> dict[str, Any]:
        """The claim's row in JSON."""
        return {"claim": self.claim, "measured": self.measured, "limit": self.limit, "holds": self.holds}

    @property
    def line(self) -> str:
        if self.measured is None:
            return f"{self.verdict}  {self.claim}: {self.note}"
        return f"{self.verdict}  {self.claim:68} {self.measured:9.2g}  (at most {self.limit:g})"

    def __str__(self) -> str:
        return f"{self.claim}: {self.measured:.3g} (at most {self.limit:.3g})"


def bounded(claim: str, measured: float, limit: float, note: str = "") -> CheckResult:
    """Holds if measured ≤ limit; NaN fails."""
    return CheckResult(claim, CheckStatus.HOLDS if measured <= limit else CheckStatus.FAILS, measured, limit, note)


def fact(claim: str, text: str) -> CheckResult:
    return CheckResult(claim, CheckStatus.FACT, text)


def needs_gpu(claim: str) -> CheckResult:
    return CheckResult(claim, CheckStatus.NEEDS_GPU)


def tolerance(dtype: torch.dtype, plain_error: float | None = None) -> float:
    """Largest relative RMS error of a result in this dtype.

    plain_error: that of plain PyTorch operators, where it is known; else two ways of rounding are compared.
    """
    if dtype == torch.float32:
        return _FP32_LIMIT
    return _HALF_LIMIT if plain_error is None else max(_FP32_LIMIT, PLAIN_FACTOR * plain_error)


def compare(label: str, dtype: torch.dtype, got: Results, truth: Results, plain: Results) -> list[CheckResult]:
    """Each result against the truth, within the tolerance that plain PyTorch's results give."""
    error = partial(relative_rms, smallest=_SMALLEST_RMS)
    return [
        bounded(f"{label} {name}", error(got[name], want), tolerance(dtype, error(plain[name], want)))
        for name, want in truth.items()
    ]


def differing(claim: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> CheckResult:
    """Count the values that differ in any bit, and name where. NaN differs from everything."""
    counts = {name: int((got[name] != x).sum()) for name, x in want.items()}
    return bounded(claim, sum(counts.values()), 0, ", ".join(f"{name}: {n}" for name, n in counts.items() if n))


def worst(results: Iterable[CheckResult]) -> CheckResult:
    return max(results, key=lambda result: result.excess)


def relative_rms(got: Tensor, want: Tensor, *, smallest: float = 0.0) -> float:
    """RMS of the difference over RMS of `want`, or over `smallest` if that is more. Infinities must be the same."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    difference = (got - want).masked_fill(got == want, 0.0)
    size = want.masked_fill(want.isinf(), 0.0).norm()
    least = max(torch.finfo(torch.float64).tiny, smallest * want.numel() ** 0.5)
    return float(difference.norm() / size.clamp(min=least))


def worst_row_error(got: Tensor, want: Tensor) -> float:
    """Relative error of the worst row, in norm. Rows are along dimension 1."""
    if want.numel() == 0:
        return 0.0
    got, want = got.cpu().double().flatten(2), want.cpu().double().flatten(2)
    length = want.norm(dim=-1)
    error = (got - want).norm(dim=-1) / length.clamp(min=max(_ROW_FLOOR * length.mean().item(), 1e-30))
    return error.nan_to_num(nan=torch.inf).max().item()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, new tensors hold NaN, or the largest integer, until they are written."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def blocks_error(
    q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, idx_BSGN: Tensor, g: Geometry, scale: float
) -> Tensor:
    """Return how much worse each query's chosen blocks score than the reference's choice, relative: [B, S, G] in fp64.

    Blocks that score the same but for rounding may be exchanged; nothing else may.
    """
    q, k, pos_BS, first_BS, idx_BSGN = (x.cpu() for x in (q_BSGRK, k_BCGK, pos_BS, first_BS, idx_BSGN))
    q, k = q.detach().double(), k.detach().double()
    want_BSGN = reference.select_blocks(q, k, pos_BS, first_BS, geometry=g, scale=scale)
    got_BSGN = idx_BSGN.to(want_BSGN.dtype)
    same_BSG = (got_BSGN == want_BSGN).all(-1)
    if same_BSG.all():
        return same_BSG.logical_not().double()
    # A block twice, out of order, or in the future.
    impossible_BSG = ((got_BSGN[..., 1:] <= got_BSGN[..., :-1]) & (got_BSGN[..., 1:] >= 0)).any(-1)
    impossible_BSG |= (got_BSGN > pos_BS[..., None, None] // g.l_sel).any(-1)
    # The probability of each compressed block, read off the branch's output when its values are unit vectors.
    n = k.shape[1]
    unit_BCGC = torch.eye(n, dtype=torch.float64)[None, :, None].expand(k.shape[0], -1, k.shape[2], -1)
    mass_BSGC = reference.compressed_attention(q, k, unit_BCGC, pos_BS, first_BS, geometry=g, scale=scale).sum(3)  # type: ignore[union-attr]
    mass_BSGC = _from_own_first_block(mass_BSGC, first_BS)
    n_blocks = int(pos_BS.max()) // g.l_sel + 1
    score_BSGJ = mass_BSGC @ reference.overlap(n, n_blocks, g).double()
    own_BS11, j_J = (pos_BS // g.l_sel)[..., None, None], torch.arange(n_blocks)
    forced = (j_J == 0) | (j_J == own_BS11) | (j_J == own_BS11 - 1)
    score_BSGJ = score_BSGJ.masked_fill(forced, 1e3)

    def ranked(idx_BSGN: Tensor) -> Tensor:
        score = score_BSGJ.gather(-1, idx_BSGN.long().clamp(0, n_blocks - 1)).masked_fill(idx_BSGN < 0, -1e3)
        return score.sort(-1).values

    want, got = ranked(want_BSGN), ranked(got_BSGN)
    error_BSG = ((got - want).abs() / want.abs().clamp(min=1e-9)).amax(-1)
    return error_BSG.masked_fill(same_BSG, 0.0).masked_fill(impossible_BSG, torch.inf)


def _from_own_first_block(mass_BSGC: Tensor, first_BS: Tensor) -> Tensor:
    """Each query's row from its own document's first compressed block on."""
    n = mass_BSGC.shape[-1]
    if n == 0:
        return mass_BSGC
    source_BSC = torch.arange(n) + first_BS[..., None]
    here_BSC = (source_BSC >= 0) & (source_BSC < n)
    return mass_BSGC.gather(-1, source_BSC.clamp(0, n - 1)[:, :, None].expand_as(mass_BSGC)) * here_BSC[:, :, None]
