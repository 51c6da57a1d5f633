"""CPU backend: compiled C++ kernels in fp32, bf16 and fp16 with AMX, AVX-512, AVX2 or plain C++.

Every result is computed by one thread in an order that depends on the sizes alone: any number of threads gives the same
bits. Shapes as in `nsa.kernels.reference`.
"""

from ctypes import byref

import torch
from torch import Tensor

from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.cpu import build, library
from nsa.kernels.cpu.decoder import CpuDecoder as CpuDecoder
from nsa.kernels.cpu.library import check, dense, problem, require, rows
from nsa.kernels.interface import BranchInputs, Gradients, constant_when_traced


def why_not(branch: str, device: torch.device, dtype: torch.dtype, shape: object) -> str | None:
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device.type}"
    if dtype not in library.DTYPES:
        return f"it computes {', '.join(str(d).removeprefix('torch.') for d in library.DTYPES)}, not {dtype}"
    return _why_not_built()


def describe() -> str:
    """One line on what was compiled, or why nothing was."""
    return _why_not_built() or f"{library.best_isa()}, compiled in {build.cache_folder()}"


@constant_when_traced  # tracing cannot call into the library
def _why_not_built() -> str | None:
    try:
        library.load()
    except build.BuildError as error:
        return str(error)
    return None


def attend_forward(x: BranchInputs) -> tuple[Tensor, Tensor]:
    x = _readable(x)
    arguments, out, lse = _forward_problem(x)
    check(library.load().nsa_forward(byref(arguments)))
    return out, lse


def compressed_and_select(x: BranchInputs) -> tuple[Tensor, Tensor, Tensor]:
    x = _readable(x)
    arguments, out, lse = _forward_problem(x)
    idx_BSGN = _new_choice(x.q_BSGRK, x.geometry)
    arguments.idx = idx_BSGN.data_ptr()
    check(library.load().nsa_choose(byref(arguments)))
    return out, lse, idx_BSGN


def attend_backward(
    x: BranchInputs, out_BSGRV: Tensor, lse_BSGR: Tensor, dout_BSGRV: Tensor, dlse_BSGR: Tensor | None
) -> Gradients:
    x = _readable(x)
    q, k, v = x.q_BSGRK, x.k_BTGK, x.v_BTGV
    dout, out, lse = dense(dout_BSGRV), dense(out_BSGRV), lse_BSGR.contiguous()
    dq, dk, dv = torch.empty_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
    arguments = _problem(x)
    require("outputs", out, (*q.shape[:-1], v.shape[-1]), q.dtype)
    require("gradients of outputs", dout, out.shape, q.dtype)
    require("log-sum-exps", lse, q.shape[:-1], torch.float32)
    arguments.out, arguments.dout, arguments.lse = rows(out), rows(dout), lse.data_ptr()
    arguments.dq, arguments.dk, arguments.dv = rows(dq), rows(dk), rows(dv)
    if dlse_BSGR is not None:
        dlse = dlse_BSGR.contiguous()
        require("gradients of log-sum-exps", dlse, q.shape[:-1], torch.float32)
        arguments.dlse = dlse.data_ptr()
    check(library.load().nsa_backward(byref(arguments)))
    return dq, dk, dv


def select(
    q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, scale: float
) -> Tensor:
    q, k, pos, first = dense(q_BSGRK), dense(k_BCGK), _index(pos_BS), _index(first_BS)
    idx_BSGN = _new_choice(q, geometry)
    arguments = problem("compressed", q, k, pos, first, geometry, scale)
    arguments.idx = idx_BSGN.data_ptr()
    check(library.load().nsa_choose(byref(arguments)))
    return idx_BSGN


def _readable(x: BranchInputs) -> BranchInputs:
    """The tensors as the library reads them; keep them until it has been called: it is given addresses."""
    idx = None if x.idx_BSGN is None else x.idx_BSGN.to(torch.int32).contiguous()
    q, k, v, pos, start = dense(x.q_BSGRK), dense(x.k_BTGK), dense(x.v_BTGV), _index(x.pos_BS), _index(x.start_BS)
    return BranchInputs(x.branch, q, k, v, idx, pos, start, x.geometry, x.scale)


def _problem(x: BranchInputs) -> library.AttentionProblem:
    """Queries, keys, values and chosen blocks, checked."""
    q, v, idx = x.q_BSGRK, x.v_BTGV, x.idx_BSGN
    arguments = problem(x.branch, q, x.k_BTGK, x.pos_BS, x.start_BS, x.geometry, x.scale, v.shape[-1])
    require("values", v, (*x.k_BTGK.shape[:-1], v.shape[-1]), q.dtype)
    arguments.v = rows(v)
    if idx is not None:
        require("chosen blocks", idx, (*q.shape[:3], idx.shape[-1]), torch.int32)
        arguments.idx, arguments.n_sel = idx.data_ptr(), idx.shape[-1]
    return arguments


def _forward_problem(x: BranchInputs) -> tuple[library.AttentionProblem, Tensor, Tensor]:
    """The arguments of a forward pass, with the output and the log-sum-exps that it writes."""
    arguments = _problem(x)
    out = x.q_BSGRK.new_empty((*x.q_BSGRK.shape[:-1], x.v_BTGV.shape[-1]))
    lse = x.q_BSGRK.new_empty(x.q_BSGRK.shape[:-1], dtype=torch.float32)
    arguments.out, arguments.lse = rows(out), lse.data_ptr()
    return arguments, out, lse


def _new_choice(q_BSGRK: Tensor, geometry: Geometry) -> Tensor:
    return q_BSGRK.new_empty((*q_BSGRK.shape[:3], geometry.n_sel), dtype=torch.int32)


def _index(x_BS: Tensor) -> Tensor:
    return x_BS.to(torch.int64).contiguous()


def mix_forward(gates_BSGX3: Tensor, *branches_BSGRV: Tensor) -> Tensor:
    gates, branches = gates_BSGX3.float().contiguous(), [x.contiguous() for x in branches_BSGRV]
    out = torch.empty_like(branches[0])
    arguments = _mix_problem(gates, branches)
    arguments.out = out.data_ptr()
    check(library.load().nsa_mix(byref(arguments)))
    return out


def mix_backward(
    dout_BSGRV: Tensor, gates_BSGX3: Tensor, *branches_BSGRV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dout, gates = dout_BSGRV.contiguous(), gates_BSGX3.float().contiguous()
    branches = [x.contiguous() for x in branches_BSGRV]
    dgates, dbranches = torch.empty_like(gates), [torch.empty_like(x) for x in branches]
    arguments = _mix_problem(gates, branches)
    require("gradients of the mix", dout, branches[0].shape, branches[0].dtype)
    arguments.dout, arguments.dgates = dout.data_ptr(), dgates.data_ptr()
    arguments.dbranches[:] = [x.data_ptr() for x in dbranches]
    check(library.load().nsa_mix(byref(arguments)))
    return dgates.to(gates_BSGX3.dtype), dbranches[0], dbranches[1], dbranches[2]


def _mix_problem(gates: Tensor, branches: list[Tensor]) -> library.GateMix:
    first = branches[0]
    dtype = first.dtype
    if first.dim() != 5 or first.shape[3] < 1 or dtype not in library.DTYPES:
        raise ConfigError(f"a branch is {dtype} of shape {list(first.shape)}: it must be [B, S, G, R, V].")
    *_, R, V = first.shape
    for branch in branches:
        require("branches", branch, first.shape, dtype)
    n_gates = 1 if gates.dim() == 5 and gates.shape[3] == 1 else R
    require("gates", gates, (*first.shape[:3], n_gates, 3), torch.float32)
    arguments = library.GateMix(
        library.DTYPES[dtype], library.isa_for(dtype), torch.get_num_threads(), gates.numel() // 3, R // n_gates, V
    )
    arguments.gates = gates.data_ptr()
    arguments.branches[:] = [x.data_ptr() for x in branches]
    return arguments
