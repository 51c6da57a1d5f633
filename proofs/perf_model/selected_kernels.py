"""Work of the selected-attention kernels: per key block the queries that selected it, then merging partial results."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from nsa.kernels.triton import PIECE
from nsa.kernels.triton.block_index import IndexSizes, index_sizes
from nsa.kernels.triton.selected import keys_of, most_cuts, rows_of, span_of
from proofs.perf_model.range_kernels import INDEX, tiles_of
from proofs.perf_model.selection_overlap import SelectionOverlap
from proofs.perf_model.work import KernelWork, LaunchSizes

POSITION = 8  # bytes of a position as the layout has it


def forward(sizes: LaunchSizes, overlap: SelectionOverlap) -> Iterator[KernelWork]:
    yield selected_forward(sizes, overlap)
    yield merge_slots(sizes, overlap)


def backward(sizes: LaunchSizes, overlap: SelectionOverlap) -> Iterator[KernelWork]:
    yield selected_backward(sizes, overlap)
    yield add_slots(sizes, overlap)
    yield add_pieces(sizes, overlap)


@dataclass(frozen=True)
class BlockReaders:
    """Queries that selected each key block, as a kernel's tiles process them: all windows and groups."""

    trips: int
    inner: int
    """Trips without masks."""
    pieces: int
    """Pieces with at least one query, in all spans."""
    rows: int
    """Query heads of all chosen blocks."""
    m: int
    keys: int
    cuts: int
    n_spans: int
    programs: Tensor
    """Steps of each program of a span, in their order."""


def index_of(sizes: LaunchSizes) -> IndexSizes:
    """Sizes of the block index of a row of one document."""
    s, g, width = sizes.shape, sizes.shape.geometry, max(sizes.shape.d_k, sizes.shape.d_v)
    columns = width * g.n_sel * most_cuts(width, sizes.element, g.l_sel, sizes.code)
    most = span_of(sizes.length, s.n_heads * sizes.element, s.d_k, columns)
    return index_sizes((1, sizes.length, s.n_kv_groups, g.n_sel), 1, g.l_sel, sizes.length, most)


def readers(sizes: LaunchSizes, overlap: SelectionOverlap, backward: bool) -> BlockReaders:
    s, tiles, spans = sizes.shape, tiles_of(_kernel(backward), sizes), index_of(sizes).n_spans
    keys, cuts = keys_of(tiles, s.geometry.l_sel)
    trips, pieces = overlap.trips(PIECE, tiles.m, spans)
    rows = overlap.entries() * s.n_heads
    inner = trips * cuts - overlap.masked_trips(PIECE, tiles.m, keys, spans)
    groups, programs = s.n_kv_groups, overlap.piece_steps(PIECE, tiles.m, spans).repeat(s.n_kv_groups * cuts)
    return BlockReaders(
        trips * cuts * groups, inner * groups, pieces * groups, rows, tiles.m, keys, cuts, spans, programs
    )  # fmt: skip


def _kernel(backward: bool) -> str:
    return "selected_backward" if backward else "selected_forward"


def selected_forward(sizes: LaunchSizes, overlap: SelectionOverlap) -> KernelWork:
    s, r, (k, v) = sizes.shape, readers(sizes, overlap, False), sizes.padded()
    slots = r.rows * r.cuts * (s.d_v * sizes.element + 4)
    keys = r.pieces * s.geometry.l_sel * sizes.key_bytes()
    return KernelWork(
        "selected_forward", False, r.trips, r.inner,
        flops=r.trips * 2.0 * r.m * r.keys * (k + v),
        exponentials=r.trips * float(r.m * r.keys),
        l2_bytes=r.rows * r.cuts * (s.d_k * sizes.element + 3 * INDEX) + keys + slots,
        hbm_bytes=sizes.queries_bytes() + r.n_spans * _keys_bytes(sizes) + slots,
        shared_bytes=sizes.queries_bytes() / s.n_kv_groups / r.n_spans,
        launches=r.n_spans,
        programs=r.programs,
    )  # fmt: skip


def merge_slots(sizes: LaunchSizes, overlap: SelectionOverlap) -> KernelWork:
    r, s = readers(sizes, overlap, False), sizes.shape
    slots = r.rows * r.cuts * (s.d_v * sizes.element + 4)
    turns = _tiles(sizes, s.d_v) * s.geometry.n_sel
    gates = sizes.rows * s.n_kv_groups * 3 * 4
    own = 4 * sizes.outputs_bytes() + sizes.level_bytes() + gates  # the other branches are read, and mixed with it
    work = _merge("merge_slots", False, sizes, slots + own, turns, r.n_spans)
    return replace(work, exponentials=turns * rows_of(s.d_v) * 4.0 * r.cuts)


def selected_backward(sizes: LaunchSizes, overlap: SelectionOverlap) -> KernelWork:
    s, r, (k, v) = sizes.shape, readers(sizes, overlap, True), sizes.padded()
    slots = r.rows * r.cuts * s.d_k * sizes.element
    keys = r.pieces * s.geometry.l_sel * sizes.key_bytes()
    sums = r.pieces * s.geometry.l_sel * (s.d_k + s.d_v) * 4.0
    rows = sizes.queries_bytes() + sizes.outputs_bytes() + 2 * sizes.level_bytes()
    return KernelWork(
        "selected_backward", True, r.trips, r.inner,
        flops=r.trips * 2.0 * r.m * r.keys * (3 * k + 2 * v),
        exponentials=r.trips * float(r.m * r.keys),
        l2_bytes=r.rows * r.cuts * (sizes.key_bytes() + 2 * 4 + 3 * INDEX) + keys + sums + slots,
        hbm_bytes=rows + r.n_spans * _keys_bytes(sizes) + sums + slots,
        shared_bytes=rows / s.n_kv_groups / r.n_spans,
        launches=r.n_spans,
        programs=r.programs,
    )  # fmt: skip


def add_slots(sizes: LaunchSizes, overlap: SelectionOverlap) -> KernelWork:
    r, s = readers(sizes, overlap, True), sizes.shape
    moved = r.rows * r.cuts * s.d_k * sizes.element + 3 * sizes.queries_bytes()  # those of the other branches are read
    return _merge("add_slots", True, sizes, moved, _tiles(sizes, s.d_k) * s.geometry.n_sel, r.n_spans)


def add_pieces(sizes: LaunchSizes, overlap: SelectionOverlap) -> KernelWork:
    """Keys and values in one launch. Sums of several spans wait in fp32."""
    r, s = readers(sizes, overlap, True), sizes.shape
    moved = r.pieces * s.geometry.l_sel * (s.d_k + s.d_v) * 4.0
    if r.n_spans > 1:
        moved += (2 * r.n_spans - 1) * _keys_bytes(sizes) * 4 / sizes.element
    else:
        moved += _keys_bytes(sizes)
    return KernelWork("add_pieces", True, l2_bytes=moved, hbm_bytes=moved, launches=r.n_spans)


def _keys_bytes(sizes: LaunchSizes) -> float:
    return sizes.length * sizes.shape.n_kv_groups * sizes.key_bytes()


def _tiles(sizes: LaunchSizes, width: int) -> int:
    return -(-sizes.rows // rows_of(width)) * sizes.shape.n_kv_groups


def _merge(name: str, backward: bool, sizes: LaunchSizes, moved: float, turns: int, launches: int) -> KernelWork:
    """Every query head looks up its blocks' slots in the cache; the block numbers are read once per query."""
    lookups = sizes.rows * sizes.shape.n_kv_groups * sizes.shape.geometry.n_sel
    once = sizes.length * sizes.shape.n_kv_groups * sizes.shape.geometry.n_sel * INDEX
    return KernelWork(
        name, backward, turns, l2_bytes=moved + lookups * (2 * INDEX + POSITION), hbm_bytes=moved + once,
        launches=launches,
    )  # fmt: skip
