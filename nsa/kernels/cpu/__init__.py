"""CPU backend: compiled C++ kernels in fp32, bf16 and fp16 with AMX, AVX-512, AVX2 or plain C++.

Every result is computed by one thread in an order that depends on the sizes alone: any number of threads gives the same
bits. Shapes as in `nsa.kernels.reference`.
"""

import torch
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels.cpu import build, library
from nsa.kernels.cpu.decoder import CpuDecoder as CpuDecoder
from nsa.kernels.cpu.library import call, dense, problem, require, rows
from nsa.kernels.cpu.mix import mix_backward as mix_backward
from nsa.kernels.cpu.mix import mix_forward as mix_forward

Gradients = tuple[Tensor, Tensor, Tensor]


def why_not(branch: str, device: torch.device, dtype: torch.dtype, shape: object) -> str | None:
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device.type}"
    if dtype not in library.DTYPES:
        return f"it computes {', '.join(str(d).removeprefix('torch.') for d in library.DTYPES)}, not {dtype}"
    return _why_not_built()


def describe() -> str:
    """One line on what was compiled, or why nothing was."""
    return _why_not_built() or f"{library.best_isa()}, compiled in {build.cache_folder()}"


@torch.compiler.assume_constant_result  # tracing cannot call into the library
def _why_not_built() -> str | None:
    try:
        library.load()
    except build.BuildError as error:
        return str(error)
    return None


def sliding_forward(
    q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx: None, pos_BS: Tensor, start_BS: Tensor, geometry: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _forward("sliding", q_BSGRK, k_BTGK, v_BTGV, None, pos_BS, start_BS, geometry, scale)


def compressed_forward(
    q_BSGRK: Tensor, k_BCGK: Tensor, v_BCGV: Tensor, idx: None, pos_BS: Tensor, first_BS: Tensor, geometry: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _forward("compressed", q_BSGRK, k_BCGK, v_BCGV, None, pos_BS, first_BS, geometry, scale)


def selected_forward(
    q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx_BSGN: Tensor, pos_BS: Tensor, start_BS: Tensor,
    geometry: Geometry, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _forward("selected", q_BSGRK, k_BTGK, v_BTGV, idx_BSGN, pos_BS, start_BS, geometry, scale)


def sliding_backward(
    dout_BSGRV: Tensor, q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx: None, pos_BS: Tensor, start_BS: Tensor,
    out_BSGRV: Tensor, lse_BSGR: Tensor, dlse_BSGR: Tensor | None, geometry: Geometry, scale: float,
) -> Gradients:  # fmt: skip
    tensors = (dout_BSGRV, q_BSGRK, k_BTGK, v_BTGV, None, pos_BS, start_BS, out_BSGRV, lse_BSGR, dlse_BSGR)
    return _backward("sliding", *tensors, geometry, scale)


def compressed_backward(
    dout_BSGRV: Tensor, q_BSGRK: Tensor, k_BCGK: Tensor, v_BCGV: Tensor, idx: None, pos_BS: Tensor, first_BS: Tensor,
    out_BSGRV: Tensor, lse_BSGR: Tensor, dlse_BSGR: Tensor | None, geometry: Geometry, scale: float,
) -> Gradients:  # fmt: skip
    tensors = (dout_BSGRV, q_BSGRK, k_BCGK, v_BCGV, None, pos_BS, first_BS, out_BSGRV, lse_BSGR, dlse_BSGR)
    return _backward("compressed", *tensors, geometry, scale)


def selected_backward(
    dout_BSGRV: Tensor, q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx_BSGN: Tensor, pos_BS: Tensor,
    start_BS: Tensor, out_BSGRV: Tensor, lse_BSGR: Tensor, dlse_BSGR: Tensor | None, geometry: Geometry, scale: float,
) -> Gradients:  # fmt: skip
    tensors = (dout_BSGRV, q_BSGRK, k_BTGK, v_BTGV, idx_BSGN, pos_BS, start_BS, out_BSGRV, lse_BSGR, dlse_BSGR)
    return _backward("selected", *tensors, geometry, scale)


def select(
    q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, scale: float
) -> Tensor:
    q, k, pos, first = dense(q_BSGRK), dense(k_BCGK), _index(pos_BS), _index(first_BS)
    idx_BSGN = q.new_empty((*q.shape[:3], geometry.n_sel), dtype=torch.int32)
    made = problem("compressed", q, k, pos, first, geometry, scale)
    made.idx = idx_BSGN.data_ptr()
    call("nsa_choose", made)
    return idx_BSGN


def compressed_and_select(
    q_BSGRK: Tensor, k_BCGK: Tensor, v_BCGV: Tensor, pos_BS: Tensor, first_BS: Tensor, geometry: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, pos, first = dense(q_BSGRK), dense(k_BCGK), dense(v_BCGV), _index(pos_BS), _index(first_BS)
    out_BSGRV = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse_BSGR = q.new_empty(q.shape[:-1], dtype=torch.float32)
    idx_BSGN = q.new_empty((*q.shape[:3], geometry.n_sel), dtype=torch.int32)
    made = problem("compressed", q, k, pos, first, geometry, scale, v.shape[-1])
    require("values", v, (*k.shape[:-1], v.shape[-1]), q.dtype)
    made.v, made.out, made.lse, made.idx = rows(v), rows(out_BSGRV), lse_BSGR.data_ptr(), idx_BSGN.data_ptr()
    call("nsa_choose", made)
    return out_BSGRV, lse_BSGR, idx_BSGN


def _forward(
    branch: str, q: Tensor, k: Tensor, v: Tensor, idx: Tensor | None, pos: Tensor, start: Tensor,
    geometry: Geometry, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v, pos, start = dense(q), dense(k), dense(v), _index(pos), _index(start)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    made = problem(branch, q, k, pos, start, geometry, scale, v.shape[-1])
    require("values", v, (*k.shape[:-1], v.shape[-1]), q.dtype)
    made.v, made.out, made.lse = rows(v), rows(out), lse.data_ptr()
    idx = _attach_blocks(made, idx, q)  # kept alive by its name
    call("nsa_forward", made)
    return out, lse


def _backward(
    branch: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, idx: Tensor | None, pos: Tensor, start: Tensor,
    out: Tensor, lse: Tensor, dlse: Tensor | None, geometry: Geometry, scale: float,
) -> Gradients:  # fmt: skip
    q, k, v, pos, start = dense(q), dense(k), dense(v), _index(pos), _index(start)
    dout, out, lse = dense(dout), dense(out), lse.contiguous()
    dq, dk, dv = torch.empty_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
    made = problem(branch, q, k, pos, start, geometry, scale, v.shape[-1])
    require("values", v, (*k.shape[:-1], v.shape[-1]), q.dtype)
    require("outputs", out, (*q.shape[:-1], v.shape[-1]), q.dtype)
    require("gradients of outputs", dout, out.shape, q.dtype)
    require("log-sum-exps", lse, q.shape[:-1], torch.float32)
    made.v, made.out, made.dout, made.lse = rows(v), rows(out), rows(dout), lse.data_ptr()
    made.dq, made.dk, made.dv = rows(dq), rows(dk), rows(dv)
    if dlse is not None:
        dlse = dlse.contiguous()
        require("gradients of log-sum-exps", dlse, q.shape[:-1], torch.float32)
        made.dlse = dlse.data_ptr()
    idx = _attach_blocks(made, idx, q)  # kept alive by its name
    call("nsa_backward", made)
    return dq, dk, dv


def _attach_blocks(made: library.AttentionProblem, idx_BSGN: Tensor | None, q_BSGRK: Tensor) -> Tensor | None:
    """The selected blocks as the library reads them; keep the result alive until the library has been called."""
    if idx_BSGN is None:
        return None
    idx = idx_BSGN.to(torch.int32).contiguous()
    require("chosen blocks", idx, (*q_BSGRK.shape[:3], idx.shape[-1]), torch.int32)
    made.idx, made.n_sel = idx.data_ptr(), idx.shape[-1]
    return idx


def _index(x_BS: Tensor) -> Tensor:
    return x_BS.to(torch.int64).contiguous()
