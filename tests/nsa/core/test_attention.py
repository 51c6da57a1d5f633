"""Properties of the module that hold for every backend."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from nsa.core.nsa_attention import NSAAttention
from nsa.core.rope import rotate
from nsa.errors import ConfigError, KernelUnavailable
from nsa.geometry import Geometry
from nsa.kernels.registry import BackendRequest
from tests.backends import RUN_HERE
from tests.shapes import GEOMETRIES, HEADS, attention_args, fp64_backends

N = 90


def dense(module: NSAAttention, branch: int, x_BSD: torch.Tensor) -> torch.Tensor:
    """Plain causal attention over one branch's keys and values, by PyTorch's own kernel."""
    tables = module.rotary.tables(torch.arange(x_BSD.shape[1]).expand(x_BSD.shape[0], -1))
    groups, heads = module.n_kv_groups, module.strategy.shape.heads_per_group
    q = rotate(module.w_q(x_BSD).unflatten(-1, (module.n_heads, module.d_k)), tables)
    k = rotate(module.w_k(x_BSD).unflatten(-1, (groups, 3, module.d_k))[..., branch, :], tables)
    v = module.w_v(x_BSD).unflatten(-1, (groups, 3, module.d_v))[..., branch, :]
    k, v = (y.repeat_interleave(heads, 2).transpose(1, 2) for y in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
    return module.w_out(out.transpose(1, 2).flatten(2))


def only(branch: int, **changes) -> NSAAttention:
    """A module whose gates let one branch through, whole."""
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny", **changes))
    with torch.no_grad():
        module.gates.proj.weight.zero_()
        bias = torch.full((module.n_heads, 3), -1e4)
        bias[:, branch] = 1e4
        module.gates.proj.bias.copy_(bias.flatten())
    return module


@pytest.mark.parametrize(("branch", "coverage"), [(1, dict(n_sel=12)), (2, dict(w=N))], ids=["selected", "sliding"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_coverage_equals_dense_attention(branch, coverage, heads, dtype):
    changes = dict(n_heads=heads[0], n_kv_groups=heads[1], d_k=16, d_v=16, **coverage)
    module = only(branch, **changes)
    x = torch.randn(2, N, 24)
    weight = torch.randn(2, N, 24)

    def run(fn, dtype):
        module.to(dtype)
        y = x.to(dtype).requires_grad_()
        out = fn(y)
        gradients = torch.autograd.grad(
            (out * weight.to(dtype)).sum(), (y, module.w_q.weight, module.w_k.weight, module.w_v.weight)
        )
        return [t.double() for t in (out, *gradients)]

    truth = run(lambda y: dense(module, branch, y), torch.float64)
    ours = run(module, dtype)
    plain = run(lambda y: dense(module, branch, y), dtype)
    for a, b, exact in zip(ours, plain, truth, strict=True):
        if dtype == torch.float32:
            assert (a - exact).abs().max() <= 1e-5 * max(1.0, exact.abs().max().item())
        else:
            assert (a - exact).norm() <= 2 * (b - exact).norm()


@pytest.mark.parametrize("backend", fp64_backends())
@pytest.mark.parametrize(
    "changes",
    [dict(), dict(phi="mlp", phi_pos_emb=True, gate="sigmoid"), dict(phi="linear", rope_compressed="after")],
    ids=str,
)
def test_gradcheck_through_the_whole_module(backend, changes):
    torch.manual_seed(0)
    args = attention_args("tiny", (2, 1), dim=6, d_k=4, d_v=3, **changes)
    module = NSAAttention(**args, kernels=BackendRequest(*[backend] * 4)).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(1, 35, 6, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*module.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("phi", ["avg", "mlp"])
def test_the_future_changes_no_bit(backend, geometry, phi):
    torch.manual_seed(0)
    module = NSAAttention(**attention_args(geometry, phi=phi), kernels=BackendRequest(*[backend] * 4))
    x = torch.randn(1, 200, 24)
    clean = module(x)
    for cut in (1, 63, 64, 96, 137, 199):
        poisoned = x.clone()
        poisoned[:, cut:] = 1e4
        assert torch.equal(module(poisoned)[:, :cut], clean[:, :cut]), cut


def test_packed_documents_equal_separate_ones():
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny", phi="mlp"))
    lengths = [5, 70, 1, 33, 0, 91]
    x = torch.randn(1, sum(lengths), 24, requires_grad=True)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    packed = module(x, cu_doc_lens=cu)
    alone = torch.cat([module(part) for part in x.split(lengths, 1) if part.shape[1]], 1)
    torch.testing.assert_close(packed, alone, atol=1e-6, rtol=1e-5)
    weight = torch.randn_like(packed)
    a, b = (torch.autograd.grad((out * weight).sum(), x, retain_graph=True)[0] for out in (packed, alone))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_packed_rows_of_a_batch_lie_end_to_end():
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny"))
    x = torch.randn(2, 40, 24)
    out = module(x, cu_doc_lens=torch.tensor([0, 40, 65, 80], dtype=torch.int32))
    assert out.shape == x.shape
    torch.testing.assert_close(out[0], module(x[:1])[0])
    torch.testing.assert_close(out[1, 25:], module(x[1:, 25:])[0])


@pytest.mark.parametrize("cu", [[0, 30, 39], [1, 40], [0, 30, 20, 40], [40]], ids=str)
def test_wrong_document_lengths_are_refused(cu):
    module = NSAAttention(**attention_args("tiny"))
    with pytest.raises(ConfigError, match="cu_doc_lens"):
        module(torch.randn(1, 40, 24), cu_doc_lens=torch.tensor(cu, dtype=torch.int32))


def test_heads_of_a_group_share_their_blocks_and_groups_do_not():
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny", (6, 2)))
    chosen = []
    run = module.strategy.attend

    def spy(*args):
        out = run(*args)
        chosen.append(out[1])
        return out

    module.strategy.attend = spy
    module(torch.randn(1, N, 24))
    assert chosen[0].shape == (1, N, 2, 4)  # one list per group, not per head
    assert (chosen[0][:, :, 0] != chosen[0][:, :, 1]).any()


def test_early_tokens_get_nothing_from_the_compressed_branch():
    module = only(0)
    x = torch.randn(1, N, 24, requires_grad=True)
    out = module(x)
    early = module.geometry.l - 1
    assert (out[:, :early] == 0).all()
    assert (out[:, early:] != 0).any(-1).all()
    gradients = torch.autograd.grad(out[:, :early].sum(), (x, module.w_q.weight, module.w_k.weight, module.w_v.weight))
    assert all((g == 0).all() for g in gradients)


def test_compiles_without_graph_breaks():
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny", phi="linear"))
    x = torch.randn(2, N, 24)
    cu = torch.tensor([0, 100, 2 * N], dtype=torch.int32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for kwargs in (dict(), dict(cu_doc_lens=cu)):
        want, got = x.clone().requires_grad_(), x.clone().requires_grad_()
        module(want, **kwargs).square().sum().backward()
        compiled(got, **kwargs).square().sum().backward()
        torch.testing.assert_close(got.grad, want.grad)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        (dict(n_heads=5), "n_heads"),
        (dict(d_k=7), "d_k"),
        (dict(d=3), r"^d \(3\)"),
        (dict(n_sel=2), "n_sel"),
        (dict(w=0), r"^w \(0\)"),
        (dict(phi="max"), "phi"),
        (dict(phi_pos_emb=True), "phi_pos_emb"),
        (dict(phi="weighted", phi_pos_emb=True), "phi_pos_emb"),
        (dict(gate="hard"), "gate"),
        (dict(gate_per="token"), "gate_per"),
        (dict(gate_temperature=0.0), "gate_temperature"),
        (dict(rope_compressed="never"), "rope_compressed"),
        (dict(rope_scaling=dict(rope_type="never")), "rope_scaling"),
        (dict(kv="two"), "kv"),
        (dict(selector_loss=-0.1), "selector_loss"),
        (dict(selector_loss_share=1.5), "selector_loss_share"),
        *(
            (changes, "must be")
            for changes in (dict(n_kv_groups=0), dict(n_heads=0), dict(d_k=0), dict(n_kv_groups=-2))
        ),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused(changes, setting):
    with pytest.raises(ConfigError, match=setting):
        NSAAttention(**attention_args("tiny", **changes))


def test_the_representation_shows_heads_and_geometry():
    shown = repr(NSAAttention(**attention_args("tiny", kv="shared", phi="linear")))
    for part in ("n_heads=6", "n_kv_groups=2", "l=8, d=4, l_sel=8, n_sel=4, w=12", "kv='shared'", "phi='linear'"):
        assert part in shown


def test_positional_arguments_keep_their_order():
    module = NSAAttention(24, 6, 2, 8, 6, 8, 4, 8, 4, 12)
    assert (module.d_k, module.d_v, module.geometry) == (8, 6, Geometry(l=8, d=4, l_sel=8, n_sel=4, w=12))


def test_an_unknown_backend_is_refused_when_the_module_is_made():
    with pytest.raises(KernelUnavailable, match=r"kernels\.sliding"):
        NSAAttention(**attention_args("tiny"), kernels=BackendRequest(sliding="warp"))


def test_autocast_keeps_the_attention_in_half_precision():
    module = NSAAttention(**attention_args("tiny"))
    with torch.autocast("cpu", torch.bfloat16):
        out = module(torch.randn(1, 40, 24))
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


@pytest.mark.parametrize("kernels", ["portable", {"sliding": "portable", "selected": "reference"}], ids=str)
def test_kernels_may_be_one_name_or_a_mapping(kernels):
    named = NSAAttention(**attention_args("tiny"), kernels=kernels).kernels
    assert named == (BackendRequest(*["portable"] * 4) if isinstance(kernels, str) else BackendRequest(**kernels))


@pytest.mark.parametrize(
    "kernels", ["warp", {"window": "portable"}, {"sliding": "warp"}, 7, ["portable"], None], ids=str
)
def test_kernels_that_name_no_backend_are_refused(kernels):
    with pytest.raises(KernelUnavailable, match="kernels"):
        NSAAttention(**attention_args("tiny"), kernels=kernels)


def test_document_lengths_may_be_a_list():
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny"))
    x = torch.randn(2, 20, 24)
    cu = [0, 13, 40]
    assert torch.equal(module(x, cu_doc_lens=cu), module(x, cu_doc_lens=torch.tensor(cu)))
    for wrong in ([0, 13, 39], [0.0, 40.0], []):
        with pytest.raises(ConfigError, match="cu_doc_lens"):
            module(x, cu_doc_lens=wrong)


def test_qk_norm_under_autocast_gives_the_dtype_of_autocast_without_a_warning():
    """torch warns of a slow path when input and weight differ in dtype; once per process, unless told otherwise."""
    module, x = NSAAttention(**attention_args("tiny", qk_norm=True)), torch.randn(2, 40, 24)
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
            warnings.simplefilter("error")
            q, streams = module.project(x, module.locate(x).tables)
            assert module(x).dtype == q.dtype == streams.k_sel.dtype == torch.bfloat16
    finally:
        torch.set_warn_always(before)
