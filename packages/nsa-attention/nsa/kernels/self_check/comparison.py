"""Error measures and limits for kernels compared with the reference.

In fp32 the error itself is bounded. In half precision it may be twice the error of plain PyTorch operators for the same
formula on the same device, every intermediate rounded to that dtype.

B batch · S queries · C compressed blocks · J selection blocks · G kv groups · N chosen blocks
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels import reference

FP32_LIMIT = 1e-5  # relative RMS
HALF_LIMIT = 2.0  # times plain PyTorch's error
SELECTION_LIMIT = 1e-4  # relative, of scores, which are computed in fp32 whatever the inputs' dtype


@dataclass(frozen=True)
class CheckedFigure:
    """One compared result: what it is, its error, and the most that is allowed."""

    name: str
    error: float
    limit: float

    @property
    def right(self) -> bool:
        return self.error <= self.limit  # not of NaN

    def __str__(self) -> str:
        return f"{self.name}: {self.error:.3g} (at most {self.limit:.3g})"


SMALLEST_RMS = 0.05
"""Smallest scale of results from inputs of RMS 1. What is exactly 0, such as the gradient of a softmax over one key,
has only its error."""


def relative_rms(got: Tensor, want: Tensor, *, smallest: float = 0.0) -> float:
    """RMS of the difference over RMS of `want`, or over `smallest` if that is more. Infinities must be the same."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    difference = (got - want).masked_fill(got == want, 0.0)
    size = want.masked_fill(want.isinf(), 0.0).norm()
    least = max(torch.finfo(torch.float64).tiny, smallest * want.numel() ** 0.5)
    return float(difference.norm() / size.clamp(min=least))


def limit_for(dtype: torch.dtype, plain_error: float) -> float:
    """The most that a kernel's relative RMS error may be in this dtype."""
    return FP32_LIMIT if dtype == torch.float32 else max(FP32_LIMIT, HALF_LIMIT * plain_error)


def differing_values(got: dict[str, Tensor], want: dict[str, Tensor]) -> CheckedFigure:
    """How many values differ in any bit; names the results in which they do. NaN differs from everything."""
    counts = {name: int((got[name] != x).sum()) for name, x in want.items()}
    where = ", ".join(name for name, n in counts.items() if n)
    return CheckedFigure(where, float(sum(counts.values())), 0.0)


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
    """How much worse each query's chosen blocks score than the reference's choice, relative: [B, S, G] in fp64.

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
