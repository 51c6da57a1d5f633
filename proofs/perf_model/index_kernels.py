"""Work of the memory-bound kernels around attention: bounds, block index and gate mix, for an unpacked row.

Entries per window come from the measured selection (`SelectionOverlap`).
"""

from collections.abc import Iterator

from nsa.kernels.triton import PIECE
from nsa.kernels.triton.block_index import WINDOWS_PER_CHUNK, chunk_sizes
from nsa.kernels.triton.bounds import CHUNK
from proofs.perf_model.range_kernels import INDEX, tiles_of
from proofs.perf_model.selected_kernels import POSITION, index_of
from proofs.perf_model.selection_overlap import SelectionOverlap
from proofs.perf_model.work import KernelWork, LaunchSizes


def forward(sizes: LaunchSizes, overlap: SelectionOverlap) -> Iterator[KernelWork]:
    yield bounds(sizes)
    yield from chosen(sizes, overlap)


def backward(sizes: LaunchSizes, overlap: SelectionOverlap) -> Iterator[KernelWork]:
    """With the forward's bounds and index."""
    yield mix_backward(sizes)
    yield seen_by(sizes)


def moves(
    name: str, backward: bool, moved: float, programs: int = 0, again: float = 0.0, launches: int = 1
) -> KernelWork:  # fmt: skip
    """`again`: bytes read from the cache a second time."""
    return KernelWork(name, backward, programs, l2_bytes=moved + again, hbm_bytes=moved, launches=launches)


def bounds(sizes: LaunchSizes) -> KernelWork:
    """Bounds of two branches."""
    return moves("bounds", False, 2 * (sizes.length * 2.0 * (POSITION + INDEX) + _chunks(sizes) * 2 * INDEX))


def seen_by(sizes: LaunchSizes) -> KernelWork:
    """A tile of keys reads all chunks of queries, then the first and the last one that it touches."""
    looked = 2.0 * (_chunks(sizes) + min(CHUNK, sizes.length)) * INDEX
    each = [-(-n // tiles_of("range_dkv", sizes).n) * (looked + 2 * INDEX) for n in (sizes.n_compressed, sizes.length)]
    once = sum(min(touched, 2.0 * sizes.length * INDEX) for touched in each)
    return moves("seen_by", True, once, again=sum(each) - once)


def chosen(sizes: LaunchSizes, overlap: SelectionOverlap) -> Iterator[KernelWork]:
    s, index = sizes.shape, index_of(sizes)
    n_windows, spans = index.n_windows, index.n_spans
    at = chunk_sizes(s.geometry.n_sel, s.geometry.l_sel)
    n_chunks = -(-sizes.length // at["CHUNK"]) * s.n_kv_groups
    slots, entries = n_chunks * 2 ** at["LOG"], sizes.length * s.n_kv_groups * s.geometry.n_sel
    real = overlap.entries() * s.n_kv_groups
    runs = overlap.blocks(at["CHUNK"]) * s.n_kv_groups
    run_length = -(-(n_windows + 1) // WINDOWS_PER_CHUNK)
    counted, places = -(-n_chunks // run_length) * (n_windows + 1), s.n_kv_groups * n_windows * spans
    where = real * 2 * POSITION

    def work(name: str, moved: float, programs: int = 0, again: float = 0.0) -> KernelWork:
        return moves(name, False, moved, programs, again)

    sorts = entries * INDEX + 2 * slots * INDEX + sizes.length * (INDEX + POSITION)
    # Neighbours of each entry and its count come from the cache, as do the counts of windows after they are cleared.
    again = entries * POSITION + where + (6 * slots + real + 3 * runs) * INDEX
    yield work("sort_chunks", sorts + counted * INDEX, n_chunks, again=again)
    yield work("place_chunks", counted * 3 * INDEX + (places + spans * s.n_kv_groups) * 2 * INDEX)
    yield work("place_windows", places * 4 * INDEX + 2 * INDEX)
    n_pieces = entries // PIECE + places
    steps = (places + 1).bit_length()
    again = where + real * 3 * INDEX + n_pieces * steps * INDEX
    yield work("fill", 2 * slots * INDEX + real * 2 * INDEX + n_pieces * INDEX, n_chunks, again=again)


def mix_backward(sizes: LaunchSizes) -> KernelWork:
    """A gate per head: every output once, and their gradients; the selected branch's delta."""
    gates = sizes.rows * sizes.shape.n_kv_groups * 3 * 4
    return moves("mix_backward", True, 7 * sizes.outputs_bytes() + 2 * gates + sizes.level_bytes())


def _chunks(sizes: LaunchSizes) -> int:
    return -(-sizes.length // CHUNK)
