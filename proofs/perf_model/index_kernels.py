"""Work of the memory-bound kernels around attention: bounds, block index and gate mix, for an unpacked row.

Entries per window come from the measured selection (`SelectionOverlap`).
"""

from collections.abc import Iterator

from nsa.kernels.triton import PIECE
from nsa.kernels.triton.block_index import WINDOWS_PER_CHUNK, chunk_sizes
from nsa.kernels.triton.bounds import CHUNK
from proofs.perf_model.range_kernels import INDEX, tiles_of
from proofs.perf_model.selected_kernels import POSITION, n_spans
from proofs.perf_model.selection_overlap import SelectionOverlap
from proofs.perf_model.work import KernelWork, LaunchSizes


def forward(sizes: LaunchSizes, overlap: SelectionOverlap) -> Iterator[KernelWork]:
    for branch in ("compressed", "sliding"):
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
    run_length = -(-(n_windows + 1) // WINDOWS_PER_CHUNK)
    counted, places = -(-n_chunks // run_length) * (n_windows + 1), s.n_kv_groups * n_windows * spans
    where = real * 2 * POSITION

    def work(name: str, moved: float, programs: int = 0, again: float = 0.0) -> KernelWork:
        return moves(name, backward, moved, programs, again, launches=spans)

    sorts = entries * INDEX + 2 * slots * INDEX + sizes.length * (INDEX + POSITION)
    yield work("sort_chunks", sorts, n_chunks, again=entries * POSITION + where)
    # Neighbours of each entry and its count come from the cache, as do the counts of windows after they are cleared.
    yield work("rank_chunks", (3 * slots + counted) * INDEX, again=(3 * slots + real + 3 * runs) * INDEX)
    yield work("place_chunks", counted * 3 * INDEX + (places + spans * s.n_kv_groups) * 2 * INDEX)
    yield work("place_windows", places * 4 * INDEX + spans * 2 * INDEX)
    n_pieces = 2 * entries // PIECE + places
    steps = (places // spans + 1).bit_length()
    again = where + real * 3 * INDEX + n_pieces * steps * INDEX
    yield work("fill", 2 * slots * INDEX + real * 2 * INDEX + n_pieces * INDEX, n_chunks, again=again)


def mix(sizes: LaunchSizes, backward: bool) -> KernelWork:
    """A gate per head: every output once, and their gradients."""
    gates = sizes.rows * sizes.shape.n_kv_groups * 3 * 4
    if backward:
        return moves("mix_backward", True, 7 * sizes.outputs_bytes() + 2 * gates)
    return moves("mix_forward", False, 4 * sizes.outputs_bytes() + gates)


def _chunks(sizes: LaunchSizes) -> int:
    return -(-sizes.length // CHUNK)
