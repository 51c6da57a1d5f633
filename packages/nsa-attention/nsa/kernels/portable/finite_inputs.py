"""Inputs that are not finite, for a backend that multiplies what a query does not see by a weight of 0: 0 · NaN is NaN.

Numbers that are not finite are replaced by 0, and what they belong to is marked by one NaN that a mask removes: a key
is NaN where its value is not finite, a log-sum-exp where its query, output or gradient is not. So a query that sees
such a key is NaN, and one that does not has the bits that it has without it. Where the host may read values, nothing is
copied if all are finite. Elsewhere all is copied but a cache, which has more keys than queries and one document a row.
Shapes as in `nsa.kernels.reference`.
"""

from torch import Tensor

from nsa.kernels.interface import BranchInputs
from nsa.kernels.portable.chunk import may_read

GivenToBackward = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Outputs, log-sum-exps, and the gradients of both."""


def forward_inputs(x: BranchInputs) -> BranchInputs:
    if _nothing_to_clean(x, x.v_BTGV):
        return x
    return x._replace(k_BTGK=x.k_BTGK + _spoiled(x.v_BTGV), v_BTGV=_cleaned(x.v_BTGV))


def backward_inputs(x: BranchInputs, given: GivenToBackward) -> tuple[BranchInputs, GivenToBackward]:
    """A query that sees a spoiled key needs no mark: its log-sum-exp is NaN since the forward pass."""
    out, lse, dout, dlse = given
    if _nothing_to_clean(x, x.q_BSGRK, x.k_BTGK, x.v_BTGV, out, dout, *([] if dlse is None else [dlse])):
        return x, given
    spoiled = sum(_spoiled(y).squeeze(-1) for y in (x.q_BSGRK, out, dout)) + lse
    if dlse is not None:
        spoiled, dlse = spoiled + dlse * 0, _cleaned(dlse)
    q, k, v = (_cleaned(y) for y in (x.q_BSGRK, x.k_BTGK, x.v_BTGV))
    return x._replace(q_BSGRK=q, k_BTGK=k, v_BTGV=v), (_cleaned(out), spoiled.to(lse.dtype), _cleaned(dout), dlse)


def _nothing_to_clean(x: BranchInputs, *tensors: Tensor) -> bool:
    if may_read(x.q_BSGRK):
        return all(bool(y.isfinite().all()) for y in tensors)
    return x.k_BTGK.shape[1] > x.q_BSGRK.shape[1]


def _spoiled(x: Tensor) -> Tensor:
    """NaN for a row with a number that is not finite, else 0: [..., 1]."""
    return (x * 0).sum(-1, keepdim=True)


def _cleaned(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)
