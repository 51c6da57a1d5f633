"""Comparison of a backend with the reference: a right backend holds, a wrong one fails where it is wrong.

Shown with the C++ backend, whose functions are the same as Triton's and which runs here at full speed.
"""

import dataclasses
from itertools import pairwise

import pytest
import torch

from nsa.bench.case import SHAPES
from nsa.check import kernel_checks
from nsa.check.cases import _MOST_TOKENS, _packed_rows, self_check_case
from nsa.check.comparison import CheckResult, bounded, differing, poisoned_memory, relative_rms
from nsa.core.positions import packed_layout
from nsa.geometry import Geometry
from nsa.kernels import registry
from nsa.kernels.interface import KernelShape
from nsa.kernels.registry import BACKENDS
from nsa.kernels.triton import PIECE

CPU = torch.device("cpu")
GEOMETRY = Geometry(l=8, d=4, l_sel=8, n_sel=4, w=12)
SHAPE = KernelShape(2, 3, 24, 16, GEOMETRY)


def figures(shape: KernelShape = SHAPE, dtype: torch.dtype = torch.float32) -> list[CheckResult]:
    case = self_check_case(shape, small=True)
    return [f for part in kernel_checks.parts(case, CPU, dtype, "cpu") for f in kernel_checks._check_part(part, CPU)]


def wrong(results: list[CheckResult]) -> set[str]:
    return {figure.claim for figure in results if not figure.holds}


@pytest.fixture
def replaced(monkeypatch):
    """Replace functions of the C++ backend."""

    def replace(**functions) -> None:
        backend = BACKENDS["cpu"]
        of_branches = {name: functions.pop(name) for name in list(functions) if name in registry.BRANCHES}
        changed = dataclasses.replace(backend, functions=backend.functions._replace(**of_branches), **functions)
        monkeypatch.setitem(BACKENDS, "cpu", changed)

    return replace


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_right_backend_holds_in_every_part(dtype):
    results = figures(dtype=dtype)
    assert wrong(results) == set()
    claims = {figure.claim for figure in results}
    for branch in ("compressed", "selected", "sliding"):
        for name in ("out", "dq", "dk", "dv", "lse", "dq, lse used", "dk, lse used"):
            assert f"{branch} {name}" in claims
    assert {"compressed_and_select blocks", "select blocks", "decode out, step 3"} <= claims
    assert any(name.startswith("mix") and name.endswith("dgates") for name in claims)


@pytest.mark.parametrize(
    "geometry", [Geometry(l=4, d=4, l_sel=8, n_sel=3, w=40), Geometry(l=6, d=2, l_sel=4, n_sel=5, w=1)], ids=str
)
def test_other_geometries_hold_too(geometry):
    assert wrong(figures(KernelShape(1, 5, 16, 40, geometry))) == set()


def test_a_window_of_one_token_more_fails_in_the_sliding_branch_alone(replaced):
    right = BACKENDS["cpu"].functions.sliding

    def sliding(*args, geometry, **options):
        return right(*args, geometry=dataclasses.replace(geometry, w=geometry.w + 1), **options)

    replaced(sliding=sliding)
    names = wrong(figures())
    assert {"sliding out", "sliding dq", "sliding dk", "sliding dv", "sliding lse"} <= names
    assert all(name.startswith("sliding") for name in names)


def test_a_gradient_of_the_log_sum_exps_that_is_dropped_is_seen(replaced):
    right = BACKENDS["cpu"].functions.compressed

    def compressed(*args, **options):
        out, lse = right(*args, **options)
        return out, lse.detach() + 0 * out.sum()

    replaced(compressed=compressed)
    assert wrong(figures()) == {"compressed dq, lse used", "compressed dk, lse used"}


def test_other_blocks_fail_and_near_ties_do_not(replaced):
    right = BACKENDS["cpu"].functions.select
    replaced(select=lambda *args, **options: right(*args, **options).flip(1))
    assert wrong(figures()) == {"select blocks"}


def test_nan_fails(replaced):
    right = BACKENDS["cpu"].functions.sliding

    def sliding(*args, **options):
        out, lse = right(*args, **options)
        return out.clone().index_fill(1, torch.tensor([3]), torch.nan), lse

    replaced(sliding=sliding)
    assert "sliding out" in wrong(figures())


def test_random_bits_uninitialised_memory_and_autocast_are_seen(replaced):
    right = BACKENDS["cpu"].mix

    def noisy(*args):
        return right(*args) * (1 + 1e-6 * torch.rand(()))

    replaced(mix=noisy)
    assert all("values that differ again" in name or "autocast" in name for name in wrong(figures()))
    assert wrong(figures())

    def unwritten(*args):
        return right(*args) + 0 * torch.empty(1)

    replaced(mix=unwritten)
    assert any("held NaN (out" in name for name in wrong(figures()))

    def cast(gates, *rest):
        scale = (torch.ones(1, 1) @ torch.full((1, 1), 1 + 2.0**-12)).float() / (1 + 2.0**-12)
        return right(gates, *rest) * scale[0, 0]

    replaced(mix=cast)
    names = wrong(figures())
    assert names
    assert all("under autocast" in name for name in names)


@pytest.mark.parametrize("shape", [SHAPES[name].kernel for name in ("base", "gqa16", "paper")], ids=str)
def test_sizes_on_a_gpu_reach_every_path(shape):
    case, g = self_check_case(shape, small=False), shape.geometry
    assert case.length % 16 != 0
    assert PIECE < case.length <= _MOST_TOKENS
    assert g.n_blocks(case.length) > g.n_sel
    assert case.length > g.w
    assert g.n_compressed(case.length) > 64  # more than one tile of compressed keys
    lengths = [end - begin for begin, end in pairwise(case.documents[1])]
    assert {0, 1} <= set(lengths)
    assert any(0 < n < g.l for n in lengths[1:])
    assert any(g.l <= n < g.w for n in lengths)
    short, long = case.decode_lengths
    assert g.n_compressed(short) == 0 < g.n_compressed(short + 2)
    assert g.n_compressed(long + 2) == g.n_compressed(long + 1) + 1
    assert long > g.w
    assert g.n_blocks(long) > g.n_sel
    assert long + 3 <= case.length


def test_a_window_longer_than_any_row_is_not_filled():
    assert self_check_case(SHAPE._replace(geometry=Geometry(w=100_000)), small=False).length == _MOST_TOKENS


def test_positions_are_those_of_packed_documents():
    documents = ((0, 57), (0, 1, 8, 8, 27, 57))
    got = _packed_rows(documents, GEOMETRY)
    for row, cumulative in enumerate(documents):
        want = packed_layout(torch.tensor(cumulative), 57, GEOMETRY)
        for mine, its in zip(got, want[:3], strict=True):
            assert torch.equal(mine[row], its[0])


def test_errors():
    x, inf = torch.tensor([1.0, 2.0]), torch.tensor([-torch.inf, 2.0])
    assert relative_rms(x, x) == 0.0
    assert relative_rms(inf, inf) == 0.0
    assert not bounded("", relative_rms(x, inf), 1e9).holds
    assert not bounded("", relative_rms(inf, x), 1e9).holds
    assert not bounded("", relative_rms(x * torch.nan, x), 1e9).holds
    assert differing("", {"a": x, "b": x}, {"a": x, "b": x + 1}) == bounded("", 2, 0, "b: 2")
    with poisoned_memory():
        assert torch.empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
