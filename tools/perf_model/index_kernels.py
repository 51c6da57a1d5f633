"""Work of the memory-bound kernels around attention: bounds, block index and gate mix, for an unpacked row.

Entries per window come from the measured selection (`SelectionOverlap`).
"""

from collections.abc import Iterator

from nsa.kernels.triton import PIECE
from nsa.kernels.triton.block_index import chunk_sizes
from nsa.kernels.triton.bounds import CHUNK
from tools.perf_model.range_kernels import INDEX, tiles_of
from tools.perf_model.selected_kernels import POSITION, n_spans
from tools.perf_model.selection_overlap import SelectionOverlap
from tools.perf_model.work import KernelWork, LaunchSizes


def forward(sizes: LaunchSizes, overlap: SelectionOverlap) -> Iterator[KernelWork]:
    """The compressed branch's bounds are computed twice: for its output and for the selection."""
    for branch in ("compressed", "compressed", "sliding"):
        yield bounds(sizes, branch, False)
    yield from chosen(sizes, overlap, False)
    yield mix(sizes, False)


def backward(sizes: LaunchSizes, overlap: SelectionOverlap) -> Iterator[KernelWork]:
    yield mix(sizes, True)
    for branch in ("compressed", "sliding"):
        yield bounds(sizes, branch, True)
        yield seen_by(sizes, branch)
    yield from chosen(sizes, overlap, True)


def moves(
    name: str, backward: bool, moved: float, programs: int = 0, again: float = 0.0, launches: int = 1
) -> KernelWork:  # fmt: skip
    """`again`: bytes read from the cache a second time."""
    return KernelWork(name, backward, programs, l2_bytes=moved + again, hbm_bytes=moved, launches=launches)


def bounds(sizes: LaunchSizes, branch: str, backward: bool) -> KernelWork:
    return moves(f"bounds {branch}", backward, sizes.length * 2.0 * (POSITION + INDEX) + _chunks(sizes) * 2 * INDEX)


def seen_by(sizes: LaunchSizes, branch: str) -> KernelWork:
    """A tile of keys reads all chunks of queries, then the first and the last one that it touches."""
    n_keys = sizes.length if branch == "sliding" else sizes.n_compressed
    n_tiles = -(-n_keys // tiles_of("range_dkv", sizes).n)
    looked = 2.0 * (_chunks(sizes) + min(CHUNK, sizes.length)) * INDEX
    touched = n_tiles * (looked + 2 * INDEX)
    once = min(touched, 2.0 * sizes.length * INDEX)
    return moves(f"seen_by {branch}", True, once, again=touched - once)


def chosen(sizes: LaunchSizes, overlap: SelectionOverlap, backward: bool) -> Iterator[KernelWork]:
    s, n_windows, spans = sizes.shape, sizes.shape.geometry.n_blocks(sizes.length), n_spans(sizes, backward)
    at = chunk_sizes(s.geometry.n_sel, s.geometry.l_sel)
    n_chunks = -(-sizes.length // at["CHUNK"]) * s.n_kv_groups
    slots, entries = n_chunks * 2 ** at["LOG"], sizes.length * s.n_kv_groups * s.geometry.n_sel
    real = overlap.entries() * s.n_kv_groups
    runs = overlap.blocks(at["CHUNK"]) * s.n_kv_groups
    counted, places = n_chunks * (n_windows + 1), s.n_kv_groups * n_windows * spans
    where = real * 2 * POSITION

    def work(name: str, moved: float, programs: int = 0, again: float = 0.0) -> KernelWork:
        return moves(name, backward, moved, programs, again, launches=spans)

    sorts = entries * INDEX + slots * INDEX + 2 * runs * INDEX + sizes.length * (INDEX + POSITION)
    yield work("sort_chunks", sorts, n_chunks, again=entries * POSITION + where)
    yield work("place_chunks", counted * 3 * INDEX + runs * INDEX + (places + spans * s.n_kv_groups) * 2 * INDEX)
    yield work("place_windows", places * 4 * INDEX + spans * 2 * INDEX)
    yield work("fill", slots * INDEX + real * 2 * INDEX, n_chunks, again=where + real * 4 * INDEX)
    n_pieces = 2 * entries // PIECE + places
    steps = (places // spans + 1).bit_length()
    yield work("find_pieces", n_pieces * INDEX, again=n_pieces * steps * INDEX)


def count_shape(sizes: LaunchSizes) -> tuple[int, int, int]:
    """Shape of the counters of chunks and windows that are cleared before sorting."""
    g = sizes.shape.geometry
    n_chunks = -(-sizes.length // chunk_sizes(g.n_sel, g.l_sel)["CHUNK"])
    return sizes.shape.n_kv_groups, n_chunks, g.n_blocks(sizes.length) + 1


def mix(sizes: LaunchSizes, backward: bool) -> KernelWork:
    """A gate per head: every output once, and their gradients."""
    gates = sizes.rows * sizes.shape.n_kv_groups * 3 * 4
    if backward:
        return moves("mix_backward", True, 7 * sizes.outputs_bytes() + 2 * gates)
    return moves("mix_forward", False, 4 * sizes.outputs_bytes() + gates)


def _chunks(sizes: LaunchSizes) -> int:
    return -(-sizes.length // CHUNK)
