"""The compiled CPU kernels: every instruction set this machine has, any number of threads, one call for decode."""

import functools
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import packed_layout, plain_layout
from nsa.geometry import Geometry
from nsa.kernels.cpu import library
from nsa.kernels.registry import BACKENDS, BackendRequest
from tests.nsa.core.test_against_oracle import cases, make
from tests.shapes import GEOMETRIES, attention_args

BRANCHES = ("compressed", "selected", "sliding")
CPU, REFERENCE = BACKENDS["cpu"], BACKENDS["reference"].functions
# (heads per group, d_k, d_v): the seed's, the paper's, and one that fills no vector.
SHAPES = [(6, 64, 64), (16, 192, 128), (3, 20, 36)]


@pytest.fixture(params=library.ISAS)
def isa(request):
    """Each instruction set in turn; this machine may lack the best ones, which then cannot be tested here."""
    if library.ISAS.index(request.param) > library.ISAS.index(library.best_isa()):
        pytest.skip(f"this machine has {library.best_isa()} at best")
    library.force_isa(request.param)
    yield request.param
    library.force_isa(None)


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Inputs:
    def __init__(self, shape, dtype, n=300, geometry="showcase", layout="packed", groups=2):
        torch.manual_seed(0)
        per_group, d_k, d_v = shape
        g = self.g = Geometry(**GEOMETRIES[geometry])
        if layout == "packed":
            tensors = packed_layout(torch.tensor([0, n // 9, n // 2 + 1, n]), n, g)
        else:
            tensors = plain_layout(1, n, g, torch.device("cpu"))
        self.pos, self.start, self.first = tensors[:3]
        self.q = torch.randn(1, n, groups, per_group, d_k).to(dtype)
        sizes = (n, d_k), (n, d_v), (tensors.begin_BC.shape[1], d_k), (tensors.begin_BC.shape[1], d_v)
        self.k, self.v, self.kc, self.vc = (torch.randn(1, t, groups, x).to(dtype) for t, x in sizes)
        self.scale = d_k**-0.5
        self.sizes = dict(geometry=g, scale=self.scale)
        self.idx = REFERENCE.select(self.q, self.kc, self.pos, self.first, **self.sizes)

    def tensors(self, branch):
        return (self.q, self.kc, self.vc) if branch == "compressed" else (self.q, self.k, self.v)

    def run(self, functions, branch, q, k, v):
        g = self.g
        if branch == "compressed":
            return functions.compressed(q, k, v, self.pos, self.first, geometry=g, scale=self.scale)
        if branch == "sliding":
            return functions.sliding(q, k, v, self.pos, self.start, geometry=g, scale=self.scale)
        return functions.selected(q, k, v, self.idx, self.pos, self.start, geometry=g, scale=self.scale)

    def out_and_gradients(self, functions, branch, dtype=None):
        q, k, v = (x.to(dtype or x.dtype).requires_grad_() for x in self.tensors(branch))
        out = self.run(functions, branch, q, k, v)
        torch.manual_seed(1)
        return [out, *torch.autograd.grad(out, (q, k, v), torch.randn(out.shape).to(out.dtype))]


@functools.cache  # one for all instruction sets: in double precision it takes longer than what is tested
def inputs_and_reference(branch, *arguments, **more):
    """Inputs, and the output and gradients of the reference in double precision."""
    inputs = Inputs(*arguments, **more)
    return inputs, [tensor.detach() for tensor in inputs.out_and_gradients(REFERENCE, branch, torch.float64)]


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)], ids=str)
def test_every_instruction_set_matches_the_reference(isa, branch, shape, dtype, limit):
    inputs, want = inputs_and_reference(branch, shape, dtype)
    for got, exact in zip(inputs.out_and_gradients(CPU.functions, branch), want, strict=True):
        assert error(got, exact) < limit


@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize("geometry", ["showcase", "tiny", "long_blocks"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)], ids=str)
def test_branch_and_selection_in_one_pass_are_those_of_two(isa, layout, geometry, dtype, limit):
    inputs, want = inputs_and_reference("compressed", (6, 16, 24), dtype, layout=layout, geometry=geometry)
    q, kc, vc = (x.requires_grad_() for x in inputs.tensors("compressed"))
    out, idx = CPU.compressed_and_select(q, kc, vc, inputs.pos, inputs.first, **inputs.sizes)
    assert torch.equal(idx, inputs.idx)
    assert torch.equal(CPU.functions.select(q, kc, inputs.pos, inputs.first, **inputs.sizes), idx)
    torch.manual_seed(1)
    gradients = torch.autograd.grad(out, (q, kc, vc), torch.randn(out.shape).to(dtype))
    for got, exact in zip((out, *gradients), want, strict=True):
        assert error(got, exact) < limit


@pytest.mark.parametrize("kinds", [None, 1, 2], ids=["all differ", "all tie", "two kinds of keys"])
def test_the_choice_among_many_blocks_is_exact(isa, kinds):
    """Uses more blocks than are compared one by one; where keys repeat, most blocks tie and the lower index wins."""
    inputs = Inputs((3, 16, 16), torch.float32, n=1500, geometry="tiny", layout="plain")
    kc = inputs.kc
    if kinds:
        run = 3 * inputs.g.l_sel // inputs.g.d
        kc = kc[:, torch.arange(kc.shape[1]) // run % kinds].contiguous()
    sizes = inputs.sizes | dict(geometry=replace(inputs.sizes["geometry"], n_sel=12))
    want = REFERENCE.select(inputs.q.double(), kc.double(), inputs.pos, inputs.first, **sizes)
    assert torch.equal(CPU.functions.select(inputs.q, kc, inputs.pos, inputs.first, **sizes), want)


def test_the_fused_operator_is_well_formed():
    inputs = Inputs((2, 8, 6), torch.float32, n=90, geometry="tiny")
    q, kc, vc = (x.requires_grad_() for x in inputs.tensors("compressed"))
    torch.library.opcheck(
        torch.ops.nsa.compressed_and_select.default,
        (q, kc, vc, inputs.pos, inputs.first, inputs.g.ints, inputs.scale, "cpu"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_threads_gives_the_same_bits(isa, dtype, set_threads):
    inputs = Inputs((6, 32, 32), dtype, n=700)

    def everything():
        both = CPU.compressed_and_select(inputs.q, inputs.kc, inputs.vc, inputs.pos, inputs.first, **inputs.sizes)
        return [*both, *(x for branch in BRANCHES for x in inputs.out_and_gradients(CPU.functions, branch))]

    set_threads(1)
    want = everything()
    for threads in (2, 3, 7):
        set_threads(threads)
        for got, expected in zip(everything(), want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("branch", BRANCHES)
def test_the_future_changes_no_bit_and_gets_no_gradient(isa, dtype, branch):
    inputs = Inputs((6, 64, 64), dtype, layout="plain")
    q, k, v = inputs.tensors(branch)
    half = 150
    seen = inputs.g.n_compressed(half) if branch == "compressed" else half
    clean = inputs.run(CPU.functions, branch, q, k, v)[:, :half]
    k, v = k.clone(), v.clone()
    k[:, seen:], v[:, seen:] = 1e4, -1e4
    k.requires_grad_(), v.requires_grad_()
    poisoned = inputs.run(CPU.functions, branch, q, k, v)[:, :half]
    assert torch.equal(clean, poisoned)
    for gradient in torch.autograd.grad(poisoned.float().sum(), (k, v)):
        assert (gradient[:, seen:] == 0).all()


@pytest.mark.parametrize("changes", [{}, dict(l=4, d=2, l_sel=64, n_sel=6, w=300)], ids=["one piece", "several"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_decode_equals_the_single_branches(isa, changes, dtype, set_threads):
    """Rows of different lengths, from an empty cache to one that selects, with a ring that has wrapped."""
    args = attention_args("tiny", (12, 2), **changes, d_k=32, d_v=24, dim=48)
    torch.manual_seed(0)
    module = NSAAttention(**args).to(dtype)
    plain = NSAAttention(**args, kernels=BackendRequest(*["reference"] * 4)).to(dtype)
    plain.load_state_dict(module.state_dict())
    n, steps = 8 * module.geometry.l_sel + 11, 2 * module.geometry.d + 1  # every row ends a compressed block
    lengths = torch.tensor([0, 1, n // 2, n])
    x = torch.randn(4, n + steps, 48).to(dtype)
    for threads in (1, 3):
        set_threads(threads)
        caches = [m.new_cache(4, n + steps) for m in (module, plain)]
        for cache in caches:
            module(x[:, :n], cache=cache, new_lens_B=lengths)
        for t in range(n, n + steps):
            got, want = (m(x[:, t : t + 1], cache=c) for m, c in zip((module, plain), caches, strict=True))
            assert error(got, want.double()) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_decode_has_the_same_bits_for_any_number_of_threads(isa, set_threads):
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("showcase", (12, 2), d_k=32, d_v=32, dim=48))
    x = torch.randn(2, 701, 48)
    outputs = []
    for threads in (1, 2, 5):
        set_threads(1)  # the projections around the kernel are torch's
        cache = module.new_cache(2, 701)
        module(x[:, :700], cache=cache)
        q, streams = module.project(x[:, 700:], module.rotary.tables(cache.positions(1)))
        decoder = module._decoder(cache, q)
        cache.append(streams, None, module.compress, decoder)
        set_threads(threads)
        outputs.append(decoder.attend(q.detach(), module.gates(x[:, 700:]).detach()))
    for got in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, outputs[0], strict=True))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases())
def test_any_sizes_and_any_packing_equal_fp64(case):
    """Forward and gradients of the whole module, compared with the portable backend, which the oracle checks."""
    args, documents, seed = case
    exact = make(seed, **args)
    module = NSAAttention(**args, kernels=BackendRequest(*["cpu"] * 4))
    module.load_state_dict(exact.state_dict())
    x = torch.randn(1, sum(documents), args["dim"], dtype=torch.float64)
    cu_doc_lens = torch.tensor([0, *documents], dtype=torch.int32).cumsum(0).int()
    results = []
    for m, y in ((module, x.float().requires_grad_()), (exact, x.requires_grad_())):
        out = m(y, cu_doc_lens=cu_doc_lens)
        results.append((out, torch.autograd.grad(out.square().sum(), y)[0]))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-4 * want.abs().max().item(), rtol=1e-4)


RUN_BESIDE_ANOTHER_RUNTIME = """
import ctypes, os, sys
import torch
ctypes.CDLL(sys.argv[1])  # as scikit-learn does
from nsa.geometry import Geometry
from nsa.kernels.registry import BACKENDS
torch.set_num_threads(2)
torch.ones(1 << 22).mul(2)  # torch starts its threads
before = len(os.listdir("/proc/self/task"))
q, k = torch.randn(1, 512, 1, 4, 32), torch.randn(1, 512, 1, 32)
rows = torch.arange(512)[None], torch.zeros(1, 512, dtype=torch.int64)
sizes = dict(geometry=Geometry(l=16, d=8, l_sel=16, n_sel=4, w=64), scale=1.0)
BACKENDS["cpu"].functions.sliding(q, k, k, *rows, **sizes)
print(before, len(os.listdir("/proc/self/task")))
"""


def test_kernels_start_no_threads_beside_torchs_own(tmp_path):
    """Two pools compete for the cores: decoding took three times as long beside scikit-learn's OpenMP runtime."""
    runtime = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    if not runtime.exists():
        pytest.skip("this torch has no OpenMP runtime of its own to copy")
    other = shutil.copy(runtime, tmp_path / "libgomp-another.so.1")
    command = [sys.executable, "-c", RUN_BESIDE_ANOTHER_RUNTIME, other]
    before, after = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert before == after
