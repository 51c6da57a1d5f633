"""The backend `flash` against the reference: FlexAttention's dense mode on a CPU, and stand-ins for FlashAttention.

FlexAttention computes gradients on a GPU only, and refuses them on a CPU by a check of its public function; its dense
mode has them, so that check is taken out here. `flash_packages` says what stands for FlashAttention. Neither shows that
the packages' own kernels are right: the self-check does, on a GPU.
"""

import ast
import inspect
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

from nsa.check import kernel_checks
from nsa.check.cases import self_check_case
from nsa.check.kernel_call import KernelCall, QueryPositions
from nsa.core.positions import plain_layout
from nsa.geometry import Geometry
from nsa.kernels import flash, registry, self_check
from nsa.kernels.choice_text import kernels_text, slow_kernels_warning
from nsa.kernels.interface import BranchInputs
from nsa.kernels.registry import BACKENDS, BackendRequest, KernelShape, plan
from nsa.kernels.self_check import KernelVerdict
from tests.nsa.kernels.flash_packages import PACKAGES, modules_of
from tests.nsa.kernels.test_backends import Case, visible_keys

REFERENCE, FLASH = BACKENDS["reference"].functions, BACKENDS["flash"].functions
NAMES = ("out", "lse", "dq", "dk", "dv", "dq, lse used", "dk, lse used")
CUDA = torch.device("cuda")
SHAPE = KernelShape(2, 6, 64, 64, Geometry(l=32, d=16, l_sel=64, n_sel=16, w=512))


@pytest.fixture
def flex_with_gradients(monkeypatch):
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)


@pytest.fixture(params=PACKAGES)
def package(request, monkeypatch):
    """A stand-in as the installed FlashAttention of a CPU, also for fp32, and no FlexAttention."""
    for name, module in modules_of(request.param).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash, "package_for", lambda device: request.param)
    monkeypatch.setattr(flash, "_FLASH_DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(flash, "_by_flex", None)
    return request.param


def results(functions, case, branch, dtype=None):
    """Output, log-sum-exps and gradients, without and with one of the log-sum-exps."""
    q, k, v = case.inputs(branch, dtype)
    out, lse = case.run(functions, branch, q, k, v, return_lse=True)
    seen = lse > -torch.inf
    dout, dlse = case.weight_of(out), case.weight_of(lse).masked_fill(~seen, 0)
    gradients = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    both = torch.autograd.grad((out, lse), (q, k), (dout, dlse))
    return dict(zip(NAMES, (out.detach(), lse.detach(), *gradients, *both), strict=True))


def assert_as_reference(case, branch):
    want = results(REFERENCE, case, branch, torch.float64)
    for name, got in results(FLASH, case, branch).items():
        exact = want[name].double()
        torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def widened(case, d_k=16, d_v=8):
    """FlashAttention's widths are multiples of 8; those of keys and values differ."""
    case.q = torch.randn(*case.q.shape[:-1], d_k)
    case.raw, case.compressed = (
        tuple(torch.randn(*x.shape[:-1], width) for x, width in zip(pair, (d_k, d_v), strict=True))
        for pair in (case.raw, case.compressed)
    )
    return case


def in_one_document(case):
    """Its starts as `plain_layout` gives them."""
    for name in ("start", "first"):
        setattr(case, name, getattr(case, name)[:, :1].clone().expand_as(case.pos))
    return case


@pytest.mark.parametrize("branch", flash.SERVED)
def test_flex_attention_matches_the_reference(flex_with_gradients, branch):
    assert_as_reference(Case("packed", "tiny", (6, 2), torch.float32), branch)


@pytest.mark.nightly  # minutes: every shape is traced anew
@pytest.mark.parametrize("branch", flash.SERVED)
@pytest.mark.parametrize("layout", ["plain", "packed", "leap", "cached"])
@pytest.mark.parametrize(("geometry", "heads"), [("tiny", (6, 2)), ("showcase", (6, 2)), ("odd", (3, 1))])
def test_flex_attention_matches_the_reference_in_other_shapes(flex_with_gradients, branch, layout, geometry, heads):
    assert_as_reference(Case(layout, geometry, heads, torch.float32), branch)


@pytest.mark.nightly  # as above
@pytest.mark.parametrize("branch", flash.SERVED)
def test_flex_attention_compiles_into_a_models_graph(flex_with_gradients, branch):
    case = Case("packed", "tiny", (6, 2), torch.float32)
    attend = partial(case.run, FLASH, branch, return_lse=True)
    compiled = torch.compile(lambda q, k, v: attend(q * 1, k, v), fullgraph=True, backend="aot_eager")
    gradients = []
    for run in (compiled, partial(case.run, REFERENCE, branch, return_lse=True)):
        q, k, v = case.inputs(branch)
        out, lse = run(q, k, v)
        dlse = case.weight_of(lse).masked_fill(lse == -torch.inf, 0)
        gradients.append((out, *torch.autograd.grad((out, lse), (q, k, v), (case.weight_of(out), dlse))))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("branch", flash.SERVED)
@pytest.mark.parametrize("layout", ["plain", "packed", "leap", "cached"])
@pytest.mark.parametrize("tile", [8, 32])
def test_blocks_of_the_mask_cover_what_is_seen(monkeypatch, branch, layout, tile):
    """FlexAttention's dense mode reads the mask for every key; its kernels skip blocks that are not listed, and read no
    mask in those listed as seen whole."""
    monkeypatch.setattr(flash, "_TILE", tile)
    case = Case(layout, "tiny", (6, 2), torch.float32)
    k = (case.compressed if branch == "compressed" else case.raw)[0]
    starts = case.first if branch == "compressed" else case.start
    x = BranchInputs(branch, case.q, k, k, None, case.pos, starts, case.g, case.scale)
    low, high = flash._ranges(x)
    n_partial, partial, n_whole, whole = flash.key_blocks(low, high, k.shape[1])
    visible = visible_keys(case, branch)[:, :, 0]
    for row in range(len(visible)):
        for at in range(n_partial.shape[2]):
            seen = visible[row, at * tile : (at + 1) * tile]
            masked, full = (
                set(indices[row, 0, at, : count[row, 0, at]].tolist())
                for count, indices in ((n_partial, partial), (n_whole, whole))
            )
            assert len(masked) == n_partial[row, 0, at]
            assert not masked & full
            parts = dict(enumerate(seen.split(tile, 1)))
            assert {j for j, part in parts.items() if part.any()} <= masked | full
            assert full <= {j for j, part in parts.items() if part.all() and part.shape == (tile, tile)}
    if layout == "plain" and branch == "compressed" and tile == 8:
        assert n_whole.sum(), "some blocks are seen whole"


@pytest.mark.parametrize("branch", flash.SERVED)
@pytest.mark.parametrize(("geometry", "heads"), [("tiny", (6, 2)), ("showcase", (3, 1)), ("odd", (5, 5))])
def test_flash_attention_matches_the_reference(package, branch, geometry, heads):
    assert_as_reference(in_one_document(widened(Case("plain", geometry, heads, torch.float32))), branch)


@pytest.mark.parametrize("branch", flash.SERVED)
def test_the_operator_is_well_formed(package, branch):
    case = in_one_document(widened(Case("plain", "tiny", (4, 2), torch.float32)))
    q, k, v = case.inputs(branch)
    start = case.first if branch == "compressed" else case.start
    args = (q, k, v, None, case.pos, start, branch, case.g.ints, case.scale, "flash")
    torch.library.opcheck(torch.ops.nsa.attend.default, args)
    real = torch.ops.nsa.attend(*args)
    assert [y.stride() for y in real] == [torch.empty(y.shape).stride() for y in real], "as the fake operator's"


@pytest.mark.parametrize("length", [24, 40, 60])
def test_flash_attention_in_a_cache_and_after_padding(package, length):
    """Rows of different length with padding before and after, keys that are not there yet, and one row of nothing."""
    case = in_one_document(widened(Case("cached", "tiny", (6, 2), torch.float32)))
    case.pos = torch.tensor([[-1, -1, 0, 1, 2], [60, 61, 62, 63, -1], [-1] * 5])
    case.start = torch.tensor([[5], [length - 60], [7]]).expand(-1, 5)
    case.raw = tuple(x[:, : length + 4] for x in case.raw)
    assert_as_reference(case, "sliding")


def test_flash_attention_where_entries_before_the_document_are_hidden(package):
    case = in_one_document(widened(Case("plain", "tiny", (6, 2), torch.float32)))
    case.first = torch.tensor([[3], [0]]).expand(-1, case.pos.shape[1])
    case.pos = case.pos - 3 * case.g.d
    assert_as_reference(case, "compressed")


def test_flash_attention_where_a_rank_has_two_pieces_of_a_row(package):
    """Queries leap forward: their places are those of the whole row."""
    case = in_one_document(widened(Case("plain", "tiny", (6, 2), torch.float32)))
    keep = torch.cat([torch.arange(10, 60), torch.arange(90, 137)])
    case.q, case.pos = case.q[:, keep], case.pos[:, keep]
    case.first = case.first[:, :1].expand_as(case.pos)
    assert_as_reference(case, "compressed")


def test_only_rows_of_one_document_in_half_precision_are_direct(package, monkeypatch):
    monkeypatch.setattr(flash, "_FLASH_DTYPES", (torch.bfloat16,))
    for layout, direct in (("plain", True), ("packed", False), ("cached", False)):
        case = widened(Case(layout, "tiny", (6, 2), torch.float32))
        if layout != "packed":
            in_one_document(case)
        for dtype in (torch.bfloat16, torch.float32):
            q, k, v = (x.to(dtype) for x in (case.q, *case.compressed))
            x = BranchInputs("compressed", q, k, v, None, case.pos, case.first, case.g, case.scale)
            assert flash._is_direct(x) == (direct and dtype == torch.bfloat16)


@pytest.mark.parametrize("package_name", PACKAGES)
def test_signatures_are_those_of_the_packages(package_name):
    """Read from the source file of the package, without importing it."""
    for module, functions in PACKAGES[package_name].items():
        file = Path(*module.split(".")).with_suffix(".py")
        places = [Path(folder) / file for folder in sys.path if (Path(folder) / file).is_file()]
        if not places:
            pytest.skip(f"{file} is not on the path: put an unpacked {package_name} there")
        defined = {node.name: node for node in ast.parse(places[0].read_text()).body if hasattr(node, "args")}
        for function in functions:
            names = [argument.arg for argument in defined[function.__name__].args.args]
            assert list(inspect.signature(function).parameters) == names, function.__name__


def test_other_branches_and_devices_are_refused_by_name():
    for branch in ("select", "selected"):
        assert "have no more" in flash.why_not(branch, CUDA, torch.bfloat16, SHAPE)
    assert "on cpu" in flash.why_not("sliding", torch.device("cpu"), torch.bfloat16, SHAPE)
    assert "float64" in flash.why_not("sliding", CUDA, torch.float64, SHAPE)
    with pytest.raises(registry.KernelUnavailable, match=r"kernels\.select='flash'.*have no more"):
        plan(BackendRequest(*["flash"] * 4), CUDA, torch.bfloat16, SHAPE)


def as_on_a_gpu(monkeypatch, verdict):
    """Triton and flash as on a GPU where Triton's kernels are right, with this verdict on flash."""
    backends = {
        name: replace(BACKENDS[name], why_not=why_not, verify=lambda *_, its=its: its)
        for name, its, why_not in (
            ("flash", verdict, lambda branch, *_: None if branch in flash.SERVED else "no"),
            ("triton", KernelVerdict(True, ""), lambda *_: None),
        )
    }
    monkeypatch.setattr(registry, "_VERIFIED_ON", ("cpu",))
    monkeypatch.setattr(registry, "BACKENDS", {**backends, "portable": BACKENDS["portable"]})
    monkeypatch.setattr(registry, "_plan_once", registry._plan)


def test_auto_takes_it_in_branches_where_it_is_faster_and_triton_does_the_rest(monkeypatch):
    as_on_a_gpu(monkeypatch, KernelVerdict(True, "", slower="sliding 1 ms, compressed 3 ms", faster_in=("sliding",)))
    kernel_plan = plan(BackendRequest(), torch.device("cpu"), torch.bfloat16, SHAPE)
    assert [choice.backend for choice in kernel_plan.choices] == ["triton", "triton", "triton", "flash"]
    assert all(choice.verified for choice in kernel_plan.choices)
    assert "compressed 3 ms" in kernel_plan.choices[0].why_not("flash")
    triton = registry.BACKENDS["triton"]
    assert (kernel_plan.decoder, kernel_plan.mix, kernel_plan.layer) == (triton.decoder, triton.mix, None)
    assert kernel_plan.functions.sliding is FLASH.sliding
    text = kernels_text(kernel_plan.choices)
    assert text.endswith("selected triton (verified on this GPU) · sliding flash (verified on this GPU)")
    assert slow_kernels_warning(kernel_plan.choices, "cuda") is None


@pytest.mark.parametrize(
    "verdict", [KernelVerdict(False, "sliding dk: 0.3"), KernelVerdict(True, "", slower="compressed 3 ms")]
)
def test_auto_passes_over_it_when_it_is_wrong_or_never_faster(monkeypatch, verdict):
    as_on_a_gpu(monkeypatch, verdict)
    kernel_plan = plan(BackendRequest(), torch.device("cpu"), torch.bfloat16, SHAPE)
    assert {(choice.backend, choice.reason) for choice in kernel_plan.choices} == {("triton", "verified on this GPU")}
    assert kernel_plan.layer is registry.BACKENDS["triton"].layer


@pytest.mark.parametrize(
    ("installed", "capability", "package"),
    [
        (("flash-attn", "flash-attn-4"), (9, 0), "flash-attn-4 1"),
        (("flash-attn", "flash-attn-4"), (8, 0), "flash-attn 1"),
        (("flash-attn-4",), (10, 0), "flash-attn-4 1"),
        (("flash-attn-4",), (12, 0), ""),
        (("flash-attn",), (7, 5), ""),
        ((), (9, 0), ""),
    ],
)
def test_the_package_is_one_that_has_kernels_for_the_gpu(monkeypatch, installed, capability, package):
    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(flash, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert flash._package_for.__wrapped__(CUDA) == package


def test_nothing_is_checked_without_a_package_or_without_triton(monkeypatch):
    monkeypatch.setattr(self_check, "_verified_once", None)
    assert "neither flash-attn-4 nor flash-attn" in self_check.flash_verdict(CUDA, torch.bfloat16, SHAPE).summary
    monkeypatch.setattr(flash, "package_for", lambda device: "flash-attn-4 4.0.0b36")
    refused = KernelVerdict(False, "sliding dk: 0.3")
    monkeypatch.setattr(self_check, "triton_verdict", lambda *_: refused)
    verdict = self_check.flash_verdict(CUDA, torch.bfloat16, SHAPE)
    assert "completes the Triton backend" in verdict.summary
    assert not verdict.checked


@pytest.mark.parametrize(
    ("times", "faster_in"),
    [
        (dict(triton=3.0, compressed=3.1, sliding=2.0), ("sliding",)),
        (dict(triton=3.0, compressed=2.9, sliding=2.9), ()),
        (dict(triton=3.0, compressed=1.0, sliding=1.0), flash.SERVED),
        (dict(triton=3.0, compressed=1.0), ("compressed",)),
    ],
)
def test_the_record_says_in_which_branches_it_is_clearly_faster(times, faster_in):
    key = self_check.CheckKey(*[""] * 7, [1, 1, 8, 8], SHAPE.geometry.ints, "bfloat16", backend="flash")
    record = self_check.CheckRecord(key, True, "", [], {}, times=times)
    assert record.faster_in == faster_in
    assert bool(record.slower) == (faster_in != flash.SERVED)
    verdict = self_check._verdict(record, None)
    assert tuple(branch for branch in flash.SERVED if verdict.usable_in(branch)) == faster_in


def test_the_self_check_compares_rows_of_one_document(package):
    """Those of packed documents are FlexAttention's; the worker checks both."""
    case = self_check_case(KernelShape(1, 3, 24, 16, Geometry(l=4, d=2, l_sel=4, n_sel=3, w=6)), small=True)
    alone = kernel_checks.parts(
        case._replace(documents=case.documents[:1]), torch.device("cpu"), torch.float32, "flash"
    )  # fmt: skip
    names = []
    for part in alone:
        names.append(part.name)
        assert all(result.holds for result in part.compare(part.run()))
    assert names == list(flash.SERVED)


def test_positions_keep_their_stride_on_another_device():
    """Rows of one document are known by it, here and in the Triton backend; `Tensor.to` loses it."""
    layout = plain_layout(2, 40, SHAPE.geometry, torch.device("cpu"))
    call = KernelCall(SHAPE, QueryPositions(*layout[:3]), 40, 1, torch.float32)
    pos, start, first = call.positions(torch.device("meta"))
    assert layout.start_BS.to("meta").stride(1) == 1
    assert (pos.shape, start.shape, first.shape) == ((2, 40),) * 3
    assert start.stride(1) == first.stride(1) == 0
    assert pos.stride(1) == 1


@pytest.mark.nightly  # traces FlexAttention for the two layouts
def test_layers_are_timed_with_each_branch(flex_with_gradients, monkeypatch):
    monkeypatch.setitem(BACKENDS, "flash", replace(BACKENDS["flash"], why_not=lambda *_: None))
    monkeypatch.setattr(kernel_checks, "BACKEND", "cpu")
    shape = KernelShape(1, 3, 8, 8, Geometry(l=4, d=2, l_sel=4, n_sel=3, w=6))
    times = kernel_checks._layer_times(shape, torch.device("cpu"), torch.float32, "flash")
    assert list(times) == ["cpu", *flash.SERVED]
    assert all(took > 0 for took in times.values())
