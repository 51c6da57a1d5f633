"""Checks of the whole attention module on a case of the table, each against another way to compute the same.

Rounding may exchange selected blocks with nearly equal scores (near ties), which changes a query's output although
nothing is wrong. So outputs are compared for queries with the same selection, and the scores of exchanged blocks must
be equal up to rounding. Where both ways round alike (a second run, changed later tokens), every bit must be the same.

B batch · S tokens · D model dim · G kv groups · N chosen blocks
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nsa.bench.machine import wait_for
from nsa.check.cases import ModuleCase
from nsa.check.comparison import (
    ROW_LIMITS,
    CheckResult,
    Results,
    blocks_error,
    bounded,
    differing,
    fact,
    needs_gpu,
    relative_rms,
    tolerance,
    worst,
)
from nsa.core.branches import AttendedKeys
from nsa.core.compression import BlockCompressor
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import plain_layout
from nsa.core.probe import Probe
from nsa.kernels.checkpoint_policy import NAMESPACE, keep_operators
from nsa.kernels.registry import BackendRequest

ModuleCheck = Callable[[ModuleCase], Iterator[CheckResult]]

_MOST_EXCHANGED = 0.1  # of the queries: a comparison of the others must still mean something
_REPEATS = 20  # a random order may be the same by chance
_LARGE = 30.0  # the changed future is this many times larger than the past, and still finite in fp16
_GRAPH_STEPS = 40  # more than a stride of compression, so that blocks are completed on the way


class _ForwardRecorder(Probe):
    """Keeps the selected blocks of the last forward and, without a cache, q and compressed keys."""

    idx_BSGN: Tensor
    q_BSGRK: Tensor
    k_BCGK: Tensor

    def record(self, gates: Tensor | None, gate_kind: str, idx_BSGN: Tensor, *_: object) -> None:
        self.idx_BSGN = idx_BSGN.clone()  # a decoder writes every step to one tensor

    def record_selection(self, q_BSGRK: Tensor, idx_BSGN: Tensor, keys: AttendedKeys, *_: object) -> None:
        self.q_BSGRK, self.k_BCGK = q_BSGRK.detach(), keys[0].k.detach()


class _RecordedForward(NamedTuple):
    """Output and selected blocks of one forward pass."""

    out_BSD: Tensor
    idx_BSGN: Tensor

    def same_selection(self, other: "_RecordedForward") -> Tensor:
        """Queries with the same selected blocks: bool [B, S]."""
        return (self.idx_BSGN == other.idx_BSGN).flatten(2).all(-1)


def _recorded(
    module: NSAAttention, x: Tensor, run: Callable[..., Tensor] | None = None, **options: Any
) -> _RecordedForward:
    """The forward pass of the module, whose probe is a `_ForwardRecorder`, or of `run`, which calls it."""
    assert isinstance(module.probe, _ForwardRecorder)
    out = (module if run is None else run)(x, **options)
    return _RecordedForward(out, module.probe.idx_BSGN)


def _near_ties(
    claim: str, module: NSAAttention, got: _RecordedForward, want: _RecordedForward
) -> Iterator[CheckResult]:
    """Results for output and selection; `module` must have computed `want` last, one document per row."""
    recorded = module.probe
    assert isinstance(recorded, _ForwardRecorder)
    same_BS, dtype = got.same_selection(want), want.out_BSD.dtype
    exchanged = int((~same_BS).sum())
    note = f"{exchanged} of {same_BS.numel()} queries chose another block of the same score" if exchanged else ""
    error = relative_rms(got.out_BSD[same_BS], want.out_BSD[same_BS])
    yield bounded(f"{claim}, output, relative RMS", error, tolerance(dtype), note)
    pos_BS = torch.arange(same_BS.shape[1], device=same_BS.device).expand_as(same_BS)
    error_BSG = blocks_error(
        recorded.q_BSGRK, recorded.k_BCGK, pos_BS, torch.zeros_like(pos_BS), got.idx_BSGN, module.geometry, module.scale
    )
    too_many = exchanged > _MOST_EXCHANGED * same_BS.numel()
    score_error = torch.inf if too_many else error_BSG.max().item()
    yield bounded(f"{claim}, scores of exchanged blocks, relative", score_error, ROW_LIMITS[dtype], note)


def _near_ties_in_gradients(
    claim: str, module: NSAAttention, x: Tensor, got: _RecordedForward, want: _RecordedForward, most: float
) -> CheckResult:
    """Gradients of the input and all weights. Queries whose selection differs are left out of the loss, and so out of
    every gradient."""
    dout = torch.ones_like(want.out_BSD) * got.same_selection(want)[..., None]
    leaves = {"x": x, **dict(module.named_parameters())}
    mine, its = (torch.autograd.grad(one.out_BSD, list(leaves.values()), dout) for one in (got, want))
    errors = {name: relative_rms(a, b) for name, a, b in zip(leaves, mine, its, strict=True)}
    name = max(errors, key=lambda name: errors[name])
    return bounded(f"{claim}, gradients, relative RMS", errors[name], most, name)


def _prompt_and_tokens(case: ModuleCase, x: Tensor) -> tuple[Tensor, ...]:
    """The prompt, then single tokens."""
    return x.split([case.prompt, *[1] * (x.shape[1] - case.prompt)], 1)


@torch.no_grad()
def token_by_token(case: ModuleCase) -> Iterator[CheckResult]:
    """Decode gives the output of the whole sequence."""
    module, x = case.attention(_ForwardRecorder()), case.tokens()
    cache = module.new_cache(1, x.shape[1])
    steps = [_recorded(module, part, cache=cache) for part in _prompt_and_tokens(case, x)]
    got = _RecordedForward(*(torch.cat(parts, 1) for parts in zip(*steps, strict=True)))
    yield from _near_ties(f"token by token = whole, {case.dtype}", module, got, _recorded(module, x))


@torch.no_grad()
def ragged_batch(case: ModuleCase) -> Iterator[CheckResult]:
    """Each row gets its part of a first chunk, then its tokens one by one; padding has large values."""
    module = case.attention(_ForwardRecorder())
    lengths = torch.tensor(case.ragged, device=case.device)
    x = case.tokens(len(lengths))
    at_BS = torch.arange(x.shape[1], device=case.device)
    x = torch.where((at_BS < lengths[:, None])[..., None], x, 100.0)
    cache, steps, begin = module.new_cache(len(lengths), x.shape[1]), [], 0
    for part in _prompt_and_tokens(case, x):
        steps.append(_recorded(module, part, cache=cache, new_lens_B=(lengths - begin).clamp(0, part.shape[1])))
        begin += part.shape[1]
    results = []
    for row, length in enumerate(case.ragged):
        got = _RecordedForward(
            *(torch.cat([x[row : row + 1] for x in parts], 1)[:, :length] for parts in zip(*steps, strict=True))
        )
        want = _recorded(module, x[row : row + 1, :length])
        results.append(list(_near_ties(f"rows of different lengths = each alone, {case.dtype}", module, got, want)))
    yield from map(worst, zip(*results, strict=True))


@torch.no_grad()
def graph_replay(case: ModuleCase) -> Iterator[CheckResult]:
    """One step captured once and replayed: the cache's counters are on the device, so each replay is the next token."""
    claim = f"values of a replayed step that differ from the eager step, {case.dtype}"
    if not case.is_gpu:
        yield needs_gpu(claim)
        return
    module, x, prompt = case.attention(), case.tokens(), case.prompt
    caches = [module.new_cache(1, x.shape[1]) for _ in range(3)]
    for cache in caches:
        module(x[:, :prompt], cache=cache)
    eager, captured, spare = caches
    token = x[:, prompt : prompt + 1].clone()
    with second_stream(case.device):  # compile kernels and warm up libraries before capturing
        for _ in range(3):
            module(token, cache=spare)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(token, cache=captured)
    changed = 0
    for t in range(prompt, prompt + _GRAPH_STEPS):
        token.copy_(x[:, t : t + 1])
        graph.replay()
        changed += int((out != module(x[:, t : t + 1], cache=eager)).sum())
    yield bounded(claim, changed, 0)


def compiled(case: ModuleCase) -> Iterator[CheckResult]:
    """torch.compile: one graph, same results as eager."""
    module, x = case.attention(_ForwardRecorder()), case.tokens().requires_grad_()
    got = _recorded(module, x, torch.compile(module, fullgraph=True, backend=case.compiler))
    want = _recorded(module, x)
    claim = f"compiled ({case.compiler}) = eager, {case.dtype}"
    yield from _near_ties(claim, module, got, want)
    yield _near_ties_in_gradients(claim, module, x, got, want, tolerance(case.torch_dtype))


def host_waits(case: ModuleCase, *, packed: bool) -> Iterator[CheckResult]:
    """PyTorch's sync debug mode raises at the first synchronizing call, which ends this check as failed."""
    claim = f"calls that make the host wait, forward and backward{', packed documents' * packed}, {case.dtype}"
    if not case.is_gpu:
        yield needs_gpu(claim)
        return
    module, x, n = case.attention(), case.tokens().requires_grad_(), case.length
    ends = torch.tensor([0, 1, n // 3, n // 3, n], dtype=torch.int32, device=case.device) if packed else None

    def step() -> None:
        out = module(x, cu_doc_lens=ends)
        torch.autograd.grad(out, (x, *module.parameters()), torch.ones_like(out))

    step()  # compiling a kernel may synchronize
    torch.cuda.synchronize(case.device)
    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    yield bounded(claim, 0, 0)


def against_portable(case: ModuleCase) -> Iterator[CheckResult]:
    """The portable backend on the same device, with gradients."""
    module, x = case.attention(_ForwardRecorder()), case.tokens().requires_grad_()
    got = _recorded(module, x)
    module.kernels = BackendRequest(*["portable"] * 4)
    want = _recorded(module, x)
    claim = f"{case.length} tokens = portable, {case.dtype}"
    yield from _near_ties(claim, module, got, want)
    # Sums over thousands of tokens round differently in two orders.
    most = tolerance(case.torch_dtype) * (10 if case.dtype == "fp32" else 1)
    yield _near_ties_in_gradients(claim, module, x, got, want, most)


def _step_results(module: NSAAttention, x: Tensor) -> Results:
    """Output, selected blocks and gradients of one step."""
    out, idx_BSGN = _recorded(module, x)
    names, weights = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(out.float().square().sum(), (x, *weights))
    return {"out": out.detach(), "choice": idx_BSGN, **dict(zip(("x", *names), gradients, strict=True))}


@contextmanager
def second_stream(device: torch.device) -> Iterator[None]:
    """Inside, work goes to another stream; each waits for the other at the ends."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def second_run(case: ModuleCase) -> Iterator[CheckResult]:
    """Outputs, selected blocks and all gradients are equal between runs."""
    run = partial(_step_results, case.attention(_ForwardRecorder()), case.tokens().requires_grad_())
    first = run()
    yield differing(f"values that differ between two runs, {case.dtype}", run(), first)
    # Memory of many sizes, filled with NaN and freed: the next allocations take it.
    pieces = [torch.full((1 << power,), torch.nan, device=case.device) for power in range(4, 22) for _ in range(4)]
    wait_for(case.device)
    pieces.clear()
    yield differing(f"values that differ in memory that held NaN, {case.dtype}", run(), first)
    claim = f"values that differ on a second stream, {case.dtype}"
    if not case.is_gpu:
        yield needs_gpu(claim)
        return
    with second_stream(case.device):
        again = run()
    yield differing(claim, again, first)


def overlapping_blocks(case: ModuleCase) -> Iterator[CheckResult]:
    """The gradient of a token in three or more blocks is a sum that depends on its order."""
    g, s = case.overlapping, case.shape
    raw = case.tokens().unflatten(-1, (s.n_heads, s.d_k)).requires_grad_()
    phi = BlockCompressor("avg", g.l, g.d, s.n_heads, s.d_k, pos_emb=False)
    begin_BC = plain_layout(1, case.length, g, case.device).begin_BC

    def run() -> Results:
        out = phi(raw, begin_BC)
        return {"out": out.detach(), "gradient": torch.autograd.grad(out.float().square().sum(), raw)[0]}

    first, claim = run(), f"compression: values that differ, a token in {g.l // g.d} blocks, {case.dtype}"
    for _ in range(_REPEATS):
        again = differing(claim, run(), first)
        if not again.holds:
            break
    yield again


@torch.no_grad()
def causal_outputs(case: ModuleCase) -> Iterator[CheckResult]:
    """Later tokens change no bit of earlier outputs."""
    module, x = case.attention(), case.tokens()
    changed, ignored, clean = 0, 0, module(x)
    for cut in case.cuts:
        other = x.clone()
        other[:, cut:] = _LARGE * case.tokens(seed=2)[:, cut:]
        out = module(other)
        changed += int((out[:, :cut] != clean[:, :cut]).sum())
        ignored += torch.equal(out[:, cut:], clean[:, cut:])
    yield bounded(f"values before a changed token that change, {case.dtype}", changed, 0)
    yield bounded(f"changed tokens that change nothing after them, {case.dtype}", ignored, 0)


def causal_gradients(case: ModuleCase) -> Iterator[CheckResult]:
    """A loss of earlier outputs gives later tokens no gradient."""
    module, x = case.attention(), case.tokens().requires_grad_()
    after, before = 0, 0
    out = module(x)
    for cut in case.cuts:
        (dx,) = torch.autograd.grad(out[:, :cut].float().square().sum(), x, retain_graph=True)
        after += int((dx[:, cut:] != 0).sum())
        before += int((dx[:, :cut] == 0).all())
    yield bounded(f"gradients that reach a later token, {case.dtype}", after, 0)
    yield bounded(f"losses without any gradient, {case.dtype}", before, 0)


def second_device(case: ModuleCase) -> Iterator[CheckResult]:
    """Kernels on cuda:1 while cuda:0 is the current device give the bits of cuda:0."""
    claim = f"values on the second device that differ from the first, {case.dtype}"
    if not case.is_gpu:
        yield needs_gpu(claim)
        return
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    if len(names) < 2:
        yield fact(claim, "not checked: needs two GPUs")
    elif names[0] != names[1]:  # other tile sizes, so other bits
        yield fact(claim, f"not checked: {names[0]} and {names[1]} differ")
    else:
        yield on_two_devices(claim, *(replace(case, device=torch.device("cuda", n)) for n in range(2)))


def on_two_devices(claim: str, first: ModuleCase, second: ModuleCase) -> CheckResult:
    """Output and gradients on two devices; the current device stays as it is."""
    results = []
    for case in (first, second):
        step = _step_results(case.attention(_ForwardRecorder()), case.tokens().requires_grad_())
        results.append({name: x.cpu() for name, x in step.items()})
    return differing(claim, results[1], results[0])


class _OperatorCounter(TorchDispatchMode):
    """Counts our operators as they are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            self.seen[func.name()] += 1
        return func(*args, **(kwargs or {}))


def selective_checkpointing(case: ModuleCase) -> Iterator[CheckResult]:
    """Selective activation checkpointing gives the same bits and computes no kernel twice."""
    module, x = case.attention(), case.tokens().requires_grad_()
    leaves = {"x": x, **dict(module.named_parameters())}

    def gradients(out: Tensor) -> Results:
        return dict(zip(leaves, torch.autograd.grad(out.float().square().sum(), list(leaves.values())), strict=True))

    with _OperatorCounter() as plain:
        want = gradients(module(x))
    with _OperatorCounter() as checkpointed:
        got = gradients(checkpoint(module, x, use_reentrant=False, context_fn=keep_operators))
    yield differing(f"gradients that differ under selective checkpointing, {case.dtype}", got, want)
    again = checkpointed.seen - plain.seen
    claim = f"kernels computed twice under selective checkpointing, {case.dtype}"
    yield bounded(claim, sum(again.values()), 0, ", ".join(again))
