"""Backend `flash`: the sliding and the compressed branch by FlashAttention 4 or 2, else by PyTorch's FlexAttention.

It stands beside the Triton backend, which selects and attends to what is selected: no package does that with gradients.
A query of either branch sees one range of keys. FlexAttention reads it in a mask, for every layout. FlashAttention
serves rows of one document (`_is_direct`), both branches as causal attention of segments that end together. Its
gradients have one order of summation and include that of the log-sum-exps.

- Sliding: the window reaches w − 1 keys back. Queries and keys outside a row's document are segments of their own, one
  without keys or one without queries; nothing is read on the host.
- Compressed: `d` queries in a row see the same entries. They become heads of one query, and row c sees entries 0 to c:
  plain causal attention of as many rows as entries, with R · d heads per group.

B batch · S queries · T keys · C compressed entries · G kv groups · R heads per group · K key dim · V value dim ·
N rows of queries, M of keys, end to end · H heads · X any width
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.errors import KernelUnavailable
from nsa.kernels.interface import BranchInputs, Gradients, constant_when_traced, is_one_document
from nsa.kernels.ops import KernelFunctions
from nsa.kernels.precision import autocast_off, require_one_dtype
from nsa.kernels.reference import Attended

SERVED = ("compressed", "sliding")
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST, _ALIGNED = 256, 8
_PACKAGES = {"flash-attn-4": (9, 10), "flash-attn": (8, 9, 10, 12)}
"""Distributions in order of preference, major capabilities of their GPUs. On sm_120 FlashAttention 4 has no backward
pass with one order of summation, on sm_8x none at all."""
_TILE = 128
"""Queries and keys of a block of FlexAttention's mask."""
_MOST_EMPTY = 2
"""Places for folded queries per query at most: keys of a cache are more than the queries of a chunk need."""


def why_not(branch: str, device: torch.device, dtype: torch.dtype, shape: Any) -> str | None:
    if branch not in SERVED:
        return "it computes the compressed and the sliding branch: FlashAttention and FlexAttention have no more"
    if device.type != "cuda":
        return f"it runs on a GPU of NVIDIA or AMD, not on {device.type}: FlexAttention has no backward pass there"
    if dtype not in (*_FLASH_DTYPES, torch.float32):
        return f"it computes float32, bfloat16, float16, not {dtype}"
    return None


@constant_when_traced
def package_for(device: torch.device) -> str:
    """The FlashAttention that has kernels for this GPU and is installed, with its version; empty: none."""
    return _package_for(device)


@cache
def _package_for(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return ""
    for name, majors in _PACKAGES.items():
        with suppress(PackageNotFoundError):
            installed = f"{name} {version(name)}"
            if torch.cuda.get_device_capability(device)[0] in majors:
                return installed
    return ""


def functions(by_package: KernelFunctions) -> KernelFunctions:
    """The branches as functions. `by_package`: this module's kernels as operators."""

    def served(branch: str) -> Callable[..., Attended]:
        def attend(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, start: Tensor, *, return_lse: bool = False,
                   **options: Any) -> Attended:  # fmt: skip
            require_one_dtype(q, k, v)
            x = BranchInputs(branch, q, k, v, None, pos, start, **options)
            if package_for(q.device) and _is_direct(x):
                attended: Attended = getattr(by_package, branch)(
                    q, k, v, pos, start, **options, return_lse=return_lse
                )  # fmt: skip
                return attended
            with autocast_off(q):
                out, lse = _by_flex(x) if k.shape[1] and q.shape[1] else _unseen(x)
            return (out, lse) if return_lse else out

        return attend

    return KernelFunctions(served("compressed"), select, select, served("sliding"))


def select(*args: Any, **options: Any) -> NoReturn:
    raise KernelUnavailable(
        "backend 'flash' computes the compressed and the sliding branch: no package selects blocks or attends to them "
        "with gradients. Set kernels.select and kernels.selected to 'auto'."
    )


def _unseen(x: BranchInputs) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exps without queries or keys; their gradients are zeros."""
    zero = (x.q_BSGRK.sum() + x.k_BTGK.sum() + x.v_BTGV.sum()) * 0
    shape = x.q_BSGRK.shape[:-1]
    lse = zero.detach().new_full(shape, -torch.inf, dtype=torch.float32)
    return zero.expand(*shape, x.v_BTGV.shape[-1]).contiguous(), lse


def _ranges(x: BranchInputs) -> tuple[Tensor, Tensor]:
    """First visible key of each query and the one after the last, int32 [B, S]; both 0 for a query that sees none."""
    g, pos, start, n = x.geometry, x.pos_BS, x.start_BS, x.k_BTGK.shape[1]
    if x.branch == "sliding":
        low, high = start + (pos - g.w + 1).clamp(min=0), start + pos + 1
    else:
        low, high = start, start + (pos - g.l + 1).div(g.d, rounding_mode="floor") + 1
    low, high = low.clamp(0, n), high.clamp(0, n)
    seen = (pos >= 0) & (high > low)
    return low.where(seen, 0).int(), high.where(seen, 0).int()


# FlexAttention.


def _by_flex(x: BranchInputs) -> tuple[Tensor, Tensor]:
    traced_elsewhere = torch.compiler.is_compiling() or x.q_BSGRK.device.type == "cpu"
    run = partial(_flex_attention, x.scale) if traced_elsewhere else _compiled_flex(x.scale)
    low, high = _ranges(x)
    out, lse = run(x.q_BSGRK.flatten(2, 3).transpose(1, 2), x.k_BTGK.transpose(1, 2), x.v_BTGV.transpose(1, 2), low,
                   high)  # fmt: skip
    groups = x.k_BTGK.shape[2]
    return out.transpose(1, 2).unflatten(2, (groups, -1)), lse.transpose(1, 2).unflatten(2, (groups, -1))


@cache
def _compiled_flex(scale: float) -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(partial(_flex_attention, scale), fullgraph=True)


def _flex_attention(scale: float, q: Tensor, k: Tensor, v: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= low[b, i]) & (j < high[b, i])

    blocks = key_blocks(low, high, k.shape[2])
    mask = BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=_TILE, mask_mod=visible, seq_lengths=(q.shape[2], k.shape[2]))
    out, aux = flex_attention(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )  # fmt: skip
    assert aux.lse is not None
    return out, aux.lse


def key_blocks(low_BS: Tensor, high_BS: Tensor, n_keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks of keys for each tile of queries, in the form of `BlockMask.from_kv_blocks`: number and indices of those
    that the mask is read for, and of those that all queries of the tile see whole."""
    tiles, blocks = (-(-n // _TILE) for n in (low_BS.shape[1], n_keys))
    missing = tiles * _TILE - low_BS.shape[1]
    seen_BS = high_BS > low_BS
    lows = [F.pad(low_BS.where(seen_BS, n), (0, missing), value=n).unflatten(1, (tiles, -1)) for n in (n_keys, 0)]
    tops = F.pad(high_BS, (0, missing)).unflatten(1, (tiles, -1))
    begin, end = lows[0].amin(2) // _TILE, (tops.amax(2) + _TILE - 1) // _TILE
    every = F.pad(seen_BS, (0, missing)).unflatten(1, (tiles, -1)).all(2)
    whole, whole_end = (lows[1].amax(2) + _TILE - 1) // _TILE, tops.amin(2) // _TILE
    n_whole = ((whole_end - whole).clamp(min=0) * every).int()
    n_before = (whole - begin).where(n_whole > 0, end - begin)
    block_J = torch.arange(blocks, dtype=torch.int32, device=low_BS.device)
    partial = begin[..., None] + block_J + n_whole[..., None] * (block_J >= n_before[..., None])
    n_partial = ((end - begin).clamp(min=0) - n_whole).int()
    indices = (index.clamp(0, blocks - 1).int()[:, None] for index in (partial, whole[..., None] + block_J))
    return n_partial[:, None], next(indices), n_whole[:, None], next(indices)


# FlashAttention 4 and 2.


def _is_direct(x: BranchInputs) -> bool:
    """Whether FlashAttention computes this call: its dtypes and widths, rows of one document, queries and keys."""
    queries, keys, d_k, d_v = x.q_BSGRK.shape[1], x.k_BTGK.shape[1], x.k_BTGK.shape[-1], x.v_BTGV.shape[-1]
    if x.q_BSGRK.dtype not in _FLASH_DTYPES or d_k % _ALIGNED or d_v % _ALIGNED:
        return False
    places = keys * x.geometry.d if x.branch == "compressed" else 0
    width = max(d_k, d_v + _ALIGNED)  # one more value carries the gradient of the log-sum-exp
    one_document = is_one_document(x.start_BS) and min(queries, keys) > 0
    return one_document and width <= _WIDEST and places <= _MOST_EMPTY * queries


def attend_forward(x: BranchInputs) -> tuple[Tensor, Tensor]:
    form = _segments(x)
    q, k, v = form.rows(x.q_BSGRK), x.k_BTGK.flatten(0, 1), x.v_BTGV.flatten(0, 1)
    out, lse = _forward(form, package_for(q.device), q, k, v, x.scale)
    out, lse = form.by_query(out).masked_fill(form.unseen, 0), form.by_query(lse.t()[..., None])[..., 0]
    return out.contiguous(), lse.masked_fill(form.unseen[..., 0], -torch.inf).contiguous()


def attend_backward(
    x: BranchInputs, out_BSGRV: Tensor, lse_BSGR: Tensor, dout_BSGRV: Tensor, dlse_BSGR: Tensor | None
) -> Gradients:
    form = _segments(x)

    def per_row(y_BSGR: Tensor, empty: float) -> Tensor:
        return form.rows(y_BSGR[..., None], empty)[..., 0].t().contiguous()

    q, k, v = form.rows(x.q_BSGRK), x.k_BTGK.flatten(0, 1), x.v_BTGV.flatten(0, 1)
    out, dout = form.rows(out_BSGRV), form.rows(dout_BSGRV)
    lse = per_row(lse_BSGR.masked_fill(form.unseen[..., 0], torch.inf), torch.inf)  # weights of 0
    dlse = None if dlse_BSGR is None else per_row(dlse_BSGR.float(), 0)
    dq, dk, dv = _backward(form, package_for(q.device), q, k, v, out, lse, dout, dlse, x.scale)
    dq_BSGRK = form.by_query(dq).masked_fill(form.unseen, 0)
    return dq_BSGRK, dk.view(x.k_BTGK.shape), dv.view(x.v_BTGV.shape)


class _Segments(NamedTuple):
    """A branch as causal attention of segments that end together: rows of queries and of keys, end to end."""

    query_ends: Tensor
    """Cumulative lengths of the segments, 0 first: int32."""
    key_ends: Tensor
    most_queries: int
    most_keys: int
    window: int | None
    """Keys before its own that a row sees at most."""
    unseen: Tensor
    """Whether a query sees nothing, [B, S, 1, 1, 1]."""
    place: tuple[Tensor, Tensor] | None
    """Row and place in it of each query, [B, S]; None: rows are the queries."""
    query: Tensor | None
    """Query of each place, [B, C, d]; S where there is none."""
    heads: tuple[int, int]
    """Groups, and heads per group, of the queries."""

    def rows(self, x_BSGRX: Tensor, empty: float = 0) -> Tensor:
        """[N, H, X] of queries; `empty`: where there is none."""
        if self.query is None:
            return x_BSGRX.flatten(0, 1).flatten(1, 2)
        (B, S, G), device = x_BSGRX.shape[:3], x_BSGRX.device
        query_BC1d, row_B = self.query[:, :, None], torch.arange(B, device=device).view(-1, 1, 1, 1)
        folded = x_BSGRX[row_B, query_BC1d.clamp(max=S - 1), torch.arange(G, device=device)[:, None]]
        return folded.masked_fill((query_BC1d == S)[..., None, None], empty).flatten(0, 1).flatten(1, 3)

    def by_query(self, x_NHX: Tensor) -> Tensor:
        """The way back; what queries that see nothing get has no meaning."""
        B, S, *_ = self.unseen.shape
        G, R = self.heads
        if self.place is None or self.query is None:
            return x_NHX.view(B, S, G, R, -1)
        C, d = self.query.shape[1:]
        row, at = self.place
        folded = x_NHX.view(B, C, G, d, R, -1)
        return folded[torch.arange(B, device=row.device)[:, None], row, :, at]


def _segments(x: BranchInputs) -> _Segments:
    (B, S, G, R, _), T, g = x.q_BSGRK.shape, x.k_BTGK.shape[1], x.geometry
    low, high = _ranges(x)
    unseen = (high <= low)[..., None, None, None]
    row_B1 = torch.arange(B, device=low.device)[:, None]

    def ends(begins: tuple[Tensor, ...], length: int) -> Tensor:
        """Begin of each segment of each row, and the end of all."""
        flat = (torch.stack(begins, 1) + row_B1 * length).flatten()
        return F.pad(flat, (0, 1), value=B * length).int()

    zero = torch.zeros_like(low[:, 0])
    if x.branch == "compressed":
        first = x.start_BS[:, 0].clamp(0, T)
        row = (high.long() - 1).clamp(min=0)
        at = x.pos_BS.remainder(g.d)  # d queries of one row follow one another
        places = (row * g.d + at).masked_fill(high <= low, T * g.d)
        query = torch.full((B, T * g.d + 1), S, device=low.device)
        query = query.scatter(1, places, torch.arange(S, device=low.device).expand(B, -1))[:, :-1].unflatten(1, (T, -1))
        cumulative = ends((zero, first), T)
        return _Segments(cumulative, cumulative, T, T, None, unseen, (row, at), query, (G, R))
    seen = (high > low).int()
    begin, count = seen.argmax(1), seen.sum(1)
    first, last = x.start_BS[:, 0].clamp(0, T), high.amax(1)
    first = torch.minimum(first, last)
    queries = ends((zero, begin, begin, begin + count, zero + S), S)
    return _Segments(queries, ends((zero, zero, first, last, last), T), S, T, g.w - 1, unseen, None, None, (G, R))


def _forward(
    form: _Segments, package: str, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [N, H, V] and log-sum-exps [H, N]."""
    if package.startswith("flash-attn-4"):
        kernels = import_module("flash_attn.cute.interface")
        out, lse, *_ = kernels._flash_attn_fwd(q, k, v, return_lse=True, **_options(form, scale, None))
        return out, lse
    kernels = import_module("flash_attn.flash_attn_interface")
    wide = _widened(q, k, v)
    out, lse, *_ = kernels._flash_attn_varlen_forward(*wide, **_options(form, scale, -1), **_UNUSED)
    return out[..., : v.shape[-1]], lse


def _backward(
    form: _Segments, package: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    dlse: Tensor | None, scale: float,
) -> list[Tensor]:  # fmt: skip
    """FlashAttention 2 takes no gradient of log-sum-exps. A value of 1 for every key, whose output is said to be 0 and
    whose gradient is that of the log-sum-exp, adds it to the gradient of each score."""
    if package.startswith("flash-attn-4"):
        kernels = import_module("flash_attn.cute.interface")
        gradients = [x.new_zeros(x.shape) for x in (q, k, v)]  # segments without queries or keys write none
        places = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        kernels._flash_attn_bwd(
            q, k, v, out, dout, lse, deterministic=True, dlse=dlse, **places, **_options(form, scale, None)
        )  # fmt: skip
        return gradients
    kernels = import_module("flash_attn.flash_attn_interface")
    values = v
    if dlse is not None:
        values, out = F.pad(v, (0, 1), value=1), F.pad(out, (0, 1))
        dout = torch.cat((dout, dlse.t()[..., None].to(dout.dtype)), -1)
    dout, q_, k_, v_, out = _widened(dout, q, k, values, out)
    gradients = [torch.zeros_like(x) for x in (q_, k_, v_)]
    kernels._flash_attn_varlen_backward(
        dout, q_, k_, v_, out, lse, *gradients, deterministic=True, **_options(form, scale, -1), **_UNUSED
    )  # fmt: skip
    return [gradient[..., : x.shape[-1]].contiguous() for gradient, x in zip(gradients, (q, k, v), strict=True)]


_UNUSED: dict[str, Any] = dict(dropout_p=0.0, softcap=0.0, alibi_slopes=None)


def _options(form: _Segments, scale: float, no_window: int | None) -> dict[str, Any]:
    return dict(
        cu_seqlens_q=form.query_ends, cu_seqlens_k=form.key_ends, max_seqlen_q=form.most_queries,
        max_seqlen_k=form.most_keys, softmax_scale=scale, causal=True, window_size_right=0,
        window_size_left=no_window if form.window is None else form.window,
    )  # fmt: skip


def _widened(*tensors: Tensor) -> list[Tensor]:
    """FlashAttention 2 has one width for queries, keys and values."""
    width = -(-max(x.shape[-1] for x in tensors) // _ALIGNED) * _ALIGNED
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]
