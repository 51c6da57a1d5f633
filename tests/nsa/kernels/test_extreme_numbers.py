"""Scores of any size, and numbers that are not finite: what a query does not see changes nothing, on every backend."""

import pytest
import torch

from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import packed_layout
from nsa.geometry import Geometry
from nsa.kernels.cpu import library
from nsa.kernels.registry import BACKENDS
from tests.backends import RUN_HERE
from tests.shapes import GEOMETRIES, attention_args

REFERENCE = BACKENDS["reference"].functions
BRANCHES = ("compressed", "selected", "sliding")
# The C++ kernels with every instruction set of this machine; the best of them computes bf16 alone.
SETS = [f"cpu {isa}" for isa in library.ISAS[: library.ISAS.index(library.best_isa()) + 1]] if "cpu" in RUN_HERE else []
RUN = [name for name in RUN_HERE if name != "cpu"] + SETS
DOCUMENTS = (0, 1, 40, 40, 97, 150)
K, V, GROUPS, HEADS = 8, 6, 2, 3


@pytest.fixture(params=RUN)
def backend(request):
    """Name, and the dtype in which it is tested."""
    name, _, isa = request.param.partition(" ")
    library.force_isa(isa or None)
    yield name, torch.bfloat16 if isa == "amx" else torch.float32
    library.force_isa(None)


class Packed:
    """Queries, keys and values of small integers, with which all products are exact, of documents in one row."""

    def __init__(self, dtype, geometry="tiny", documents=DOCUMENTS):
        g = self.g = Geometry(**GEOMETRIES[geometry])
        layout = packed_layout(torch.tensor(documents), documents[-1], g)
        self.pos, self.start, self.first, self.begin, _ = layout
        random = torch.Generator().manual_seed(0)

        def tensor(n, *shape):
            return torch.randint(-100, 101, (1, n, GROUPS, *shape), generator=random).to(dtype)

        n, n_compressed = documents[-1], self.begin.shape[1]
        self.q, self.dout = tensor(n, HEADS, K), tensor(n, HEADS, V)
        self.raw, self.entries = (tensor(n, K), tensor(n, V)), (tensor(n_compressed, K), tensor(n_compressed, V))
        self.scale = 0.25

    @property
    def scores(self):
        return dict(geometry=self.g, scale=self.scale)

    def select(self, functions):
        return functions.select(self.q, self.entries[0], self.pos, self.first, **self.scores)

    def run(self, functions, branch, idx):
        """Output, log-sum-exps, and the gradients of queries, keys and values."""
        k, v = self.entries if branch == "compressed" else self.raw
        q, k, v = (x.detach().clone().requires_grad_() for x in (self.q, k, v))
        at = (self.pos, self.first if branch == "compressed" else self.start)
        chosen = (idx,) if branch == "selected" else ()
        out, lse = getattr(functions, branch)(q, k, v, *chosen, *at, **self.scores, return_lse=True)
        return out, lse, *torch.autograd.grad(out, (q, k, v), self.dout)


@pytest.mark.parametrize(
    "scale", [2.0**33, -(2.0**33), 2.0**40, -(2.0**40), 2.0**105, -(2.0**105), -(2.0**-12), 0.0, 1e-30]
)
@pytest.mark.parametrize("branch", BRANCHES)
def test_scores_of_any_size_are_those_of_the_reference(backend, branch, scale):
    """1e14 to 1e36, above or below those of hidden keys; and scales that leave no difference between scores."""
    name, dtype = backend
    if name == "triton" and abs(scale) > 1:
        pytest.skip("its log-sum-exps are rounded between base 2 and e: gradients need scores below 1e5 or so")
    case, exact = Packed(dtype), Packed(torch.float64)
    case.scale = exact.scale = scale
    functions, idx = BACKENDS[name].functions, exact.select(REFERENCE)
    if abs(scale) > 1:  # else probabilities differ by less than their rounding
        assert torch.equal(case.select(functions), idx)
        if both := BACKENDS[name].compressed_and_select:
            assert torch.equal(both(case.q, *case.entries, case.pos, case.first, **case.scores)[1], idx)
    got, want = case.run(functions, branch, idx), exact.run(REFERENCE, branch, idx)
    limit = 2e-2 if dtype == torch.bfloat16 else 2e-6
    for what, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        close = dict(atol=limit * b[b.isfinite()].abs().max().item(), rtol=limit)
        torch.testing.assert_close(a.double(), b, **close, msg=lambda m, w=what: f"{w}: {m}")


@pytest.mark.parametrize("kind", ["nsa", "merged"])
@pytest.mark.parametrize("scale", [1e10, -1e10, 1e31, -1e31])
def test_decode_with_scores_of_any_size_is_that_of_the_reference(backend, kind, scale):
    name, dtype = backend
    if name == "triton":
        pytest.skip("as above")
    args, outs = attention_args("tiny", (6, 2), d_k=16), []
    for kernels, wide in ((name, dtype), ("reference", torch.float64)):
        torch.manual_seed(0)
        module = NSAAttention(**args, kernels=kernels, kind=kind).to(dtype).to(wide).requires_grad_(False)
        module.strategy.options["scale"] = scale
        cache, x = module.new_cache(2, 90), torch.randn(2, 90, 24).to(dtype).to(wide)
        module(x[:, :80], cache=cache)
        outs.append(torch.cat([module(x[:, t : t + 1], cache=cache) for t in range(80, 90)], 1).double())
    limit = 3e-2 if dtype == torch.bfloat16 else 1e-5
    # Queries whose two largest scores differ by less than their rounding may read another key.
    right = ((outs[0] - outs[1]).abs() <= limit * outs[1].abs().max()).all(-1)
    assert outs[0].isfinite().all()
    assert right.double().mean() > (0.6 if dtype == torch.bfloat16 else 0.9)


BAD_TOKEN, BAD_DOCUMENT = 80, slice(40, 97)


def others_than(bad, n):
    return ~torch.zeros(n, dtype=torch.bool).index_fill(0, torch.arange(bad.start, bad.stop), True)


def spoil(case, what, value, branch):
    """Change one number of a token of the fourth document, or of a compressed entry; the first token that sees it."""
    entry = int(case.first[0, BAD_TOKEN]) + 3
    of_entry = branch == "compressed" and what in "kv"
    k, v = case.entries if branch == "compressed" else case.raw
    tensor = {"q": case.q, "k": k, "v": v, "dout": case.dout}[what]
    tensor[0, entry if of_entry else BAD_TOKEN, 0, ..., 1] = value
    return BAD_DOCUMENT.start + 3 * case.g.d + case.g.l - 1 if of_entry else BAD_TOKEN


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("what", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("branch", BRANCHES)
def test_a_number_that_is_not_finite_reaches_only_those_who_see_it(backend, branch, what, value):
    """Other documents keep their outputs and gradients, and queries before the token their outputs, bit for bit."""
    name, dtype = backend
    if name == "reference" and what == "dout":
        pytest.skip("autograd multiplies gradients that are not finite by weights of 0")
    clean, spoiled = Packed(dtype), Packed(dtype)
    clean.scale = spoiled.scale = 1e-4
    functions, idx = BACKENDS[name].functions, clean.select(REFERENCE)
    first_to_see = spoil(spoiled, what, value, branch)
    got, want = spoiled.run(functions, branch, idx), clean.run(functions, branch, idx)
    queries = others_than(BAD_DOCUMENT, DOCUMENTS[-1])
    entries = slice(*(int(spoiled.first[0, at]) for at in (BAD_DOCUMENT.start, BAD_DOCUMENT.stop)))
    keys = others_than(entries, spoiled.entries[0].shape[1]) if branch == "compressed" else queries
    earlier = queries.clone()
    earlier[BAD_DOCUMENT.start : first_to_see] = True
    # Where not all is finite the reference adds in another order, and tiles of bf16 give way to vectors.
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5 if name == "reference" else 0
    for a, b, rows in zip(got, want, (earlier, earlier, queries, keys, keys), strict=True):
        atol = limit * b[b.isfinite()].abs().max().item()
        torch.testing.assert_close(a[0, rows], b[0, rows], atol=atol, rtol=limit)
    if what != "k" or value != value:  # a score of −inf is a weight of 0
        assert not got[2 if what == "dout" else 0][0, BAD_DOCUMENT].isfinite().all()


@pytest.mark.parametrize("what", ["q", "k"])
def test_nan_scores_rank_lowest(backend, what):
    name, dtype = backend
    clean, spoiled = Packed(dtype), Packed(dtype)
    clean.scale = spoiled.scale = 2.0**-10
    spoil(spoiled, what, torch.nan, "compressed")
    got, want = spoiled.select(BACKENDS[name].functions), spoiled.select(REFERENCE)
    assert torch.equal(got, want)
    if both := BACKENDS[name].compressed_and_select:
        assert torch.equal(both(spoiled.q, *spoiled.entries, spoiled.pos, spoiled.first, **spoiled.scores)[1], want)
    queries = others_than(BAD_DOCUMENT, DOCUMENTS[-1])
    assert torch.equal(got[:, queries], clean.select(REFERENCE)[:, queries])
    assert got[0, BAD_TOKEN, 0].tolist() == [0, 1, 4, 5]  # the first, the lowest of the others, the nearest two
