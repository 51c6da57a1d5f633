"""Integer, logic, comparison and fp32 instructions against numpy, at the edges of their types."""

import numpy as np
import pytest

from tests.proofs.ptx_emulator.ptx_snippets import lanes, run

rng = np.random.default_rng(0)
EDGES = {
    np.int16: [0, 1, -1, 7, -7, 2**15 - 1, -(2**15), 171],
    np.uint16: [0, 1, 2, 7, 2**16 - 1, 2**15, 12345, 171],
    np.int32: [0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 12345],
    np.uint32: [0, 1, 2, 7, 2**32 - 1, 2**31, 12345, 99],
    np.int64: [0, 1, -1, 7, -7, 2**63 - 1, -(2**63), 2**40 + 3],
    np.uint64: [0, 1, 2, 7, 2**64 - 1, 2**63, 2**40, 99],
    np.float32: [0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan, 1e-40],
}


def pairs(dtype, n=2):
    """All pairs of edges that fit into 32 lanes, shuffled with random ones."""
    edge = np.array(EDGES[dtype], dtype)
    return [rng.permutation(np.concatenate([edge] * 4)) for _ in range(n)]


WRAPPING = {"add": np.add, "sub": np.subtract, "mul.lo": np.multiply, "max": np.maximum, "min": np.minimum}
TYPES = {"s16": np.int16, "u16": np.uint16, "s32": np.int32, "u32": np.uint32, "s64": np.int64, "u64": np.uint64}


@pytest.mark.parametrize("name", WRAPPING)
@pytest.mark.parametrize("kind", TYPES)
def test_integers_wrap(name, kind):
    a, b = pairs(TYPES[kind])
    assert np.array_equal(lanes(f"{name}.{kind}", [a, b], TYPES[kind]), WRAPPING[name](a, b))


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_wide_and_high_products(kind):
    narrow = TYPES[kind]
    wide = TYPES[f"{kind[0]}{2 * int(kind[1:])}"]
    a, b = pairs(narrow)
    exact = [int(x) * int(y) for x, y in zip(a, b, strict=True)]
    assert lanes(f"mul.wide.{kind}", [a, b], wide).tolist() == exact
    assert lanes(f"mul.hi.{kind}", [a, b], narrow).tolist() == [x >> int(kind[1:]) for x in exact]
    (c,) = pairs(wide, 1)
    assert np.array_equal(lanes(f"mad.wide.{kind}", [a, b, c], wide), np.array(exact, wide) + c)


@pytest.mark.parametrize("kind", ["s32", "s64"])
def test_division_truncates(kind):
    a, b = pairs(TYPES[kind])
    b[b == 0] = 3
    b[b == -1] = -5
    want = [abs(int(x)) // abs(int(y)) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(a, b, strict=True)]
    assert lanes(f"div.{kind}", [a, b], TYPES[kind]).tolist() == want
    assert lanes(f"rem.{kind}", [a, b], TYPES[kind]).tolist() == [
        int(x) - q * int(y) for x, y, q in zip(a, b, want, strict=True)
    ]


def test_shifts_past_the_width():
    a = np.full(32, 0x80000001, np.uint32)
    by = np.arange(20, 52, dtype=np.uint32)
    assert lanes("shl.b32", [a, by], np.uint32).tolist() == [0x80000001 << n & 0xFFFFFFFF for n in by.tolist()]
    assert lanes("shr.u32", [a, by], np.uint32).tolist() == [0x80000001 >> n for n in by.tolist()]
    signed = lanes("shr.s32", [a, by], np.int32).tolist()
    assert signed == [(0x80000001 - 2**32) >> n for n in by.tolist()]


def test_bit_fields_and_byte_permutations():
    (a,) = pairs(np.uint32, 1)
    assert lanes("bfe.u32", [a], np.uint32, more=", 3, 4").tolist() == [x >> 3 & 15 for x in a.tolist()]
    fields = [x >> 6 & 3 for x in a.tolist()]
    assert lanes("bfe.s32", [a], np.int32, more=", 6, 2").tolist() == [x - 4 if x > 1 else x for x in fields]
    a, b = np.full(32, 0x03020100, np.uint32), np.full(32, 0x87060504, np.uint32)
    assert lanes("prmt.b32", [a, b], np.uint32, more=", 0x5410")[0] == 0x05040100
    assert lanes("prmt.b32", [a, b], np.uint32, more=", 0xf000U")[0] == 0xFF000000  # the sign of byte 7


COMPARE = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


@pytest.mark.parametrize("name", COMPARE)
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "f32"])
def test_comparisons(name, kind):
    dtype = {**TYPES, "f32": np.float32}[kind]
    a, b = pairs(dtype)
    assert np.array_equal(lanes(f"setp.{name}.{kind}", [a, b], np.bool_), COMPARE[name](a, b))


def test_float_inequality_is_ordered_and_has_an_unordered_form():
    a, b = pairs(np.float32)
    either = np.isnan(a) | np.isnan(b)
    assert np.array_equal(lanes("setp.ne.f32", [a, b], np.bool_), (a != b) & ~either)
    assert np.array_equal(lanes("setp.neu.f32", [a, b], np.bool_), (a != b) | either)
    assert np.array_equal(lanes("setp.equ.f32", [a, b], np.bool_), (a == b) | either)


def test_predicates_and_selection():
    p, q = (rng.integers(0, 2, 32).astype(np.bool_) for _ in range(2))
    assert np.array_equal(lanes("and.pred", [p, q], np.bool_), p & q)
    assert np.array_equal(lanes("xor.pred", [p, q], np.bool_), p ^ q)
    assert np.array_equal(lanes("not.pred", [p], np.bool_), ~p)
    a, b = pairs(np.float32)
    selected = lanes("selp.f32", [a, b, p], np.float32)
    assert np.array_equal(selected, np.where(p, a, b), equal_nan=True)


def test_maximum_ignores_nan_unless_told():
    a, b = pairs(np.float32)
    assert np.array_equal(lanes("max.f32", [a, b], np.float32), np.fmax(a, b), equal_nan=True)
    assert np.array_equal(lanes("min.NaN.f32", [a, b], np.float32), np.minimum(a, b), equal_nan=True)


def test_fma_rounds_once():
    a = np.full(32, 1 + 2**-12, np.float32)
    c = np.full(32, -(1 + 2**-11), np.float32)
    assert (lanes("fma.rn.f32", [a, a, c], np.float32) == np.float32(2**-24)).all()


def test_flush_to_zero():
    tiny, one = np.full(32, -1e-40, np.float32), np.ones(32, np.float32)
    assert (lanes("mul.f32", [tiny, one], np.float32) == tiny).all()
    flushed = lanes("mul.ftz.f32", [tiny, one], np.float32)
    assert (flushed == 0).all()
    assert np.signbit(flushed).all()
    assert (lanes("ex2.approx.ftz.f32", [np.full(32, -140.0, np.float32)], np.float32) == 0).all()


def test_a_guard_keeps_the_other_lanes():
    out = np.zeros(32, np.int32)
    run(
        """
	mov.b32 %r1, 5;
	setp.lt.u32 %p1, %r90, 10;
	@%p1 mov.b32 %r1, 7;
	@!%p1 add.s32 %r1, %r1, 1;
	mul.wide.u32 %rd1, %r90, 4;
	add.s64 %rd1, %rd1, %rd90;
	st.global.b32 [%rd1], %r1;
""",
        out,
    )
    assert out.tolist() == [7] * 10 + [6] * 22


def test_lanes_diverge_at_a_branch_and_reconverge():
    out = np.zeros(64, np.int32)
    run(
        """
	mov.b32 %r1, 0;
$LOOP:
	add.s32 %r1, %r1, 1;
	setp.le.u32 %p1, %r1, %r90;
	@%p1 bra $LOOP;
	shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;
	mul.wide.u32 %rd1, %r90, 4;
	add.s64 %rd1, %rd1, %rd90;
	st.global.b32 [%rd1], %r2;
""",
        out,
        threads=64,
    )
    assert out.tolist() == [(t ^ 1) + 1 for t in range(64)]
