"""Triton's kernels at the widths users have, interpreted: the fp64 reference's numbers, and the same bits in any order.

A GPU runs the programs of a grid as it likes; here they are run backwards and shuffled. Decoding has a file of its own.
"""

from itertools import combinations, product

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nsa.check.cases import KernelCase
from nsa.check.comparison import blocks_error, poisoned_memory, relative_rms
from nsa.check.kernel_call import KernelCall, QueryPositions
from nsa.geometry import Geometry
from nsa.kernels.interface import BranchInputs, KernelShape
from nsa.kernels.registry import BACKENDS
from nsa_train.config.schema import RunConfig
from nsa_train.planning.activations import ForwardPass, _workspace_bytes
from tests.backends import RUN_HERE
from tests.nsa.kernels.grid_order import ORDERS, programs_run

pytest.importorskip("triton", reason="it is in the dev extra")
import triton
import triton.language as tl

from nsa.kernels.triton import attend_forward, block_index, selected
from nsa.kernels.triton.tile import narrowed

interpreted = pytest.mark.skipif("triton" not in RUN_HERE, reason="runs under TRITON_INTERPRET=1")
TRITON = BACKENDS["triton"]
CPU = torch.device("cpu")
ATTENTION = ("sliding", "compressed", "selected")

HEADS = (1, 3, 5, 6, 16)
WIDTHS = ((64, 64), (128, 128), (192, 128))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Blocks of a whole tile of keys, of less than one and no power of two, and of two tiles that do not fill the second.
SIZES = (
    Geometry(l=8, d=4, l_sel=16, n_sel=4, w=12),
    Geometry(l=6, d=2, l_sel=12, n_sel=4, w=9),
    Geometry(l=12, d=4, l_sel=20, n_sel=3, w=33),
)
LENGTH = 47


def cover() -> list[tuple]:
    """Heads, widths, dtype, geometry, packed: every two values of two axes occur together, in 15 cases of 270."""
    return [
        (heads, widths, DTYPES[(i + j) % 3], SIZES[(i + 2 * j) % 3], (3 * i + j) % 2 == 1)
        for (i, heads), (j, widths) in product(enumerate(HEADS), enumerate(WIDTHS))
    ]


def test_every_pair_of_sizes_occurs():
    axes = (HEADS, WIDTHS, DTYPES, SIZES, (False, True))
    for a, b in combinations(range(len(axes)), 2):
        assert {(case[a], case[b]) for case in cover()} == set(product(axes[a], axes[b]))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """Shrink pieces so that a window of keys that all queries chose is cut into several, the last one shorter."""
    monkeypatch.setattr(block_index, "PIECE", 20)


def call_of(
    heads: int, widths: tuple[int, int], dtype: torch.dtype, geometry: Geometry, packed: bool, length: int = LENGTH
) -> KernelCall:
    groups = 2 if heads == 3 else 1
    documents = (0, 1, length // 2, length // 2, length) if packed else (0, length)
    return KernelCase(KernelShape(groups, heads, *widths, geometry), (documents,)).call(dtype)


def case_id(value) -> str:
    if isinstance(value, Geometry):
        return f"{value.l}-{value.d}-{value.l_sel}"
    if isinstance(value, bool):
        return "packed" if value else "plain"
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")


def assert_as_the_reference(call: KernelCall, branch: str) -> None:
    """Require in fp32 an error of at most 1e-5; in half precision within twice the error of PyTorch's operators on
    the same formula."""
    truth = call.truth(branch)
    ours = [relative_rms(x, y) for x, y in zip(call.by_kernel("triton", branch, CPU), truth, strict=True)]
    if call.dtype == torch.float32:
        limits = [1e-5] * 4
    else:
        plain = call.by_plain_pytorch(branch, CPU)
        limits = [2 * relative_rms(x, y) for x, y in zip(plain, truth, strict=True)]
    for name, error, limit in zip(("out", "dq", "dk", "dv"), ours, limits, strict=True):
        assert error <= limit, (branch, name)


@interpreted
@pytest.mark.parametrize("branch", ATTENTION)
def test_keys_and_values_of_two_parts_and_blocks_of_two_cuts(branch):
    """Every path in the narrowest rows: 24 as 16 + 8, 40 as 32 + 8, 20 keys as 16 + 4, documents off the grid."""
    assert_as_the_reference(call_of(5, (24, 40), torch.float32, SIZES[2], packed=True), branch)


# Several tiles of keys that every query of a tile sees, cut by the window's edge, by documents and by the row's end.
WIDE_RANGES = {
    "one document": (Geometry(l=4, d=2, l_sel=16, n_sel=4, w=110), 212, ()),
    "whole tiles": (Geometry(l=2, d=2, l_sel=16, n_sel=4, w=96), 192, ()),
    "documents": (Geometry(l=4, d=2, l_sel=16, n_sel=4, w=90), 233, (0, 5, 137, 138, 233)),
}


# Selected blocks are 16 keys in each layout: whole tiles of them are in the other two as well.
@interpreted
@pytest.mark.parametrize(
    ("layout", "branch"),
    [
        pytest.param(layout, branch, marks=[pytest.mark.nightly] * ((layout, branch) == ("whole tiles", "selected")))
        for layout, branch in product(WIDE_RANGES, ATTENTION)
    ],
)
def test_tiles_that_every_row_sees_are_computed_without_masks(layout, branch):
    geometry, length, documents = WIDE_RANGES[layout]
    case = KernelCase(KernelShape(1, 3, 16, 24, geometry), (documents or (0, length),))
    assert_as_the_reference(case.call(torch.float32), branch)


@interpreted
def test_log_sum_exps_of_many_keys_choose_the_references_blocks():
    """The pass that selection makes alone, without the compressed branch's output."""
    geometry, length, documents = WIDE_RANGES["one document"]
    call = KernelCase(KernelShape(1, 3, 16, 24, geometry), (documents or (0, length),)).call(torch.float32)
    q, k, where = call.q_BSGRK, call.compressed[0], (call.layout.pos_BS, call.layout.first_BS)
    idx = TRITON.functions.select(q, k, *where, **call.choosing)
    assert blocks_error(q, k, *where, idx, geometry, call.scale).max() <= 1e-4


@interpreted
@pytest.mark.parametrize(("heads", "widths", "dtype", "geometry", "packed"), cover(), ids=case_id)
def test_outputs_and_gradients_are_the_references(heads, widths, dtype, geometry, packed):
    call = call_of(heads, widths, dtype, geometry, packed)
    for branch in ATTENTION:
        assert_as_the_reference(call, branch)


@interpreted
def test_long_rows_are_taken_in_spans(monkeypatch):
    """Results of queries for their blocks wait in memory, up to a limit that does not depend on the length."""
    monkeypatch.setattr(selected, "SLOT_BYTES", 1)
    monkeypatch.setattr(selected, "QUERIES_OF_SLOTS", 0)
    chunks = block_index.chunk_sizes
    monkeypatch.setattr(block_index, "chunk_sizes", lambda *sizes: {**chunks(*sizes), "CHUNK": 16})
    spans: list[tuple[int, int]] = []
    monkeypatch.setattr(
        selected,
        "build_block_index",
        lambda *inputs: spans.append(inputs[3][-2:]) or block_index.build_block_index(*inputs),
    )
    for packed in (False, True):
        call = call_of(3, (16, 24), torch.float32, SIZES[1], packed=packed)
        assert_as_the_reference(call, "selected")
    assert spans == [(1, 16), (2, 16)]

    def of_a_batch(*rows: int) -> list[torch.Tensor]:
        """Row i is the call's with queries, keys, values and gradients i times as large."""
        leaves = [torch.cat([x * i for i in rows]).requires_grad_() for x in (call.q_BSGRK, *call.raw)]
        where = (torch.cat([x] * len(rows)) for x in (call.idx_BSGN, call.layout.pos_BS, call.layout.start_BS))
        out = TRITON.functions.selected(*leaves, *where, geometry=call.geometry, scale=call.scale)
        return [out, *torch.autograd.grad(out, leaves, torch.cat([call.dout_BSGRV * i for i in rows]))]

    for both, first, second in zip(of_a_batch(1, 2), of_a_batch(1), of_a_batch(2), strict=True):
        assert torch.equal(both, torch.cat((first, second)))


@interpreted
def test_rows_of_one_document_begin_anywhere_on_the_axis_of_keys():
    """Padded on the left, or without their oldest keys: their windows begin where their blocks do."""
    geometry, length = SIZES[1], 37
    pos = torch.stack((torch.arange(length), torch.arange(11, length + 11)))
    start, first = (torch.tensor(begin)[:, None].expand(-1, length) for begin in ((5, -11), (0, 0)))
    shape, places = KernelShape(1, 3, 16, 24, geometry), QueryPositions(pos, start, first)
    call = KernelCall(shape, places, length + 5, geometry.n_compressed(length + 11), torch.float32)
    assert_as_the_reference(call, "selected")


@interpreted
def test_slots_are_what_is_estimated_before_a_run():
    call = call_of(6, (32, 32), torch.float32, SIZES[0], packed=True, length=192)
    g = SIZES[0]
    nsa = dict(l=g.l, d=g.d, l_sel=g.l_sel, n_sel=g.n_sel, w=g.w)
    model = dict(dim=192, n_heads=6, n_kv_groups=1, d_k=32, d_v=32)
    config = RunConfig.model_validate({"model": model, "nsa": nsa, "kernels": {"selected": "triton"}})
    estimated = _workspace_bytes(config, ForwardPass(1, 192, 257, autocast=False, width=4, on_gpu=True))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as heard:
        call.by_kernel("triton", "selected", CPU)
    sizes = [e.nbytes() for e in heard.profiler.kineto_results.events() if e.name() == "[memory]"]
    slots = 192 * 6 * 2 * g.n_sel * 32 * 4
    assert sizes.count(slots) == 2  # forward and backward
    assert slots < estimated < 2 * slots


@interpreted
@pytest.mark.parametrize(
    ("heads", "widths", "dtype", "geometry", "packed"),
    [
        (5, (192, 128), torch.float32, SIZES[1], False),
        (3, (64, 64), torch.bfloat16, Geometry(l=12, d=4, l_sel=4, n_sel=4, w=1), True),
        (16, (128, 128), torch.float16, Geometry(l=8, d=4, l_sel=12, n_sel=4, w=1), False),
        (3, (16, 16), torch.float32, Geometry(l=4, d=2, l_sel=2, n_sel=20, w=1), True),
    ],
    ids=case_id,
)
def test_the_choice_of_blocks_is_the_references(heads, widths, dtype, geometry, packed):
    """Uses more blocks than may be chosen, three of which are forced; by either way to the log-sum-exp they need. Of
    20, which is more than 16 and no power of two."""
    call = call_of(heads, widths, dtype, geometry, packed, length=61)
    q, (k, v), where = call.q_BSGRK, call.compressed, (call.layout.pos_BS, call.layout.first_BS)
    if dtype == torch.float32:
        idx = TRITON.functions.select(q, k, *where, **call.choosing)
    else:
        idx = TRITON.compressed_and_select(q, k, v, *where, **call.choosing)[1]
    assert blocks_error(q, k, *where, idx, geometry, call.scale).max() <= 1e-4


@interpreted
@pytest.mark.parametrize("branch", [*ATTENTION, "select"])
def test_same_bits_in_any_order_of_programs(branch):
    """Rows for two parts of the compressed keys' gradient, windows of several pieces, documents across tiles."""
    call = call_of(6, (16, 24), torch.float32, SIZES[2], packed=True)

    def outputs() -> list[torch.Tensor]:
        if branch != "select":
            return call.by_kernel("triton", branch, CPU)
        where = (call.layout.pos_BS, call.layout.first_BS)
        return [TRITON.functions.select(call.q_BSGRK, call.compressed[0], *where, **call.choosing)]

    want = outputs()
    for order in ORDERS.values():
        with programs_run(order) as ran:
            got = outputs()
        assert ran != sorted(ran)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@interpreted
def test_the_last_queries_start_first():
    """They see the most keys: programs start in order, and the short ones fill the units that are left at the end."""
    call = call_of(6, (16, 24), torch.float32, SIZES[0], packed=False)
    q, (k, v), where = call.q_BSGRK, call.compressed, (call.layout.pos_BS, call.layout.first_BS)
    with poisoned_memory(), programs_run(lambda n: [0] * n):
        idx = TRITON.functions.select(q, k, *where, **call.choosing)
        out, _ = attend_forward(BranchInputs("compressed", q, k, v, None, *where, call.geometry, call.scale))
    for written_S in (idx[0, :, 0, 0] != torch.iinfo(idx.dtype).max, out[0, :, 0, 0, 0].isfinite()):
        assert written_S[-1]
        assert not written_S[0]


@triton.jit
def _narrow_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, narrowed(tl.load(x + at), y.dtype.element_ty))


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrowing_rounds_as_torch_does(dtype):
    """Normal numbers of many sizes, ties to either side, and what is none."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).mul(2.5).exp()
    x[:7] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 3 * 2**-8])
    y = torch.empty(x.shape, dtype=dtype)
    _narrow_kernel[(1,)](x, y, 4096)
    assert torch.equal(y.nan_to_num(1.5), x.to(dtype).nan_to_num(1.5))
