"""Decode throughput of the attention over a KV cache, beside dense attention of the same shape: tokens per second.

    python -m tools.bench_decode [--batch 1,8,32] [--lengths 2k,8k,32k] [--dtype fp32] [--threads 2] [--ragged]

Each step appends one token per row and attends: dense SDPA in its fastest form over a preallocated cache, NSA with
every row's pages in order, and NSA with pages of a pool that rows took in turns. The implementations take turns step by
step in one process, so that other load of the machine falls on all of them. Projections and MLP are not included: they
are the same for all.

`floor` is the time that reading the keys and values of a step takes at the bandwidth measured in the same run. With one
thread all times are CPU time, which other processes lengthen less; with more they are wall time.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nsa.bench.case import TORCH_DTYPES
from nsa.bench.dense import DECODE_FORMS, fastest_decode_form
from nsa.bench.shapes import SHAPES, BenchShape
from nsa.core.branches import BranchStreams
from nsa.core.kv_cache import LayerCache
from nsa.core.nsa_attention import NSAAttention
from nsa.token_counts import parse_lengths, spell

STEPS = 40
FILLED_AT_ONCE = 1024
CHUNKS = 32  # in which rows of a pool are filled: appending to pages that are not in order copies them for the kernels


def uniform(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype).uniform_(-1, 1)


def lengths_of(batch: int, length: int, ragged: bool) -> list[int]:
    """All the same, or from a quarter of the length up to it, in equal steps."""
    return [length * (batch + 3 * row + 3) // (4 * batch) for row in range(batch)] if ragged else [length] * batch


def nsa_step(
    shape: BenchShape, lengths: list[int], dtype: torch.dtype, pooled: bool, heads: tuple[Tensor, Tensor]
) -> Callable[[], Tensor]:
    s, g = shape, shape.geometry
    module = NSAAttention(
        1, s.n_heads, s.n_kv_groups, s.d_k, s.d_v, g.l, g.d, g.l_sel, g.n_sel, g.w, phi="avg", kv="per_branch"
    ).to(dtype)
    batch, room = len(lengths), max(lengths) + 2 * STEPS
    pages = sum(g.n_blocks(n + 2 * STEPS) + 1 for n in lengths) if pooled else None
    cache = module.new_cache(batch, room, pages=pages)
    at_once = g.l_sel * max(1, max(lengths) // (CHUNKS * g.l_sel)) if pooled else FILLED_AT_ONCE  # rows take turns
    for begin in range(0, max(lengths), at_once):
        new = torch.tensor([min(max(n - begin, 0), at_once) for n in lengths])
        cache.append(streams(shape, batch, int(new.max()), dtype), new, module.compress)
    token = streams(shape, batch, 1, dtype)
    return lambda: attended(module, cache, token, *heads)


def streams(s: BenchShape, batch: int, n: int, dtype: torch.dtype) -> BranchStreams:
    k, v = (uniform(batch, n, s.n_kv_groups, width, dtype=dtype) for width in (s.d_k, s.d_v))
    return BranchStreams(k, v, k, v, k, v)


def attended(module: NSAAttention, cache: LayerCache, new: BranchStreams, q: Tensor, gates: Tensor) -> Tensor:
    with cache.exclusive:
        return module.attend_cached(q, new, gates, cache)[0]


def dense_step(s: BenchShape, lengths: list[int], dtype: torch.dtype, q_B1GRK: Tensor) -> Callable[[], Tensor]:
    """Rows of one length: one call. Rows of several lengths: a call each, which reads nothing that a row lacks."""
    attend = DECODE_FORMS[fastest_decode_form(s, dtype, max(lengths), torch.device("cpu"))]
    batch, room = len(lengths), max(lengths) + 2 * STEPS
    k = uniform(batch, s.n_kv_groups, room, s.d_k, dtype=dtype)
    v = uniform(batch, s.n_kv_groups, room, s.d_k, dtype=dtype)
    q, (new_k, new_v) = (
        q_B1GRK[:, 0].flatten(1, 2)[:, :, None],
        (uniform(batch, s.n_kv_groups, s.d_k, dtype=dtype) for _ in range(2)),
    )
    held = list(lengths)

    def step() -> Tensor:
        same = len(set(held)) == 1
        parts = [slice(None)] if same else [slice(row, row + 1) for row in range(batch)]
        out = []
        for part, n in zip(parts, held, strict=False):
            k[part, :, n], v[part, :, n] = new_k[part], new_v[part]
            out.append(attend(q[part], k[part, :, : n + 1], v[part, :, : n + 1], s))
        held[:] = [n + 1 for n in held]
        return torch.cat(out)

    return step


def now() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def bandwidth() -> float:
    """Bytes per second of reading memory that no cache holds."""
    x, best = torch.zeros(2**26), float("inf")
    for _ in range(5):
        start = now()
        x.sum()
        best = min(best, now() - start)
    return x.nbytes / best


def timed(steps: dict[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(STEPS + 3):
        for name, step in steps.items():
            start = now()
            step()
            if i >= 3:
                seconds[name].append(now() - start)
    return seconds


@torch.no_grad()
def measure(shape: BenchShape, batch: int, length: int, dtype: torch.dtype, ragged: bool) -> str:
    s, lengths = shape, lengths_of(batch, length, ragged)
    q = uniform(batch, 1, s.n_kv_groups, s.heads_per_group, s.d_k, dtype=dtype)
    gates = torch.rand(batch, 1, s.n_kv_groups, s.heads_per_group, 3)
    steps = {
        "dense": dense_step(s, lengths, dtype, q),
        "in order": nsa_step(s, lengths, dtype, False, (q, gates)),
        "pool": nsa_step(s, lengths, dtype, True, (q, gates)),
    }
    seconds = timed(steps)
    per_entry = s.n_kv_groups * (s.d_k + s.d_v) * dtype.itemsize
    floor = sum(s.geometry.reads(n) for n in lengths) * per_entry / bandwidth()
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = sorted(a / b for a, b in zip(seconds["dense"], seconds["in order"], strict=True))
    cells = [
        str(batch), spell(length), *(f"{batch / middle[name]:,.0f}" for name in steps),
        f"{middle['dense'] / middle['in order']:.2f}",
        f"{ratios[len(ratios) // 4]:.2f}–{ratios[-len(ratios) // 4]:.2f}",
        f"{min(seconds['in order']) * 1e6:,.0f}", f"{floor * 1e6:,.0f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--lengths", default="2k,8k,32k")
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--dtype", choices=TORCH_DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ragged", action="store_true", help="rows from a quarter of the length up to it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{SHAPES[args.shape].describe()}, {args.dtype}, {args.threads} threads; tokens/s of one layer's attention")
    print("| batch | length | dense | NSA | NSA, pool | NSA/dense | quartiles | fastest step µs | floor µs |")
    print("|---|---|---|---|---|---|---|---|---|")
    for batch in parse_lengths(args.batch):
        for length in parse_lengths(args.lengths):
            print(measure(SHAPES[args.shape], batch, length, TORCH_DTYPES[args.dtype], args.ragged), flush=True)


if __name__ == "__main__":
    main()
