"""Bugs in the Triton kernels: the ones that NSA kernels really have, and what this design could get wrong."""

from tests.mutations import Mutation

SLIDING, COMPRESSED, CHOSEN = (
    (f"tests/kernels/test_triton.py::test_keys_and_values_of_two_parts_and_blocks_of_two_cuts[{branch}]",)
    for branch in ("sliding", "compressed", "selected")
)
SPANS = ("tests/kernels/test_triton.py::test_long_rows_are_taken_in_spans",)
READERS = ("tests/kernels/test_triton_block_index.py", "-k", "readers and packed")
ROUNDING = ("tests/kernels/test_triton.py::test_narrowing_rounds_as_torch_does",)
ROWS_OF_A_BATCH = (
    "tests/kernels/test_backends.py",
    "-k",
    "matches_reference and triton and cached and sliding and tiny-heads0",
)
NOTHING = ("tests/kernels/test_backends.py", "-k", "triton and see_nothing")
TIES = ("tests/kernels/test_backends.py", "-k", "triton and ties_go")
UNDERFLOW = ("tests/kernels/test_backends.py", "-k", "triton and underflows")
BEFORE = ("tests/kernels/test_backends.py", "-k", "triton and before_its_document and positions0")
LSE = ("tests/kernels/test_lse_gradients.py", "-k", "triton and halves and compressed")
DECODE = ("tests/kernels/test_triton_decode.py::test_equals_the_reference",)
DECODE_HEADS = ("tests/kernels/test_triton_decode.py::test_every_head_and_every_part_counts_in_the_choice",)
DECODE_WIDE = ("tests/kernels/test_triton_decode.py", "-k", "wide_rows and 24-40")

TILE, RANGE, RANGE_BACKWARD, PAIRS, INDEXING, SELECTED, SELECTED_BACKWARD, SELECT, DECODING = (
    f"nsa/kernels/triton/device/{name}.py"
    for name in (
        "tile",
        "range_forward",
        "range_backward",
        "selected_common",
        "block_index",
        "selected_forward",
        "selected_backward",
        "select",
        "decode",
    )
)


def bug(name: str, file: str, old: str, new: str, tests: tuple[str, ...]) -> Mutation:
    return Mutation(f"triton: {name}", file, old, new, tests, interpreted=True)


MUTATIONS = [
    bug("window of w + 1 tokens", RANGE, ">= lo_M[:, None]", ">= lo_M[:, None] - 1", SLIDING),
    bug("compressed block visible one block early", RANGE, "< hi_M[:, None]", "<= hi_M[:, None]", COMPRESSED),
    bug("past not rescaled", RANGE, "acc1 = acc1 * decay[:, None] +", "acc1 = acc1 +", SLIDING),
    bug("past rescaled in the first half of the values only", RANGE, "acc2 = acc2 * decay[:, None] +", "acc2 = acc2 +",
        SLIDING),
    bug("second half of the keys forgotten", TILE, "s += dot(a2,", "s += 0 * dot(a2,", COMPRESSED),
    bug("second half of the values not normalised", RANGE, "acc2 / total[:, None]", "acc2", COMPRESSED),
    bug("log-sum-exp without its sum", RANGE, "(top + tl.log2(total))", "top", SLIDING),
    bug("total of the softmax not rescaled", TILE, "total * decay +", "total +", SLIDING),
    bug("rows that see nothing are NaN", TILE, 'tl.where(new == float("-inf"), 0.0, new)', "new", NOTHING),
    bug("query does not see itself", PAIRS, "tl.minimum(begin + (L - 1), last)", "tl.minimum(begin + (L - 1), last - 1)",
        CHOSEN),
    bug("block's second window takes the first one's slot", PAIRS, "begin < window * L", "begin < 0", CHOSEN),
    bug("window has no end", PAIRS, "last), window * L + (L - 1))", "last), window * L + 2 * L)", CHOSEN),
    bug("bf16 is cut, not rounded", TILE, "(bits + 0x7FFF + ((bits >> 16) & 1))", "bits", ROUNDING),
    bug("dq without scale", RANGE_BACKWARD, "(dp - delta_M[:, None]) * scale", "(dp - delta_M[:, None])", SLIDING),
    bug("dk without its row correction", RANGE_BACKWARD, "(dp - delta_M[None, :])", "dp", SLIDING),
    bug("row correction from the first half of the values", RANGE_BACKWARD, "delta_M += tl.sum(do2",
        "delta_M += 0 * tl.sum(do2", COMPRESSED),
    bug("last rows of a run add nothing to dk and dv", RANGE_BACKWARD,
        "tl.cdiv(tl.cdiv(tl.maximum(end - first, 0), PARTS), BLOCK_M)",
        "tl.maximum(end - first, 0) // PARTS // BLOCK_M", COMPRESSED),
    bug("gradient of the log-sum-exp dropped", RANGE_BACKWARD, "delta_M -= tl.load(dlse", "delta_M -= 0 * tl.load(dlse", LSE),
    bug("second half of dk forgotten", RANGE_BACKWARD, "dk2 += dot(ds, q2)", "dk2 += 0 * dot(ds, q2)", SLIDING),
    bug("bounds of the batch's first row", RANGE_BACKWARD, "lo + b.to(tl.int64) * S + query", "lo + query",
        ROWS_OF_A_BATCH),
    bug("a query's blocks share a slot", PAIRS, "pair % N * 2", "pair % N", CHOSEN),
    bug("keys past the block's end", PAIRS, "begin + (L - 1)", "begin + L", CHOSEN),
    bug("second cut of a block is the first again", PAIRS, "step = tl.program_id(1) * BLOCK_N", "step = 0 * BLOCK_N", CHOSEN),
    bug("head by bits, where heads are no power of two", SELECTED, "row // R, row % R, row < end",
        "row // R, row & (R - 1), row < end", CHOSEN),
    bug("first query of the next piece counts twice", PAIRS, "tl.minimum(first + PIECE,", "tl.minimum(first + PIECE + 1,",
        CHOSEN),
    bug("slots are added without their share", SELECTED, "acc1 * decay[:, None] + x * share[:, None]",
        "acc1 * decay[:, None] + x", CHOSEN),
    bug("slots of the past not rescaled", SELECTED, "total * decay + share", "total + share", CHOSEN),
    bug("block that ends with the row has no second window", INDEXING, "(window * L <= last)", "(window * L < last)",
        READERS),
    bug("last query of a piece is skipped", PAIRS, "tl.minimum(first + PIECE,", "tl.minimum(first + PIECE - 1,", CHOSEN),
    bug("dq without what lies across", SELECTED_BACKWARD, "here if cut < CUTS else across", "here", CHOSEN),
    bug("later spans of queries replace the sums of earlier ones", SELECTED_BACKWARD, "if MORE:", "if False:", SPANS),
    bug("last piece of a window is not added", SELECTED_BACKWARD, "tl.load(piece_first + place + 1)",
        "tl.load(piece_first + place + 1) - 1", CHOSEN),
    bug("second half of dv forgotten", SELECTED_BACKWARD, "dv2 += dot(p, do2)", "dv2 += 0 * dot(p, do2)", CHOSEN),
    bug("ties to the higher index", SELECT, "(2147483647 - j).to(tl.int64)", "j.to(tl.int64)", TIES),
    bug("invalid block scores 0", SELECT, "tl.where(j <= own, key, -1)",
        "tl.where(j <= own, key, (2147483647 - j).to(tl.int64))", UNDERFLOW),
    bug("a position before the document chooses block 0", SELECT, "(position + L_SEL) // L_SEL - 1", "position // L_SEL",
        BEFORE),
    bug("decode: compressed block visible one token early", DECODING, "(position + 1 - L) // D + 1",
        "(position + 2 - L) // D + 1", DECODE),
    bug("decode: page read past the row's length", DECODING, "tl.minimum(page_begin + L_SEL, seen)",
        "page_begin + L_SEL", DECODE),
    bug("decode: query does not see itself", DECODING, "tl.minimum(seen, n_window_keys)",
        "tl.minimum(seen - 1, n_window_keys)", DECODE),
    bug("decode: parts merged without their weight in the whole", DECODING, " - top) / total", " - top)", DECODE),
    bug("decode: heads after the sixteenth do not count", DECODING, "tl.range(0, R, BLOCK_R)",
        "tl.range(0, BLOCK_R, BLOCK_R)", DECODE_HEADS),
    bug("decode: second half of the values not rescaled", DECODING, "acc2 = acc2 * decay[:, None] +",
        "acc2 = acc2 +", DECODE_WIDE),
]  # fmt: skip
