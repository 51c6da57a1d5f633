"""The portable backend off the CPU: static shapes, no value read by the host, no atomic sum, no copy of the cache.

Its static path is also run on the CPU, against the reference; what a GPU would be asked to do is recorded on fake
tensors.
"""

from unittest import mock

import pytest
import torch

from nsa.check.comparison import relative_rms
from nsa.core.functional import NSAOutput, nsa_attention
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import packed_layout, plain_layout
from nsa.geometry import Geometry
from nsa.kernels import portable, precision
from nsa.kernels.interface import BranchInputs
from nsa.kernels.portable import chunk
from nsa.kernels.registry import BACKENDS
from tests.attention_options import KV_PROJECTIONS, PHIS
from tests.covering_cases import each_pair
from tests.nsa.kernels import test_backends as exact
from tests.nsa.kernels.fake_gpu import (
    fake_attention,
    fake_gpu,
    meta_attention,
    recorded_on_meta,
    wide_products_on_cpu,
)
from tests.shapes import GEOMETRIES, HEADS, attention_args

BRANCHES = ["compressed", "selected", "sliding"]
BASE = Geometry(**GEOMETRIES["seed"])


@pytest.fixture
def static(monkeypatch):
    """The CPU as a device whose values the host does not read, and that multiplies bf16 and fp16 as they are."""
    monkeypatch.setattr(chunk, "READABLE_DEVICES", ())
    with wide_products_on_cpu():
        yield


def layout_of(kind: str, length: int, g: Geometry):
    if kind == "plain":
        return plain_layout(1, length, g, torch.device("cuda"))
    cu = torch.empty(6, dtype=torch.int32, device="cuda")
    return packed_layout(cu, length, g)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("kind", ["plain", "packed"])
@pytest.mark.parametrize("branch", BRANCHES)
def test_training_on_a_gpu_reads_nothing_uploads_nothing_and_adds_without_atomics(branch, kind):
    length, g = 4096, BASE
    with fake_gpu() as recorded:
        pos, start, first, begin, _ = layout_of(kind, length, g)
        n = begin.shape[1] if branch == "compressed" else length
        q, k, v = empty(1, length, 2, 6, 64), empty(1, n, 2, 64), empty(1, n, 2, 64)
        idx = portable.select(q, empty(1, begin.shape[1], 2, 64), pos, first, g, 0.1)
        at = first if branch == "compressed" else start
        x = BranchInputs(branch, q, k, v, idx if branch == "selected" else None, pos, at, g, 0.1)
        out, lse = portable.attend_forward(x)
        gradients = portable.attend_backward(x, out, lse, empty(*out.shape), empty(*lse.shape, dtype=torch.float32))
    assert [x.shape for x in (out, *gradients)] == [q.shape, q.shape, k.shape, v.shape]
    assert all(x.is_contiguous() for x in gradients[1:])
    assert recorded.uploads == []
    assert recorded.atomic == []


SIZES = [*(("tiny", heads) for heads in HEADS), *((name, (6, 2)) for name in GEOMETRIES if name != "tiny")]


@pytest.mark.parametrize(
    ("branch", "layout", "size"), each_pair(BRANCHES, ["plain", "one start", "packed", "cached"], SIZES), ids=str
)
def test_static_shapes_give_what_the_reference_gives(static, monkeypatch, branch, layout, size):
    geometry, heads = size
    monkeypatch.setattr(chunk, "CPU_ELEMENTS", 1 << 14)  # several chunks of queries
    case = exact.Case("plain" if layout == "one start" else layout, geometry, heads, torch.float32)
    if layout == "one start":
        case.start = case.first = torch.zeros(1, 1, dtype=torch.int64).expand_as(case.pos)
    want = case.out_and_gradients(exact.REFERENCE, branch, torch.float64)
    got = case.out_and_gradients(BACKENDS["portable"].functions, branch)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("branch", BRANCHES)
def test_half_precision_products_lose_half_a_unit_of_the_last_place(static, branch, dtype):
    """RMS of the error relative to fp64, and at most half more than with all operands in fp32, as on the CPU."""
    case = exact.Case("plain", "showcase", (6, 2), dtype)
    want = case.out_and_gradients(exact.REFERENCE, branch, torch.float64)
    got = case.out_and_gradients(BACKENDS["portable"].functions, branch)
    with mock.patch.object(precision, "WIDE_PRODUCTS", ()):
        widened = case.out_and_gradients(BACKENDS["portable"].functions, branch)
    for a, b, c in zip(got, widened, want, strict=True):
        assert relative_rms(a, c) <= min(torch.finfo(dtype).eps / 2, 1.5 * relative_rms(b, c))


def test_products_on_the_cpu_are_those_of_torch_before_it_rounds_them(static):
    """torch's own bf16 product accumulates in fp32 and rounds once."""
    torch.manual_seed(0)
    a, b = torch.randn(3, 40, 512).bfloat16(), torch.randn(3, 512, 24).bfloat16()
    ours = chunk.product(a, b)
    assert ours.dtype == torch.float32
    exact_products = a.double() @ b.double()
    assert relative_rms(ours, exact_products) < 1e-6
    torch.testing.assert_close(ours.bfloat16(), a @ b, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_gpu_multiplies_half_precision_as_it_is(branch):
    """Every product has bf16 operands and a result in fp32."""
    with fake_gpu() as recorded:
        pos, start, first, begin, _ = layout_of("plain", 1024, BASE)
        n = begin.shape[1] if branch == "compressed" else 1024
        q, k, v = empty(1, 1024, 2, 6, 64), empty(1, n, 2, 64), empty(1, n, 2, 64)
        idx = portable.select(q, empty(1, begin.shape[1], 2, 64), pos, first, BASE, 0.1)
        half = ("bmm.dtype", (torch.bfloat16,) * 2, torch.float32)
        assert half in recorded.products
        recorded.products.clear()  # masses are multiplied by the strides of a block, too, in fp32
        at = first if branch == "compressed" else start
        x = BranchInputs(branch, q, k, v, idx if branch == "selected" else None, pos, at, BASE, 0.1)
        out, lse = portable.attend_forward(x)
        portable.attend_backward(x, out, lse, empty(*out.shape), None)
    assert lse.dtype == torch.float32
    assert {*recorded.products} == {half}


OTHER_TESTS = {
    "selection": [lambda x=layout, g=geometry: exact.test_selects_as_the_reference("portable", x, g)
                  for layout in ("plain", "packed", "cached") for geometry in GEOMETRIES],
    "chosen": [lambda x=layout: exact.test_chosen_blocks_are_as_selected_attention_needs_them("portable", x)
               for layout in ("packed", "cached")],
    "half precision": [lambda b=branch, d=dtype: exact.test_half_precision_error_is_at_most_twice_plain_pytorchs(
        "portable", b, d) for branch in BRANCHES for dtype in (torch.bfloat16, torch.float16)],
    "hidden": [lambda b=branch: exact.test_hidden_keys_change_no_bit("portable", b) for branch in BRANCHES],
    "nothing seen": [lambda: exact.test_rows_that_see_nothing_are_zero_with_zero_gradient("portable")],
    "lse": [lambda b=branch: exact.test_lse_matches_reference("portable", b) for branch in BRANCHES],
    "ties": [lambda: exact.test_ties_go_to_the_lower_index_and_forced_blocks_are_in("portable")],
    "underflow": [lambda: exact.test_a_valid_block_whose_score_underflows_still_beats_an_invalid_one("portable")],
    "large logits": [lambda b=branch: exact.test_large_logits_stay_finite("portable", b) for branch in BRANCHES],
    "views": [lambda b=branch: exact.test_strided_inputs_and_poisoned_memory_change_nothing("portable", b)
              for branch in BRANCHES],
    "operator": [lambda b=branch: exact.test_operator_is_well_formed("portable", b) for branch in BRANCHES],
    "padding": [lambda p=positions: exact.test_a_query_before_its_document_sees_nothing("portable", p)
                for positions in ([[-1, -1, -1]], [[-9, -20, -9]], [[-1, 40, -1]], [[39, 40, 41], [-1, -1, -1]])],
    "no queries": [lambda b=branch: exact.test_no_queries_at_all("portable", b) for branch in BRANCHES],
    "no keys": [lambda: exact.test_chosen_blocks_without_keys_add_nothing("portable")],
}  # fmt: skip


@pytest.mark.parametrize("what", OTHER_TESTS)
def test_static_shapes_pass_the_tests_of_every_backend(static, what):
    for run in OTHER_TESTS[what]:
        run()


def shape_of_base(**changes):
    return dict(dim=768, n_heads=12, n_kv_groups=2, d_k=64, d_v=64) | changes


@pytest.mark.parametrize("kv", KV_PROJECTIONS)
@pytest.mark.parametrize("phi", PHIS)
def test_a_training_step_of_a_packed_batch_reads_and_uploads_nothing(kv, phi):
    module = meta_attention(**shape_of_base(kv=kv, phi=phi))
    with recorded_on_meta() as recorded:
        x = torch.empty(2, 1024, 768, device="meta", requires_grad=True)
        cu = torch.empty(7, dtype=torch.int32, device="meta")
        module(x, cu_doc_lens=cu).sum().backward()
    assert x.grad is not None
    assert recorded.uploads == []
    # φ gathers tokens: gradients of two overlapping blocks add up, which is the same sum in either order.
    assert {name.split(".")[0].rstrip("_") for name in recorded.atomic} <= {"index_add"}
    assert len(recorded.atomic) == (4 if phi == "softmax" else 2)  # it gathers scores of tokens too


@pytest.mark.parametrize("kv", KV_PROJECTIONS)
@pytest.mark.parametrize("options", [{}, dict(phi="mlp")], ids=["before", "after"])
def test_prefill_and_decode_read_and_upload_nothing(kv, options):
    module_options = shape_of_base(kv=kv, **options)
    with fake_gpu() as recorded, torch.no_grad():
        module = fake_attention(**module_options)
        cache = module.new_cache(2, 4096)
        recorded.uploads.clear()
        module(torch.empty(2, 300, 768, device="cuda"), cache=cache)
        mask = torch.empty(2, 40, dtype=torch.int64, device="cuda")
        module(torch.empty(2, 40, 768, device="cuda"), cache=cache, attention_mask=mask)
        positions = torch.empty(2, 1, dtype=torch.int64, device="cuda")
        module(torch.empty(2, 1, 768, device="cuda"), cache=cache, position_ids=positions)
        module(torch.empty(2, 1, 768, device="cuda"), cache=cache)
    assert recorded.uploads == []
    assert recorded.atomic == []


def test_the_functional_api_reads_and_uploads_nothing():
    with fake_gpu() as recorded, torch.no_grad():
        q, k, v = empty(2, 512, 12, 64), empty(2, 512, 2, 64), empty(2, 512, 2, 64)
        cu, gates = empty(5, dtype=torch.int32), empty(2, 512, 12, 3, dtype=torch.float32)
        for more in (dict(), dict(cu_seqlens=cu), dict(blocks=empty(2, 512, 2, 20, dtype=torch.int32))):
            output = nsa_attention(q, k, v, gates, kernels="portable", return_lse=True, return_blocks=True, **more)
            assert isinstance(output, NSAOutput)
            assert output.out.shape == q.shape
    assert recorded.uploads == []
    assert recorded.atomic == []


@pytest.mark.parametrize("kv", KV_PROJECTIONS)
def test_static_decode_equals_the_whole_sequence(static, kv):
    """Prefill in two parts, the second padded past the cache's end, then one token at a time."""
    torch.manual_seed(0)
    module, n = NSAAttention(**attention_args("tiny", kv=kv), kernels="portable"), 70
    x = torch.randn(2, n, 24)
    with torch.no_grad():
        whole, cache = module(x), module.new_cache(2, n)
        parts = [module(x[:, :31], cache=cache)]
        padded = torch.cat((x[:, 31:60], torch.full((2, 25, 24), 1e3)), 1)
        parts.append(module(padded, cache=cache, new_lens_B=torch.tensor([29, 29]))[:, :29])
        parts += [module(x[:, t : t + 1], cache=cache) for t in range(60, n)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv", KV_PROJECTIONS)
def test_decode_copies_what_a_token_reads_and_not_the_cache(kv):
    """Bytes of new tensors of one token and layer with a cache of 4k and of 64k tokens: they differ by what is done
    with the compressed keys, an entry per 16 tokens."""

    def new_bytes(max_len: int) -> tuple[int, int]:
        with fake_gpu() as recorded, torch.no_grad():
            module = fake_attention(torch.bfloat16, **shape_of_base(kv=kv))
            cache = module.new_cache(1, max_len)
            x = torch.empty(1, 1, 768, device="cuda", dtype=torch.bfloat16)
            module(x, cache=cache)
            where = module.locate(x, cache=cache)  # its table of rotations is made on first use, not per token
            recorded.new_bytes = 0
            module(x, cache=cache, where=where)
            return recorded.new_bytes, cache.n_bytes()

    (short, _), (long, cache_bytes) = new_bytes(4096), new_bytes(65536)
    entries = BASE.n_compressed(65536) - BASE.n_compressed(4096)
    per_entry = 2 * 3 * 4 * 64 + 12 * 8 * 4 * 4  # keys twice and values in fp32; scores and what is made of them
    assert long - short < entries * per_entry
    assert long < cache_bytes / 2
    one_token = 2 * 128 * 4 * (BASE.n_sel * BASE.l_sel + BASE.w)  # keys and values of both groups in fp32
    assert short < 6 * one_token


def test_queries_that_do_not_follow_one_another_are_refused_on_the_device(static):
    case = exact.Case("plain", "tiny", (6, 2), torch.float32)
    case.pos = torch.arange(137).roll(60).expand(2, -1)
    functions = BACKENDS["portable"].functions
    with pytest.raises(RuntimeError, match="do not follow one another"):
        case.run(functions, "sliding", *case.inputs("sliding"))


def test_positions_past_all_blocks_are_refused_on_the_device(static):
    case = exact.Case("plain", "tiny", (6, 2), torch.float32)
    with pytest.raises(RuntimeError, match="past all blocks"):
        BACKENDS["portable"].functions.select(
            case.q, case.compressed[0], case.pos + 2 * case.g.l_sel, case.first, **case.select_args
        )
