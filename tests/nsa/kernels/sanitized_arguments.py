"""Random and hostile arguments of the CPU kernels; run by `python -m proofs.sanitize_cpu`, which sees what they touch.

Every call either raises an error of ours or computes what the portable backend computes. Memory errors, overflows and
races are reported by the sanitizer, which ends the process.
"""

import threading
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from nsa.core.nsa_attention import NSAAttention
from nsa.errors import NSAError
from nsa.geometry import Geometry
from nsa.kernels.cpu import CpuDecoder, library
from nsa.kernels.registry import BACKENDS, BackendRequest
from tests.nsa.core.hostile_arguments import ATTACKS
from tests.nsa.core.test_against_oracle import cases
from tests.nsa.kernels.test_cpu_decoder import Streams

CPU, PORTABLE = BACKENDS["cpu"], BACKENDS["portable"]
DTYPES = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
FAR = st.sampled_from([2**31, 2**39, 2**40, 2**40 + 1, 2**62, 2**63 - 1]).flatmap(lambda x: st.sampled_from([x, -x]))


@st.composite
def geometries(draw: Any) -> Geometry:
    d = draw(st.integers(1, 5))
    l, l_sel = d * draw(st.integers(1, 4)), d * draw(st.integers(1, 4))
    return Geometry(l=l, d=d, l_sel=l_sel, n_sel=draw(st.integers(3, 6)), w=draw(st.integers(1, 40)))


@st.composite
def machines(draw: Any) -> tuple[str, int]:
    """An instruction set of this machine and a number of threads."""
    return draw(st.sampled_from(library.ISAS[: library.ISAS.index(library.best_isa()) + 1])), draw(st.integers(1, 4))


@st.composite
def problems(draw: Any) -> dict[str, Any]:
    """Tensors of one call: any sizes and strides, positions and blocks that may lie anywhere."""
    B, S, G, R = (draw(st.integers(*span)) for span in ((1, 2), (0, 40), (1, 2), (1, 7)))
    T, K, V = draw(st.integers(0, 70)), draw(st.integers(1, 37)), draw(st.integers(1, 37))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from(list(DTYPES)))

    def tensor(*shape: int) -> Tensor:
        """Sometimes a part of a larger one, so that an access next to it is no access to it."""
        full = torch.randn(*shape[:-1], shape[-1] + draw(st.integers(0, 3)), generator=random).to(dtype)
        return full[..., : shape[-1]]

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    pos, start = numbers(-3, T + 10, B, S), numbers(-20, T + 5, B, S)
    if draw(st.booleans()):  # as a model gives them: one document
        pos, start = torch.arange(S).expand(B, S).contiguous(), torch.zeros(B, S, dtype=torch.int64)
    far = draw(st.one_of(st.none(), FAR))
    if far is not None and S:
        (pos if draw(st.booleans()) else start)[draw(st.integers(0, B - 1)), draw(st.integers(0, S - 1))] = far
    idx = numbers(-2, T // 2 + 3, B, S, G, draw(st.integers(1, 6))).sort().values
    if draw(st.booleans()) and S:
        idx[0, 0, 0, -1] = draw(st.sampled_from([2**31 - 1, -(2**31), 2**30]))
    q, k, v = tensor(B, S, G, R, K), tensor(B, T, G, K), tensor(B, T, G, V)
    return dict(q=q, k=k, v=v, pos=pos, start=start, idx=idx, far=far, dtype=dtype)


def outputs(backend: Any, branch: str, x: dict[str, Any], geometry: Geometry) -> list[Tensor]:
    """The branch's output and gradients; of the choice of blocks, the blocks."""
    q, k, v = (x[name].detach().clone().requires_grad_() for name in "qkv")
    sizes = dict(geometry=geometry, scale=0.3)
    if branch == "select":
        return [backend.functions.select(q, k, x["pos"], x["start"], **sizes)]
    if branch == "both":
        out, idx = backend.compressed_and_select(q, k, v, x["pos"], x["start"], **sizes)
        return [*with_gradients(out, q, k, v), idx]
    chosen = (x["idx"].int(),) if branch == "selected" else ()
    out = getattr(backend.functions, branch)(q, k, v, *chosen, x["pos"], x["start"], **sizes)
    return with_gradients(out, q, k, v)


def with_gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]


def on(machine: tuple[str, int]) -> None:
    library.force_isa(machine[0])
    torch.set_num_threads(machine[1])


@pytest.fixture(scope="module", autouse=True)
def usual_machine() -> Any:
    before = torch.get_num_threads()
    yield
    on((library.best_isa(), before))
    library.force_isa(None)


@given(problems(), geometries(), machines(), st.sampled_from(["sliding", "compressed", "selected", "select", "both"]))
def test_a_call_with_any_arguments(x, geometry, machine, branch):
    on(machine)
    try:
        got = outputs(CPU, branch, x, geometry)
    except NSAError:
        return
    if x["far"] is None and branch in ("sliding", "compressed", "selected"):
        on(("plain", 1))
        want = outputs(PORTABLE, branch, {**x, **{name: x[name].float() for name in "qkv"}}, geometry)
        for a, b in zip(got, want, strict=True):
            limit = DTYPES[x["dtype"]] * max(1.0, b.abs().max().item() if b.numel() else 1.0)
            torch.testing.assert_close(a.float(), b, atol=4 * limit, rtol=0)


@given(cases(), machines(), st.lists(st.integers(0, 9), min_size=2, max_size=2), st.sampled_from(list(DTYPES)))
def test_a_cache_that_is_filled_and_decoded(case, machine, lengths, dtype):
    args, documents, seed = case
    torch.manual_seed(seed)
    module = NSAAttention(**args, kernels=BackendRequest(*["cpu"] * 4)).to(dtype).eval()
    on(machine)
    n = sum(documents)
    cache = module.new_cache(2, n + 3 * args["d"])
    x = torch.randn(2, n + 3 * args["d"], args["dim"]).to(dtype)
    with torch.no_grad():
        module(x[:, :n], cache=cache, new_lens_B=torch.tensor([min(n, m) for m in lengths]))
        for t in range(n, n + 3 * args["d"]):
            assert module(x[:, t : t + 1], cache=cache).isfinite().all()


@given(machines(), st.data())
def test_a_block_table_with_any_entries(machine, data):
    """Pages that the pool does not have, in any of the four tables, at any entry."""
    on(machine)
    streams = Streams("showcase", data.draw(st.sampled_from(list(DTYPES))), K=20, V=12)
    view = streams.view(True)
    tables = [view.tail, *(keys.pages for keys in (view.compressed, view.selected, view.window))]
    table = data.draw(st.sampled_from(tables)).table_BP
    for _ in range(data.draw(st.integers(0, 2))):
        row, column = data.draw(st.integers(0, len(table) - 1)), data.draw(st.integers(0, table.shape[1] - 1))
        table[row, column] = data.draw(st.sampled_from([-1, -(2**31), 2**31 - 1, 400]))
    try:
        view = view._replace(compressed=view.compressed._replace(pos_B1=view.selected.pos_B1))
        decoder = CpuDecoder(view, heads_per_group=3, means=True, geometry=streams.g, scale=0.2)
        for q in streams.q:
            at = torch.arange(4), view.length_B.clone()
            decoder.append(tuple(x[at][:, None] for x in streams.raw))
            decoder.attend(q, streams.gates)
    except NSAError:
        return


@given(machines(), st.tuples(*[st.integers(1, 40)] * 4), st.booleans(), st.sampled_from(list(DTYPES)))
def test_a_mix_of_any_sizes(machine, sizes, per_group, dtype):
    on(machine)
    tokens, groups, heads, width = sizes
    gates = torch.rand(1, tokens, groups % 3 + 1, 1 if per_group else heads, 3).requires_grad_()
    branches = [torch.randn(1, tokens, groups % 3 + 1, heads, width).to(dtype).requires_grad_() for _ in range(3)]
    out = CPU.mix(gates, *branches)
    for got in torch.autograd.grad(out, (gates, *branches), torch.ones_like(out)):
        assert got.isfinite().all()


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_python_threads_that_call_at_once(dtype, request):
    """Four threads, each with threads of the kernels' own: prefill, gradients, cache and decode; equal bits."""
    on((library.best_isa(), 3))
    n, calls = (90, 2) if request.config.getoption("--sanitizer-short", default=True) else (300, 12)
    torch.manual_seed(0)
    args = dict(dim=24, n_heads=6, n_kv_groups=2, d_k=8, d_v=6, phi="avg", kv="per_branch")
    module = NSAAttention(**args, l=8, d=4, l_sel=8, n_sel=4, w=12, kernels=BackendRequest(*["cpu"] * 4)).to(dtype)
    x = torch.randn(2, n, 24).to(dtype)
    results: list[list[Tensor]] = []

    def use() -> None:
        for _ in range(calls):
            y = x.clone().requires_grad_()
            out = module(y)
            cache, gradient = module.new_cache(2, n + 4), torch.autograd.grad(out.float().sum(), y)[0]
            with torch.no_grad():
                module(x, cache=cache)
                last = [module(x[:, i : i + 1], cache=cache) for i in range(4)]
            results.append([out.detach(), gradient, *last])

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 * calls
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("name", ATTACKS)
def test_a_known_attack(name, request):
    """Runs the attacks of test_hostile_arguments.py, which checks their outcomes; here memory accesses are checked."""
    few = request.config.getoption("--sanitizer-short", default=True) and "overflow" not in name
    if few and sorted(ATTACKS).index(name) % 4:
        pytest.skip("one of four in the short set")
    on((library.best_isa(), 2))
    try:
        ATTACKS[name]()
    except NSAError:
        return
