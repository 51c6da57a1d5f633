"""Ambient autocast reaches no kernel: outputs, gradients and chosen blocks are those of the dtype that was given.

Every backend of this machine; under TRITON_INTERPRET=1 the GPU kernels too; on a GPU with `pytest -m cuda`.
"""

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from nsa.core.branches import BRANCH_ORDER
from nsa.core.nsa_attention import NSAAttention
from nsa.core.rope import rotate
from nsa.errors import ConfigError
from nsa.kernels import reference
from nsa.kernels.registry import BACKENDS, BRANCHES, BackendRequest
from tests.attention_options import PHIS
from tests.backends import RUN_HERE
from tests.nsa.kernels.test_backends import REFERENCE, Case, visible_keys
from tests.shapes import attention_args

ATTENTION = [branch for branch in BRANCHES if branch != "select"]
WHERE = [
    *((name, "cpu") for name in RUN_HERE),
    *(pytest.param(name, "cuda", marks=pytest.mark.cuda) for name in BACKENDS if name not in ("cpu", "flash")),
]
on_every_backend = pytest.mark.parametrize(("backend", "device"), WHERE)


def autocast(device):
    return torch.autocast(device, torch.bfloat16)


def large_case(device, dtype=torch.float32, geometry="showcase"):
    """Logits of ±10 and more, as attention learns them: rounded to bf16 they are off by several percent."""
    case = Case("plain", geometry, (6, 2), torch.float32).to(device)
    case.q, case.scale = (case.q * 8).to(dtype), 0.5
    case.raw, case.compressed = ([x.to(dtype) for x in pair] for pair in (case.raw, case.compressed))
    case.select_args["scale"] = case.scale
    case.idx = select(case, REFERENCE)
    return case


def select(case, functions):
    return functions.select(case.q, case.compressed[0], case.pos, case.first, **case.select_args)


@on_every_backend
@pytest.mark.parametrize("branch", ATTENTION)
@pytest.mark.parametrize("backward_only", [False, True])
def test_autocast_changes_nothing(backend, device, branch, backward_only):
    """Compares bit by bit, except where a GPU backend adds gradients of keys in any order."""
    functions, case = BACKENDS[backend].functions, large_case(device)
    want = case.out_and_gradients(functions, branch)
    with nullcontext() if backward_only else autocast(device):
        q, k, v = case.inputs(branch)
        out = case.run(functions, branch, q, k, v)
    with autocast(device):
        got = [out, *torch.autograd.grad((out * case.weight_of(out)).sum(), (q, k, v))]
    tolerance = 1e-5 if device == "cuda" else 0
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert a.dtype == torch.float32, name
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@on_every_backend
def test_autocast_changes_no_chosen_block(backend, device):
    case = large_case(device, geometry="tiny")
    functions, both = BACKENDS[backend].functions, BACKENDS[backend].compressed_and_select
    with autocast(device):
        assert torch.equal(select(case, functions), case.idx)
        if both is not None:
            assert torch.equal(both(case.q, *case.compressed, case.pos, case.first, **case.select_args)[1], case.idx)


@on_every_backend
@pytest.mark.parametrize("branch", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_under_autocast_is_at_most_twice_plain_pytorchs(backend, device, branch, dtype):
    """Against fp64; plain PyTorch is scaled_dot_product_attention on the same tensors in the same mode."""
    if backend == "triton" and device == "cpu":
        dtype = torch.float32  # Triton's interpreter multiplies bf16 wrongly
    case = large_case(device, dtype)
    truth = case.out_and_gradients(REFERENCE, branch, torch.float64)
    visible_BSGT = visible_keys(case, branch)
    with autocast(device):
        ours = case.out_and_gradients(BACKENDS[backend].functions, branch)
        q, k, v = case.inputs(branch)
        out = sdpa(q, k, v, visible_BSGT, case.scale)
        plain = [out, *torch.autograd.grad((out * case.weight_of(out)).sum(), (q, k, v))]
    for name, a, b, exact in zip(("out", "dq", "dk", "dv"), ours, plain, truth, strict=True):
        assert (a - exact).norm() <= 2 * (b - exact).norm(), name


def sdpa(q_BSGRK, k_BTGK, v_BTGV, visible_BSGT, scale):
    """PyTorch's attention with a mask, and zeros where a query sees nothing. Its fused kernels want d_v = d_k."""
    R, sees_BSG1 = q_BSGRK.shape[3], visible_BSGT.any(-1, keepdim=True)
    q = q_BSGRK.flatten(2, 3).transpose(1, 2)
    k, v, mask = (x.repeat_interleave(R, 2).transpose(1, 2) for x in (k_BTGK, v_BTGV, visible_BSGT | ~sees_BSG1))
    v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[..., : v_BTGV.shape[-1]]
    return out.transpose(1, 2).unflatten(2, (-1, R)) * sees_BSG1[..., None]


@pytest.mark.parametrize("backend", RUN_HERE)
def test_backward_in_another_thread_under_its_own_autocast(backend):
    functions, case = BACKENDS[backend].functions, large_case("cpu")
    want = case.out_and_gradients(functions, "sliding")
    q, k, v = case.inputs("sliding")
    out, got = case.run(functions, "sliding", q, k, v), []

    def differentiate():
        with autocast("cpu"):
            got.extend(torch.autograd.grad((out * case.weight_of(out)).sum(), (q, k, v)))

    thread = threading.Thread(target=differentiate)
    thread.start()
    thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, want[1:], strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("branch", ATTENTION)
def test_without_gradients_too(backend, branch, mode):
    functions, case = BACKENDS[backend].functions, large_case("cpu")
    want = case.run(functions, branch, *case.inputs(branch))
    with mode(), autocast("cpu"):
        got = case.run(functions, branch, *case.inputs(branch))
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("branch", BRANCHES)
def test_queries_keys_and_values_of_several_dtypes_are_refused(backend, branch):
    """Autocast makes them easily; read as one dtype they would be other numbers."""
    functions, case = BACKENDS[backend].functions, large_case("cpu")
    q, k, v = case.inputs("sliding" if branch == "select" else branch)
    for tensors in ((q.bfloat16(), k, v), (q, k.bfloat16(), v), (q, k, v.bfloat16())):
        if branch == "select":
            if tensors[2] is not v:
                continue
            case.q, case.compressed = tensors[0], (tensors[1], None)
        with pytest.raises(ConfigError, match="bfloat16"):
            select(case, functions) if branch == "select" else case.run(functions, branch, *tensors)
    if branch == "compressed" and (both := BACKENDS[backend].compressed_and_select):
        with pytest.raises(ConfigError):
            both(q, k, v.bfloat16(), case.pos, case.first, **case.select_args)


@on_every_backend
def test_a_module_in_fp32_under_autocast(backend, device):
    """Against fp64, window over everything: at most twice the error of PyTorch's attention on the same projections."""
    dtype = torch.float32 if backend == "triton" and device == "cpu" else torch.bfloat16
    n, args = 96, attention_args("tiny", w=96)
    torch.manual_seed(0)
    module = NSAAttention(**args, kernels=BackendRequest(*[backend] * 4)).to(device)
    with torch.no_grad():
        module.w_q.weight *= 60  # logits of ±10: softmax is sharp and feels what its scores lose
        module.gates.proj.weight.zero_()
        module.gates.proj.bias.view(-1, len(BRANCH_ORDER)).fill_(-1e4)[:, BRANCH_ORDER.index("sliding")] = 1e4
    exact = NSAAttention(**args, kernels=BackendRequest(*["reference"] * 4)).to(device, torch.float64)
    exact.load_state_dict(module.state_dict())
    x = torch.randn(1, n, 24, device=device)
    weight = torch.randn(1, n, 24, device=device)

    def out_and_gradients(run, module, x):
        x = x.detach().requires_grad_()
        out = run(module, x)
        leaves = (x, module.w_q.weight, module.w_k.weight, module.w_v.weight)
        return [out, *torch.autograd.grad((out * weight.to(out.dtype)).sum(), leaves)]

    truth = out_and_gradients(lambda m, x: m(x), exact, x.double())
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        ours = out_and_gradients(lambda m, x: m(x), module, x)
    with autocast(device):
        plain = out_and_gradients(dense_branch, module, x)
    for name, a, b, want in zip(("out", "dx", "dw_q", "dw_k", "dw_v"), ours, plain, truth, strict=True):
        assert (a - want).norm() <= 2 * (b - want).norm(), name


def dense_branch(module, x):
    """The window branch of a module whose window is everything, by PyTorch's attention."""
    groups, b = module.n_kv_groups, BRANCH_ORDER.index("sliding")
    tables = module.rotary.tables(torch.arange(x.shape[1], device=x.device)[None])
    q = rotate(module.w_q(x).unflatten(-1, (groups, -1, module.d_k)), tables)
    k = rotate(module.w_k(x).unflatten(-1, (groups, 3, -1))[..., b, :], tables)
    v = module.w_v(x).unflatten(-1, (groups, 3, -1))[..., b, :]
    n = x.shape[1]
    causal = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()[None, :, None].expand(len(x), -1, groups, -1)
    return module.w_out(sdpa(q, k, v, causal, module.scale).flatten(2))


@pytest.mark.parametrize("phi", [phi for phi in PHIS if phi != "avg"])  # avg has no parameters
def test_a_cache_in_fp32_compresses_in_fp32_under_autocast(phi):
    """φ reads the cache's own tokens, so it computes in the cache's dtype."""
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny", phi=phi))
    raw = torch.randn(1, 40, 2, 8)
    begin = torch.arange(8)[None] * 4
    want = module.phi_k(raw, begin)
    with autocast("cpu"):
        got = module.phi_k(raw, begin)
        gradients = torch.autograd.grad(got.sum(), list(module.phi_k.parameters()))
    assert torch.equal(got, want)
    for a, b in zip(gradients, torch.autograd.grad(want.sum(), list(module.phi_k.parameters())), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "backend",
    [  # the reference looks at values; a graph has the operators of the others, and one of them will do by day
        pytest.param(name, marks=pytest.mark.nightly if name == "portable" else ())
        for name in RUN_HERE
        if name != "reference"
    ],
)
def test_compiled_under_autocast_equals_eager(backend):
    module = NSAAttention(**attention_args("tiny", phi="linear"), kernels=BackendRequest(*[backend] * 4))
    interpreted = backend == "triton"
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 40, 24)
    results = []
    for run in (module, compiled):
        with torch.autocast("cpu", torch.bfloat16, enabled=not interpreted):
            out = run(x)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), list(module.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


def test_mix_by_tensor_operations_sums_in_the_gates_dtype_under_autocast():
    gates, branches = torch.rand(1, 5, 2, 3, 3), [torch.randn(1, 5, 2, 3, 4).bfloat16() for _ in range(3)]
    want = reference.mix(gates, *branches)
    with autocast("cpu"):
        assert torch.equal(reference.mix(gates, *branches), want)
