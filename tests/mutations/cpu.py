"""Bugs in the compiled CPU kernels: each is compiled anew, so this table takes minutes."""

from tests.mutations import Mutation

CPU = ("tests/kernels/test_cpu.py",)
MIX = ("tests/kernels/test_mix.py",)
DECODE = ("tests/core/test_kv_cache.py", "tests/kernels/test_cpu.py")

(APPEND, CHOOSE, DECODE_H, PIECE, FORWARD, BACKWARD, GRID, MIX_H, TOP) = (
    f"nsa/kernels/cpu/src/{name}.h"
    for name in ("cache_append", "choose", "decode", "decode_piece", "forward", "backward", "grid", "mix", "top_blocks")
)

MUTATIONS = [
    Mutation("cpu: window of w + 1 tokens", GRID, "pos - p.w + 1)", "pos - p.w)", CPU),
    Mutation("cpu: compressed block visible one token early", GRID, "pos + 1 >= p.l ? (pos + 1 - p.l)",
             "pos + 2 >= p.l ? (pos + 2 - p.l)", CPU),
    Mutation("cpu: query does not see itself", GRID, "end = start + pos + 1;", "end = start + pos;", CPU),
    Mutation("cpu: ties to the higher index", TOP, "(is_last & (equal > 0))", "(is_last & (equal > 1))", CPU),
    Mutation("cpu: first block not forced", TOP, "idx[0] = 0, idx", "idx[0] = 1, idx", CPU),
    Mutation("cpu: overlap not weighted", TOP,
             "(std::min(begin + p.l, p.l_sel) - std::max<int64_t>(begin, 0)) / p.d", "1", CPU),
    Mutation("cpu: probabilities not normalised before heads are summed", CHOOSE, "share[i] = total > 0 ? 1.f / total",
             "share[i] = total > 0 ? 1.f", CPU),
    Mutation("cpu: empty row is NaN", FORWARD, "nothing ? 0.f : 1.f / total", "1.f / total", CPU),
    Mutation("cpu: no delta in the gradient", BACKWARD, "delta[i] = deltas[at];", "delta[i] = 0;", CPU),
    Mutation("cpu: gradient of the log-sum-exp dropped", BACKWARD, " - (p.dlse ? p.dlse[at] : 0.f)", "",
             ("tests/kernels/test_lse_gradients.py",)),
    Mutation("cpu: a position before the document chooses block 0", GRID, "pos < 0 ? 0 : pos / p.l_sel + 1",
             "pos / p.l_sel + 1", ("tests/kernels/test_backends.py",)),
    Mutation("cpu: gates swapped in the mix", MIX_H, "a * widen(x[j]) + b * widen(y[j])",
             "b * widen(x[j]) + a * widen(y[j])", MIX),
    Mutation("cpu: gradient of the gates misses the last values", MIX_H, "total += d * widen(x[j]);", "", MIX),
    Mutation("cpu: decode merges pieces without their levels", PIECE, "std::exp2(piece.at[r] - high)", "1.f", DECODE),
    Mutation("cpu: decode takes one gate for all heads", DECODE_H, "(step_.gates_per_group > 1 ? r : 0)", "0", DECODE),
    Mutation("cpu: decode reads chosen blocks past the query", DECODE_H, "std::min(begin + p_.l_sel, all.end)",
             "begin + p_.l_sel", DECODE),
    Mutation("cpu: a new token lands one slot late", APPEND, "b, at % stream.n_slots, g)",
             "b, (at + 1) % stream.n_slots, g)", DECODE),
    Mutation("cpu: compressed blocks end one token late", APPEND, "(length - a.l) % a.d != 0",
             "(length - a.l) % a.d != 1", DECODE),
    Mutation("cpu: a mean misses its oldest token", APPEND, "t = length - a.l;", "t = length - a.l + 1;", DECODE),
    Mutation("cpu: the window's ring forgets its last slot", APPEND, "std::min(at, a.streams[4].n_slots - 1)",
             "std::min(at, a.streams[4].n_slots - 2)", DECODE),
]  # fmt: skip
