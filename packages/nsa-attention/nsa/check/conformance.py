"""Compares anybody's block-sparse attention with dense attention in fp64: the contract of `nsa.block_sparse_attention`.

The function is called as `function(q, k, v, block_indices, block_size=…, cu_seqlens=…, scale=…)` and returns the
output. If it has a parameter `return_lse`, it is called with `return_lse=True` and returns the log-sum-exps too.
What it does not do it may refuse, with NotImplementedError, TypeError, ValueError or an error of this package: the row
says so. Every other exception fails. A row shows the result with the largest error, or each that is wrong.

B batch · S queries · T keys · G kv groups · R heads per group · H heads · K width of keys · V of values · N chosen
blocks · Q all queries of the batch · J all keys of the batch
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nsa.check.comparison import CheckResult, CheckStatus, bounded, relative_rms, tolerance, worst
from nsa.errors import ConfigError, NSAError

REPLAYS = 25
_BLOCK_SIZES = (1, 4, 16, 32, 64, 128)
_REFUSALS = (NotImplementedError, TypeError, ValueError, NSAError)
_LSE = "log-sum-exp"
_SMALLEST_RMS = 0.05
"""Smallest scale that errors are relative to: gradients of a softmax over one key are exactly 0."""

BlockSparse = Callable[..., Any]


@dataclass(frozen=True)
class ConformanceCase:
    """Sizes of one call and what is special about its indices or numbers."""

    claim: str
    block_size: int = 16
    batch: int = 1
    length: int = 150
    queries: int | None = None
    """The last so many tokens; None is all."""
    groups: int = 2
    per_group: int = 2
    d_k: int = 64
    d_v: int = 64
    n_blocks: int = 3
    choices: int | None = None
    """Choices per token; None is one per group."""
    documents: tuple[int, ...] | None = None
    """Cumulative lengths of packed documents."""
    sorted_past: bool = True
    """Chosen blocks ascend, each once, the query's own the last; some entries are −1. Else they are any numbers after
    the first block, which every query reads."""
    spread: float = 1.0
    """Standard deviation of queries and keys."""

    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """Queries [B, S, H, K], keys [B, T, G, K], values [B, T, G, V] and chosen blocks [B, S, G or 1, N]."""
        generator = torch.Generator().manual_seed(len(self.claim))
        draw = partial(torch.randn, generator=generator)
        n_queries = self.queries or self.length
        q = self.spread * draw(self.batch, n_queries, self.groups * self.per_group, self.d_k)
        k = self.spread * draw(self.batch, self.length, self.groups, self.d_k)
        v = draw(self.batch, self.length, self.groups, self.d_v)
        most = -(-self.length // self.block_size)
        shape = (self.batch, n_queries, self.choices or self.groups, self.n_blocks)
        blocks_BSGN = torch.randint(-1, most + 2, shape, generator=generator)
        if self.sorted_past:
            _, first_Q, token_Q = self.places()
            own_BS11 = ((token_Q - first_Q) // self.block_size).view(self.batch, n_queries, 1, 1)
            blocks_BSGN = torch.where(blocks_BSGN > own_BS11, -1, blocks_BSGN)
            blocks_BSGN[..., -1:] = own_BS11
            blocks_BSGN = blocks_BSGN.sort(-1).values
            repeated = torch.nn.functional.pad(blocks_BSGN[..., 1:] == blocks_BSGN[..., :-1], (1, 0))
            blocks_BSGN = blocks_BSGN.masked_fill(repeated, -1)
        else:
            blocks_BSGN[..., 0] = 0
        q, k, v = (x.to(device, dtype) for x in (q, k, v))
        return q, k, v, blocks_BSGN.to(device, torch.int32)

    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Document of every key, and the first token of its document and the own token of every query, both counted
        through the batch."""
        tokens = torch.arange(self.batch * self.length)
        ends = self.documents or tuple(range(0, len(tokens) + 1, self.length))
        document_J = torch.bucketize(tokens, torch.tensor(ends[1:]), right=True)
        token_Q = tokens.view(self.batch, self.length)[:, -(self.queries or self.length) :].flatten()
        return document_J, torch.tensor(ends)[document_J[token_Q]], token_Q

    @property
    def scale(self) -> float:
        return 0.8 * self.d_k**-0.5

    def options(self, device: torch.device) -> dict[str, Any]:
        documents = None if self.documents is None else torch.tensor(self.documents, dtype=torch.int32, device=device)
        return {"block_size": self.block_size, "scale": self.scale, "cu_seqlens": documents}


CASES = (
    *(ConformanceCase(f"blocks of {size}", block_size=size, n_blocks=max(2, 48 // size)) for size in _BLOCK_SIZES),
    ConformanceCase("one choice for all heads", choices=1),
    ConformanceCase("eight heads per group", per_group=8),
    ConformanceCase("one head per group", per_group=1),
    ConformanceCase("several rows", batch=3, length=70),
    ConformanceCase("keys wider than values", d_k=96, d_v=64),
    ConformanceCase("packed documents", documents=(0, 1, 38, 90, 150)),
    ConformanceCase("queries at the end of the keys", queries=5),
    ConformanceCase("repeated, unordered, future and negative blocks", sorted_past=False, n_blocks=6),
    ConformanceCase("large scores", spread=6.0),
)


def exact(
    case: ConformanceCase, q: Tensor, k: Tensor, v: Tensor, blocks_BSGN: Tensor, *, return_lse: bool = True
) -> Tensor | tuple[Tensor, Tensor]:
    """Output [B, S, H, V] and log-sum-exp [B, S, H], with a mask over all keys of the batch."""
    document_J, first_Q, token_Q = case.places()
    groups = k.shape[2]
    blocks_QGN = blocks_BSGN.flatten(0, 1).expand(-1, groups, -1)
    key_J, document_Q = torch.arange(len(document_J)), document_J[token_Q]
    block_QJ = (key_J - first_Q[:, None]).div(case.block_size, rounding_mode="floor")
    seen_QJ = (document_J == document_Q[:, None]) & (key_J <= token_Q[:, None])
    read_QGJ = seen_QJ[:, None] & (block_QJ[:, None, :, None] == blocks_QGN[:, :, None]).any(-1)
    some_QG11 = read_QGJ.any(-1)[..., None, None]
    # A query that reads nothing gets equal shares of everything, which are then set to 0: gradients stay finite.
    hidden_QG1J = ~read_QGJ[:, :, None] & some_QG11
    scores = case.scale * torch.einsum("qgrk,jgk->qgrj", q.flatten(0, 1).unflatten(1, (groups, -1)), k.flatten(0, 1))
    scores_QGRJ = scores.masked_fill(hidden_QG1J, -torch.inf)
    out = torch.einsum("qgrj,jgv->qgrv", scores_QGRJ.softmax(-1), v.flatten(0, 1)) * some_QG11
    out = out.flatten(1, 2).view(*q.shape[:3], -1)
    if not return_lse:
        return out
    lse = scores_QGRJ.logsumexp(-1).masked_fill(~some_QG11[..., 0], -torch.inf)
    return out, lse.flatten(1, 2).view(q.shape[:3])


def load_function(path: str) -> BlockSparse:
    """Import MODULE:FUNCTION."""
    module, _, name = path.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--conformance {path}: {error}. Write MODULE:FUNCTION, such as nsa:block_sparse_attention; modules of the "
            f"current folder can be imported."
        ) from error
    if not callable(function):
        raise ConfigError(f"--conformance {path}: {name} is {type(function).__name__}, not a function.")
    return function


def conformance(
    function: BlockSparse, device: torch.device, dtype: torch.dtype, *, forward_only: bool = False
) -> Iterator[CheckResult]:
    """Yield the result of each row as soon as it is known. forward_only: without gradients."""
    run = _Runner(function, device, dtype, forward_only)
    for case in CASES:
        yield from run.rows(case.claim, partial(run.against_exact, case))
    yield from run.rows("queries without a block", run.reads_nothing)
    yield from run.rows("NaN in a block that nobody reads", run.unread_nan)
    yield from run.rows(f"{REPLAYS} runs", run.replays)


class _Runner:
    def __init__(self, function: BlockSparse, device: torch.device, dtype: torch.dtype, forward_only: bool) -> None:
        self._function, self._device, self._dtype, self._forward_only = function, device, dtype, forward_only
        self._has_lse = "return_lse" in inspect.signature(function).parameters

    def rows(self, claim: str, check: Callable[[], Iterator[CheckResult]]) -> Iterator[CheckResult]:
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001  # anybody's function; other rows still tell something
            verdict = CheckStatus.REFUSED if isinstance(error, _REFUSALS) else CheckStatus.FAILS
            yield CheckResult(claim, verdict, note=f"{type(error).__name__}: {error}")

    def against_exact(self, case: ConformanceCase) -> Iterator[CheckResult]:
        inputs = case.inputs(self._dtype, self._device)
        results = self._results(case, *inputs)
        q, k, v, blocks = (x.cpu() for x in inputs)
        truth = _results(partial(exact, case, return_lse=self._has_lse), q.double(), k.double(), v.double(), blocks)
        checks = [
            bounded(
                f"{case.claim}: {name}",
                relative_rms(x, truth[name], smallest=_SMALLEST_RMS),
                tolerance(self._dtype),
            )
            for name, x in results.items()
        ]
        yield from [check for check in checks if not check.holds] or [worst(checks)]

    def reads_nothing(self) -> Iterator[CheckResult]:
        case = ConformanceCase("queries without a block")
        q, k, v, blocks = case.inputs(self._dtype, self._device)
        results = self._results(case, q, k, v, torch.full_like(blocks, -1))
        lse = results.pop(_LSE, None)
        largest = torch.stack([x.abs().max() for x in results.values()]).max().item()
        yield bounded(f"{case.claim}: largest number of output and gradients", largest, 0)
        if lse is not None:
            yield bounded(f"{case.claim}: log-sum-exps other than −inf", int((lse != -torch.inf).sum()), 0)

    def unread_nan(self) -> Iterator[CheckResult]:
        case = ConformanceCase("NaN in a block that nobody reads")
        q, k, v, blocks = case.inputs(self._dtype, self._device)
        for x in (k, v):
            x[:, 2 * case.block_size : 3 * case.block_size] = torch.nan
        blocks[:] = torch.tensor([0, -1, -1])
        results = self._results(case, q, k, v, blocks)
        yield bounded(f"{case.claim}: NaN in results", sum(int(x.isnan().sum()) for x in results.values()), 0)

    def replays(self) -> Iterator[CheckResult]:
        case = ConformanceCase(f"{REPLAYS} runs", length=300, n_blocks=8)
        inputs = case.inputs(self._dtype, self._device)
        first = self._results(case, *inputs)
        counts = Counter[str]()
        for _ in range(REPLAYS - 1):
            counts.update(name for name, x in self._results(case, *inputs).items() if not x.equal(first[name]))
        names = ", ".join(counts) or "any result"
        yield bounded(f"{case.claim}: most runs with other bits of {names}", max(counts.values(), default=0), 0)

    def _results(self, case: ConformanceCase, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> dict[str, Tensor]:
        options = case.options(self._device) | ({"return_lse": True} if self._has_lse else {})
        return _results(partial(self._function, **options), q, k, v, blocks, forward_only=self._forward_only)


def _results(
    run: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *, forward_only: bool = False
) -> dict[str, Tensor]:
    """What a function returns, by name, and the gradients of a weighted sum of it."""
    leaves = [x.detach().requires_grad_(not forward_only) for x in (q, k, v)]
    returned = run(*leaves, blocks)
    out, *more = (returned,) if isinstance(returned, Tensor) else returned
    results = {"output": out, **dict(zip((_LSE,), more, strict=False))}
    if forward_only:
        return results
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), device=out.device, dtype=out.dtype)
    for x in results.values():
        weight = torch.randn(x.shape, generator=generator).to(x)
        total = total + (torch.where(x.isinf(), 0, x) * weight).sum()
    gradients = torch.autograd.grad(total, leaves)
    return {name: x.detach() for name, x in (*results.items(), *zip(("dq", "dk", "dv"), gradients, strict=True))}
