"""Baseline for selected attention: the paper's group-centric loop, one query of a group per program, block by block.

Heads are rows, padded to the 16 that a matrix instruction has; nothing is shared between queries but the cache.
"""

from proofs.perf_model.range_kernels import INDEX
from proofs.perf_model.work import KernelWork, LaunchSizes

ROWS = 16


def group_centric_forward(sizes: LaunchSizes) -> KernelWork:
    s, g = sizes.shape, sizes.shape.geometry
    m = max(ROWS, 1 << (s.heads_per_group - 1).bit_length())
    everything = min(sizes.length, g.n_sel * g.l_sel)  # queries so early that all blocks are chosen
    reads = sum(at // g.l_sel + 1 for at in range(everything)) + (sizes.length - everything) * g.n_sel
    trips = reads * s.n_kv_groups
    k, v = sizes.padded()
    own = sizes.queries_bytes() + sizes.outputs_bytes() + sizes.level_bytes() + trips * INDEX
    axis = sizes.length * sizes.key_bytes()
    return KernelWork(
        "group-centric selected forward", False, trips,
        flops=trips * 2.0 * m * g.l_sel * (k + v),
        exponentials=trips * float(m * g.l_sel + m),
        l2_bytes=trips * g.l_sel * sizes.key_bytes() + own,
        hbm_bytes=axis * s.n_kv_groups + own,
        shared_bytes=axis,
    )  # fmt: skip
