"""ctypes bindings of the compiled C++ library: one structure per call, no torch in between.

ctypes releases the interpreter while a kernel runs. Threads are torch's own where its OpenMP runtime can be found: its
waiting threads spin, and a second thread pool would compete with them.
"""

import ctypes
import functools
from ctypes import POINTER, c_double, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from nsa.errors import ConfigError, KernelUnavailable
from nsa.geometry import Geometry
from nsa.kernels.cpu import build

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BRANCHES = {"sliding": 0, "compressed": 1, "selected": 2}
ISAS = ("plain", "avx2", "avx512", "amx")
_OUTCOMES = {
    1: "documents overlap on the key axis: gradients of keys are summed per document. Set kernels.selected='portable'.",
    2: "there is not enough memory for packed keys and values. Shorten the sequence or the batch.",
}
_BAD_ARGUMENTS = {
    3: "sizes must be from 1 to 2³¹ − 1, and for block selection d must divide l and l_sel, and n_sel be at least 3",
    4: "positions must lie within 2⁴⁰ of the keys, and for block selection within what the compressed keys cover",
    5: "the block table of a row has no page for tokens that the row holds",
}
NO_ROOM = -1
"""What `nsa_append` returns where a row has no slot for its token; nothing is written then."""

_forced: str | None = None


class TensorRows(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        *((name, c_int64) for name in ("batch", "token", "group", "head")),
        ("table", c_void_p),
        *((name, c_int64) for name in ("table_row", "page", "page_tokens", "n_pages")),
    )


class AttentionProblem(ctypes.Structure):
    """src/problem.h, field by field."""

    _fields_ = (
        *((name, c_int64) for name in ("dtype", "isa", "threads", "branch")),
        *((name, c_int64) for name in ("B", "S", "T", "G", "R", "K", "V")),
        *((name, c_int64) for name in ("w", "l", "d", "l_sel", "n_sel")),
        ("scale", c_double),
        *((name, TensorRows) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        *((name, c_void_p) for name in ("lse", "dlse", "pos", "start", "idx")),
    )


class DecodeStep(ctypes.Structure):
    _fields_ = (
        *((name, AttentionProblem) for name in ("compressed", "selected", "sliding")),
        ("gates", c_void_p),
        ("gates_per_group", c_int64),
        ("far", c_void_p),
    )


class GateMix(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("dtype", "isa", "threads", "n_gates", "heads", "V")),
        ("gates", c_void_p),
        ("branches", c_void_p * 3),
        *((name, c_void_p) for name in ("out", "dout", "dgates")),
        ("dbranches", c_void_p * 3),
    )


class _CacheStream(ctypes.Structure):
    _fields_ = (("fresh", TensorRows), ("slots", TensorRows), ("n_slots", c_int64), ("width", c_int64))


class CacheAppend(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("dtype", "isa", "B", "G", "l", "d", "w", "means")),
        ("streams", _CacheStream * 6),
        ("compressed", TensorRows * 2),
        ("n_compressed_slots", c_int64),
        *((name, c_void_p) for name in ("first", "length", "n_compressed", "pos", "window_pos")),
    )


@functools.cache
def load() -> ctypes.CDLL:
    """The library, compiled if need be; raises `build.BuildError` where it cannot be."""
    library = ctypes.CDLL(str(build.library()))
    takes = dict(
        **dict.fromkeys(("nsa_forward", "nsa_backward", "nsa_choose"), AttentionProblem),
        nsa_decode=DecodeStep, nsa_mix=GateMix, nsa_append=CacheAppend,
    )  # fmt: skip
    for name, structure in takes.items():
        function = getattr(library, name)
        function.argtypes, function.restype = (POINTER(structure),), c_int64
    library.nsa_best_isa.restype = library.nsa_sizes.restype = c_int64
    assert library.nsa_sizes() == sum(map(ctypes.sizeof, (DecodeStep, CacheAppend, GateMix)))
    library.nsa_use_openmp.argtypes = (c_void_p,)
    library.nsa_use_openmp(_openmp_parallel())
    return library


@functools.cache
def best_isa() -> str:
    return ISAS[load().nsa_best_isa()]


def force_isa(name: str | None) -> None:
    """Use a lesser instruction set than the machine's best, for tests; None resets it."""
    global _forced
    if name is not None and ISAS.index(name) > ISAS.index(best_isa()):
        raise KernelUnavailable(f"this machine supports {best_isa()} at best, not {name}. Force a lesser one.")
    _forced = name


def isa_for(dtype: torch.dtype) -> int:
    return _isa_number(_forced or best_isa(), dtype)


@functools.cache  # called twice by every decode step
def _isa_number(name: str, dtype: torch.dtype) -> int:
    isa = ISAS.index(name)
    return isa if dtype == torch.bfloat16 else min(isa, ISAS.index("avx512"))  # tiles multiply bf16 alone


def problem(
    branch: str, q: Tensor, k: Tensor, pos: Tensor, start: Tensor, geometry: Geometry, scale: float, d_v: int = 0
) -> AttentionProblem:
    """Queries and keys, checked: the library sees addresses only and cannot check them."""
    arguments = query_problem(branch, q, pos, start, geometry, scale, d_v)
    B, _, G, _, K = q.shape
    require("keys", k, (B, k.shape[1] if k.dim() > 1 else -1, G, K), q.dtype)
    arguments.T, arguments.k = k.shape[1], rows(k)
    return arguments


def query_problem(
    branch: str, q: Tensor, pos: Tensor, start: Tensor, geometry: Geometry, scale: float, d_v: int
) -> AttentionProblem:
    """Check what is common to all computations; keys are left to the caller."""
    if q.dim() != 5 or q.dtype not in DTYPES:
        raise ConfigError(f"queries are {_describe(q)}: they must be [B, S, G, R, K] in fp32, bf16 or fp16.")
    B, S, G, R, K = q.shape
    require("positions", pos, (B, S), torch.int64)
    require("document starts", start, (B, S), torch.int64)
    threads, g = torch.get_num_threads(), geometry
    arguments = AttentionProblem(
        DTYPES[q.dtype], isa_for(q.dtype), threads, _BRANCHES[branch], B, S, 0, G, R, K, d_v,
        g.w, g.l, g.d, g.l_sel, g.n_sel, scale,
    )  # fmt: skip
    arguments.q = rows(q)
    arguments.pos, arguments.start = pos.data_ptr(), start.data_ptr()
    return arguments


def require(what: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise for a tensor where the library would read or write out of bounds."""
    if x.shape != shape or x.dtype is not dtype or not x.is_cpu:
        raise ConfigError(
            f"{what} are {_describe(x)}: with these queries they must be {dtype} of shape {list(shape)} on the CPU. "
            f"Pass tensors of one batch, one length and one dtype."
        )


def _describe(x: Tensor) -> str:
    return f"{x.dtype} of shape {list(x.shape)} on {x.device}"


def rows(x: Tensor) -> TensorRows:
    """[B, T, G, (R,) width] with the width contiguous."""
    return TensorRows(x.data_ptr(), *x.stride()[:-1])


def page_rows(what: str, x: Tensor, table_BP: Tensor, batch: int, groups: int, width: int) -> TensorRows:
    """[pages, G, states, width] with the width contiguous, and the pages of each row."""
    if x.dim() != 4 or not x.is_cpu or (x.shape[1], x.shape[3]) != (groups, width) or (x.stride(-1) != 1 < width):
        raise ConfigError(
            f"pages of {what} are {_describe(x)} with strides {x.stride()}: they must be [pages, {groups}, states, "
            f"{width}] on the CPU, {width} numbers next to each other."
        )
    if table_BP.dim() != 2 or len(table_BP) != batch or table_BP.dtype is not torch.int32 or not table_BP.is_cpu:
        raise ConfigError(f"the block table is {_describe(table_BP)}: it must be int32 [{batch}, pages] on the CPU.")
    if table_BP.stride(-1) != 1 < table_BP.shape[1]:
        raise ConfigError("the block table has gaps between the pages of a row. Pass a contiguous one.")
    page, group, token, _ = x.stride()
    return TensorRows(x.data_ptr(), 0, token, group, 0, table_BP.data_ptr(), table_BP.stride(0), page, *_sizes(x))


def _sizes(pages: Tensor) -> tuple[int, int]:
    return pages.shape[2], pages.shape[0]


def dense(x: Tensor) -> Tensor:
    """Any strides will do, but for the last axis."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def check(outcome: int) -> None:
    """Raise what a function of the library has returned, unless it is 0."""
    if outcome in _BAD_ARGUMENTS:
        raise ConfigError(f"a CPU kernel was called with unsupported arguments: {_BAD_ARGUMENTS[outcome]}.")
    if outcome:
        raise KernelUnavailable(f"a CPU kernel stopped: {_OUTCOMES[outcome]}")


def _openmp_parallel() -> int | None:
    """The address of GOMP_parallel as torch's own calls find it, None where torch has no OpenMP.

    GNU's runtime has the function, LLVM's and Intel's do too. A process may hold several runtimes (scikit-learn brings
    one): the loader's global order is asked first, because a preloaded runtime replaces torch's there.
    """
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for library in (None, str(torch_cpu)):
        try:
            function = ctypes.CDLL(library).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, c_void_p).value
    return None
