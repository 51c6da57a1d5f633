"""Every registered backend against the reference: registering a backend tests it.

Outputs and gradients, plain, packed and cached layouts, odd sizes, any heads per group, rows that see nothing.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from nsa.core.positions import packed_layout
from nsa.geometry import Geometry
from nsa.kernels.registry import BACKENDS, BRANCHES
from tests.backends import RUN_HERE
from tests.shapes import GEOMETRIES, HEADS

REFERENCE = BACKENDS["reference"].functions
TESTED = [name for name in RUN_HERE if name != "reference"]
ATTENTION = [branch for branch in BRANCHES if branch != "select"]
K, V = 8, 6


class Case:
    """Tensors of one call, for each branch, and the arguments that go with them."""

    def __init__(self, layout: str, geometry: str, heads: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> None:
        g = self.g = Geometry(**GEOMETRIES[geometry])
        torch.manual_seed(seed)
        groups, per_group = heads[1], heads[0] // heads[1]
        if layout == "plain":
            batch, n_queries, n = 2, 137, 137
            pos = torch.arange(n).expand(batch, -1)
            start = first = torch.zeros_like(pos)
            n_compressed = g.n_compressed(n)
        elif layout == "packed":
            batch, n_queries, n = 1, 150, 150
            pos, start, first, begin, _ = packed_layout(torch.tensor([0, 1, 60, 60, 97, 150]), n, g)
            n_compressed = begin.shape[1]
        elif layout == "leap":  # two pieces of a packed row, as one rank of several has them
            batch, n_queries, n = 1, 75, 150
            whole = packed_layout(torch.tensor([0, 1, 60, 60, 97, 150]), n, g)
            pos, start, first = (torch.cat([x[:, 10:50], x[:, 115:]], 1) for x in whole[:3])
            n_compressed = whole.begin_BC.shape[1]
        else:  # rows of different length in a cache with room left
            batch, n_queries, n = 3, 5, 140
            pos = torch.tensor([[0], [60], [135]]) + torch.arange(n_queries)
            start = first = torch.zeros_like(pos)
            n_compressed = g.n_compressed(n) + 3
        self.pos, self.start, self.first = pos, start, first

        def tensor(*shape: int) -> torch.Tensor:
            return torch.randn(batch, *shape).to(dtype)

        self.q = tensor(n_queries, groups, per_group, K)
        self.raw = tensor(n, groups, K), tensor(n, groups, V)
        self.compressed = tensor(n_compressed, groups, K), tensor(n_compressed, groups, V)
        self.scale = 0.3
        self.select_args = dict(geometry=g, scale=self.scale)
        self.idx = REFERENCE.select(self.q, self.compressed[0], pos, first, **self.select_args)

    def run(self, functions, branch, q, k, v, **more):
        g, scale = self.g, self.scale
        if branch == "sliding":
            return functions.sliding(q, k, v, self.pos, self.start, geometry=g, scale=scale, **more)
        if branch == "compressed":
            return functions.compressed(q, k, v, self.pos, self.first, geometry=g, scale=scale, **more)
        return functions.selected(q, k, v, self.idx, self.pos, self.start, geometry=g, scale=scale, **more)

    def inputs(self, branch, dtype=None):
        tensors = (self.q, *(self.compressed if branch == "compressed" else self.raw))
        return [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]

    def out_and_gradients(self, functions, branch, dtype=None):
        q, k, v = self.inputs(branch, dtype)
        out = self.run(functions, branch, q, k, v)
        return [out, *torch.autograd.grad((out * self.weight_of(out)).sum(), (q, k, v))]

    def weight_of(self, out):
        """Weight by which a test multiplies an output before summing it: the same for every backend and dtype."""
        return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)

    def to(self, device):
        for name in ("q", "pos", "start", "first", "idx"):
            setattr(self, name, getattr(self, name).to(device))
        self.raw, self.compressed = ([x.to(device) for x in pair] for pair in (self.raw, self.compressed))
        return self


@cache  # one for all backends
def case_and_reference(branch, layout, geometry, heads):
    """A case, and the output and gradients of the reference in double precision."""
    case = Case(layout, geometry, heads, torch.float32)
    return case, [tensor.detach() for tensor in case.out_and_gradients(REFERENCE, branch, torch.float64)]


@pytest.mark.parametrize("backend", TESTED)
@pytest.mark.parametrize("branch", ATTENTION)
@pytest.mark.parametrize("layout", ["plain", "packed", "leap", "cached"])
@pytest.mark.parametrize(
    ("geometry", "heads"),
    [("tiny", heads) for heads in HEADS] + [(name, (6, 2)) for name in GEOMETRIES if name != "tiny"],
)
def test_matches_reference(backend, branch, layout, geometry, heads):
    case, want = case_and_reference(branch, layout, geometry, heads)
    got = case.out_and_gradients(BACKENDS[backend].functions, branch)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("layout", ["packed", "cached"])
def test_chosen_blocks_are_as_selected_attention_needs_them(backend, layout):
    """Ascending, none twice, −1 past the last: `BranchInputs.idx_BSGN`."""
    case = Case(layout, "tiny", (6, 2), torch.float32)
    functions, both = BACKENDS[backend].functions, BACKENDS[backend].compressed_and_select
    choices = [functions.select(case.q, case.compressed[0], case.pos, case.first, **case.select_args)]
    if both is not None:
        choices.append(both(case.q, *case.compressed, case.pos, case.first, **case.select_args)[1])
    for idx_BSGN in choices:
        next_one, this = idx_BSGN[..., 1:], idx_BSGN[..., :-1]
        assert (((next_one > this) & (this >= 0)) | (next_one == -1)).all()


@pytest.mark.parametrize("backend", TESTED)
@pytest.mark.parametrize("layout", ["plain", "packed", "leap", "cached"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_selects_as_the_reference(backend, layout, geometry):
    for heads in HEADS:
        case = Case(layout, geometry, heads, torch.float32)
        got = BACKENDS[backend].functions.select(case.q, case.compressed[0], case.pos, case.first, **case.select_args)
        assert got.dtype == torch.int32
        assert torch.equal(got, case.idx)


@pytest.mark.parametrize("backend", TESTED)
@pytest.mark.parametrize("branch", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_error_is_at_most_twice_plain_pytorchs(backend, branch, dtype):
    """Plain PyTorch here is the reference's own formula with every intermediate rounded to that dtype."""
    case = Case("plain", "showcase", (6, 2), dtype)
    truth = case.out_and_gradients(REFERENCE, branch, torch.float64)
    ours = case.out_and_gradients(BACKENDS[backend].functions, branch)

    q, k, v = case.inputs(branch)
    visible = visible_keys(case, branch)
    scores = torch.einsum("bsgrk,btgk->bsgrt", q, k) * case.scale
    p = scores.masked_fill(~visible[:, :, :, None], torch.finfo(dtype).min).softmax(-1)
    out = torch.einsum("bsgrt,btgv->bsgrv", p * visible.any(-1)[:, :, :, None, None], v)
    plain = [out, *torch.autograd.grad((out * case.weight_of(out)).sum(), (q, k, v))]
    for a, b, exact in zip(ours, plain, truth, strict=True):
        assert a.dtype == dtype
        assert (a - exact).norm() <= 2 * (b - exact).norm()


def visible_keys(case: Case, branch: str) -> torch.Tensor:
    """Find what each query sees: the keys that its output of the reference depends on."""
    q, k, v = case.inputs(branch, torch.float64)
    n_keys = v.shape[1]
    one_hot = torch.eye(n_keys, dtype=torch.float64)[None, :, None].expand(v.shape[0], -1, v.shape[2], -1)
    return case.run(REFERENCE, branch, q.detach(), k.detach(), one_hot).amax(3) > 0


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("branch", ATTENTION)
def test_hidden_keys_change_no_bit(backend, branch):
    """Poison every key and value that no query of the first half may see; compare bit for bit."""
    functions = BACKENDS[backend].functions
    case = Case("plain", "tiny", (6, 2), torch.float32)
    half = 60
    q, k, v = case.inputs(branch)
    clean = case.run(functions, branch, q, k, v)[:, :half]
    seen = half if branch != "compressed" else case.g.n_compressed(half)
    k, v = k.detach().clone(), v.detach().clone()
    k[:, seen:], v[:, seen:] = 1e4, -1e4
    poisoned = case.run(functions, branch, q, k, v)[:, :half]
    assert torch.equal(clean, poisoned)


@pytest.mark.parametrize("backend", RUN_HERE)
def test_rows_that_see_nothing_are_zero_with_zero_gradient(backend):
    functions = BACKENDS[backend].functions
    case = Case("plain", "showcase", (6, 2), torch.float32)
    early = case.g.l - 1
    q, k, v = case.inputs("compressed")
    out, lse = case.run(functions, "compressed", q, k, v, return_lse=True)
    assert (out[:, :early] == 0).all()
    assert (lse[:, :early] == -torch.inf).all()
    assert lse[:, early:].isfinite().all()
    gradients = torch.autograd.grad(out[:, :early].sum(), (q, k, v), retain_graph=True)
    assert all((g == 0).all() for g in gradients)
    dq = torch.autograd.grad(out.sum(), q)[0]
    assert (dq[:, :early] == 0).all()
    assert dq.isfinite().all()


@pytest.mark.parametrize("backend", TESTED)
@pytest.mark.parametrize("branch", ATTENTION)
def test_lse_matches_reference(backend, branch):
    case = Case("plain", "tiny", (6, 2), torch.float32)
    q, k, v = case.inputs(branch)
    want = case.run(REFERENCE, branch, q, k, v, return_lse=True)[1]
    got = case.run(BACKENDS[backend].functions, branch, q, k, v, return_lse=True)[1]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", RUN_HERE)
def test_ties_go_to_the_lower_index_and_forced_blocks_are_in(backend):
    """Equal keys: every block scores by its overlap alone, so the interior blocks are exact ties."""
    g = Geometry(**GEOMETRIES["tiny"])
    n, t = 120, 117
    q = torch.randn(1, 1, 1, 3, K)
    kc = torch.ones(1, g.n_compressed(n), 1, K)
    pos = torch.tensor([[t]])
    idx = BACKENDS[backend].functions.select(q, kc, pos, torch.zeros_like(pos), geometry=replace(g, n_sel=6), scale=1.0)
    own = t // g.l_sel
    assert idx[0, 0, 0].tolist() == [0, 1, 2, 3, own - 1, own]


@pytest.mark.parametrize("backend", RUN_HERE)
def test_a_valid_block_whose_score_underflows_still_beats_an_invalid_one(backend):
    g = Geometry(**GEOMETRIES["tiny"])
    t = 5 * g.l_sel - 1
    kc = torch.zeros(1, g.n_compressed(t + 40), 1, K)
    kc[:, 1] = 300.0  # all probability on one compressed block: the others underflow to exactly 0
    q = torch.ones(1, 1, 1, 2, K)
    pos = torch.tensor([[t]])
    idx = BACKENDS[backend].functions.select(q, kc, pos, torch.zeros_like(pos), geometry=replace(g, n_sel=8), scale=1.0)
    assert idx[0, 0, 0].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("branch", ATTENTION)
def test_large_logits_stay_finite(backend, branch):
    case = Case("plain", "tiny", (6, 2), torch.float32)
    q, k, v = case.inputs(branch)
    out = case.run(BACKENDS[backend].functions, branch, q * 1e3, k * 1e3, v)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("backend", TESTED)
@pytest.mark.parametrize("branch", ATTENTION)
def test_strided_inputs_and_poisoned_memory_change_nothing(backend, branch):
    """Fused projections hand over views; and every buffer must be written before it is read."""
    functions = BACKENDS[backend].functions
    case = Case("packed", "tiny", (6, 2), torch.float32)
    want = case.out_and_gradients(functions, branch)
    views = [torch.stack((x, x + 1, x - 1), -2)[..., 1, :] - 1 for x in (case.q, *case.raw, *case.compressed)]
    views = [torch.stack((x, x), -2)[..., 0, :] for x in views]
    case.q, case.raw, case.compressed = views[0], tuple(views[1:3]), tuple(views[3:])
    torch.use_deterministic_algorithms(True)  # torch.empty then returns NaN
    try:
        got = case.out_and_gradients(functions, branch)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", TESTED)
@pytest.mark.parametrize("branch", ATTENTION)
def test_operator_is_well_formed(backend, branch):
    """Schema, fake tensors, autograd and ahead-of-time tracing, checked by torch itself."""
    case = Case("packed", "tiny", (4, 2), torch.float32)
    q, k, v = case.inputs(branch)
    idx = case.idx if branch == "selected" else None
    start = case.first if branch == "compressed" else case.start
    torch.library.opcheck(
        torch.ops.nsa.attend.default, (q, k, v, idx, case.pos, start, branch, case.g.ints, case.scale, backend)
    )


@pytest.mark.parametrize("backend", TESTED)
def test_selection_operator_is_well_formed(backend):
    case = Case("packed", "tiny", (4, 2), torch.float32)
    g = case.g
    torch.library.opcheck(
        torch.ops.nsa.select.default,
        (case.q, case.compressed[0], case.pos, case.first, g.ints, case.scale, backend),
    )


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("positions", [[[-1, -1, -1]], [[-9, -20, -9]], [[-1, 40, -1]], [[39, 40, 41], [-1, -1, -1]]])
def test_a_query_before_its_document_sees_nothing(backend, positions):
    """Padding may stand at −1: no block is chosen, nothing is seen, no gradient flows, and no call fails.

    Alone, beside queries that see much, and in a batch where a whole row sees nothing.
    """
    torch.manual_seed(0)
    backend_, g = BACKENDS[backend], Geometry(**GEOMETRIES["tiny"])
    pos = torch.tensor(positions)
    batch, n_queries, start, n = *pos.shape, torch.zeros_like(pos), 48
    nothing = pos < 0
    q = torch.randn(batch, n_queries, 2, 3, K, requires_grad=True)
    k, v = (torch.randn(batch, n, 2, width, requires_grad=True) for width in (K, V))
    n_compressed = g.n_compressed(n)
    sizes = dict(geometry=g, scale=1.0)
    for run in filter(None, (backend_.functions.select, backend_.compressed_and_select)):
        keys = (
            (k[:, :n_compressed],) if run is backend_.functions.select else (k[:, :n_compressed], v[:, :n_compressed])
        )
        output = run(q, *keys, pos, start, **sizes)
        idx = output if isinstance(output, torch.Tensor) else output[1]
        assert (idx[nothing] == -1).all()
        assert (idx[~nothing][..., 0] == 0).all()
    attend = backend_.functions
    for out, lse in (
        attend.sliding(q, k, v, pos, start, geometry=g, scale=1.0, return_lse=True),
        attend.compressed(q, k[:, :n_compressed], v[:, :n_compressed], pos, start, geometry=g, scale=1.0,
                          return_lse=True),
        attend.selected(q, k, v, idx, pos, start, geometry=g, scale=1.0, return_lse=True),
    ):  # fmt: skip
        assert (out[nothing] == 0).all()
        assert (lse[nothing] == -torch.inf).all()
        assert lse[~nothing].isfinite().all()
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(x.isfinite().all() for x in gradients)
        assert (gradients[0][nothing] == 0).all()
        assert all((x[nothing.all(1)] == 0).all() for x in gradients)


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("branch", ATTENTION)
def test_no_queries_at_all(backend, branch):
    case, functions = Case("cached", "tiny", (6, 2), torch.float32), BACKENDS[backend].functions
    case.q, case.pos, case.start, case.first, case.idx = (
        x[:, :0] for x in (case.q, case.pos, case.start, case.first, case.idx)
    )
    assert (
        functions.select(case.q, case.compressed[0], case.pos, case.first, **case.select_args).shape == case.idx.shape
    )
    out, dq, dk, dv = case.out_and_gradients(functions, branch)
    assert out.shape[1] == dq.shape[1] == 0
    assert (dk == 0).all()
    assert (dv == 0).all()


@pytest.mark.parametrize("backend", RUN_HERE)
def test_chosen_blocks_without_keys_add_nothing(backend):
    """A list may name blocks that a cache dropped or that are not there yet, or none at all."""
    case = Case("cached", "tiny", (6, 2), torch.float32)
    case.start = case.start - 24
    case.raw = tuple(x[:, :64] for x in case.raw)
    for idx in (case.idx, torch.full_like(case.idx, -1)):
        case.idx = idx
        want = case.out_and_gradients(REFERENCE, "selected", torch.float64)
        got = case.out_and_gradients(BACKENDS[backend].functions, "selected")
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
