"""Count instructions of an attention loop with the rows of queries in M (S = Q·Kᵀ) and in N (Sᵀ = K·Qᵀ).

    python -m proofs.perf_model.compare_tile_orientation

Compiled ahead of time for 64 keys of width 64, 4 warps, 3 stages; needs no GPU. docs/kernels/tuning.md has the result.
"""

from typing import Any

import triton
import triton.language as tl
from triton.compiler import ASTSource

from nsa.gpus import ARCHITECTURES as GPUS
from proofs.compile_report.machine_code import compile_target, read


@triton.jit
def rows_in_m(q, k, v, out, n, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    row, key, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    q_MD = tl.load(q + row[:, None] * D + d[None, :])
    top, total, acc = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)
    for i in tl.range(0, n, N):
        at = (i + key)[:, None] * D + d[None, :]
        s = tl.dot(q_MD, tl.trans(tl.load(k + at)))
        new = tl.maximum(top, tl.max(s, 1))
        e, decay = tl.exp2(s - new[:, None]), tl.exp2(top - new)
        top, total = new, total * decay + tl.sum(e, 1)
        acc = acc * decay[:, None] + tl.dot(e.to(tl.bfloat16), tl.load(v + at))
    tl.store(out + row[:, None] * D + d[None, :], acc / total[:, None])


@triton.jit
def rows_in_n(q, k, v, out, n, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    row, key, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    q_DM = tl.load(q + row[None, :] * D + d[:, None])
    top, total, acc = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([D, M], tl.float32)
    for i in tl.range(0, n, N):
        at = (i + key)[:, None] * D + d[None, :]
        s = tl.dot(tl.load(k + at), q_DM)
        new = tl.maximum(top, tl.max(s, 0))
        e, decay = tl.exp2(s - new[None, :]), tl.exp2(top - new)
        top, total = new, total * decay + tl.sum(e, 0)
        acc = acc * decay[None, :] + tl.dot(tl.trans(tl.load(v + at)), e.to(tl.bfloat16))
    tl.store(out + row[None, :] * D + d[:, None], acc / total[None, :])


def compiled(kernel: Any, rows: int, gpu: str) -> Any:
    signature = dict(q="*bf16", k="*bf16", v="*bf16", out="*fp32", n="i32")
    constants = dict(M=rows, N=64, D=64)
    source = ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(signature))},
    )
    return triton.compile(source, target=compile_target(GPUS[gpu]), options=dict(num_warps=4, num_stages=3))


if __name__ == "__main__":
    print("| GPU | rows | where | matrix | registers | shared | asynchronous copies |\n|---|---|---|---|---|---|---|")
    for gpu in ("sm_80", "sm_90"):
        for rows in (8, 16, 64):
            for kernel, place in ((rows_in_m, "in M"), (rows_in_n, "in N")):
                code = read(compiled(kernel, rows, gpu), GPUS[gpu])
                matrix = ", ".join(f"{n} {kind}" for kind, n in code.matrix.items())
                waits = ", waits for a tile" if code.loops_not_pipelined else ""
                shared = f"{code.shared_bytes / 1024:.0f} KiB"
                copies = f"{code.async_copies}{waits}"
                print(f"| {gpu} | {rows} | {place} | {matrix} | {code.registers} | {shared} | {copies} |")
