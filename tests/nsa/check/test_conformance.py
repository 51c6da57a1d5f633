"""`python -m nsa.check --conformance`: what holds, fails and is refused: ours, FlexAttention, planted faults."""

import functools
import json
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import nsa
from nsa.check.__main__ import main
from nsa.check.comparison import CheckStatus
from nsa.check.conformance import CASES, conformance, exact
from nsa.errors import ExitCode
from tests.backends import RUN_HERE
from tests.nsa.core.test_block_sparse_attention import by_hand

CPU = torch.device("cpu")


def verdicts(function, dtype: torch.dtype = torch.float32, **options) -> dict[str, CheckStatus]:
    results = list(conformance(function, CPU, dtype, **options))
    ranks = sorted(results, key=lambda result: result.verdict is CheckStatus.FAILS)
    return {result.claim.partition(":")[0]: result.verdict for result in ranks}


def failing(function) -> set[str]:
    return {claim for claim, verdict in verdicts(function).items() if verdict is CheckStatus.FAILS}


RANDOM, NAN = "repeated, unordered, future and negative blocks", "NaN in a block that nobody reads"
CASE = {case.claim: case for case in CASES}


@pytest.mark.parametrize("claim", ["one choice for all heads", "several rows", "packed documents", RANDOM])
def test_what_it_compares_with_is_the_oracle(claim):
    case = CASE[claim]
    inputs = case.inputs(torch.float32, CPU)
    q, k, v = (x.double() for x in inputs[:3])
    ends = case.documents or range(0, case.batch * case.length + 1, case.length)
    zeros = torch.zeros(*q.shape[:3], case.d_v), torch.zeros(q.shape[:3])
    arrays = [x.numpy() for x in (q, k, v, inputs[3], *zeros)]
    out, lse, *_ = by_hand(*arrays, list(ends), case.block_size, case.scale)
    for got, want in zip(exact(case, q, k, v, inputs[3]), (out, lse), strict=True):
        torch.testing.assert_close(got, torch.from_numpy(want), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [*((name, torch.float32) for name in RUN_HERE if name in ("portable", "cpu")), ("portable", torch.bfloat16)],
    ids=str,
)
def test_ours_conforms(backend, dtype):
    ours = functools.partial(nsa.block_sparse_attention, kernels=backend)
    assert set(verdicts(ours, dtype).values()) == {CheckStatus.HOLDS}


def by_flex_attention(q, k, v, block_indices, *, block_size, cu_seqlens=None, scale=None):
    """Attention over chosen blocks by torch's FlexAttention, whose mask looks the blocks up."""
    if cu_seqlens is not None:
        raise NotImplementedError("packed documents")
    heads, skipped = q.shape[2], k.shape[1] - q.shape[1]
    n_blocks = -(-k.shape[1] // block_size)
    slots = torch.where((block_indices < 0) | (block_indices >= n_blocks), n_blocks, block_indices).long()
    chosen = torch.zeros(*slots.shape[:3], n_blocks + 1, dtype=torch.bool).scatter(-1, slots, value=True)

    def mask(score, b, h, i, j):
        read = chosen[b, i, h * chosen.shape[2] // heads, j // block_size] & (j <= i + skipped)
        return torch.where(read, score, -torch.inf)

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flex_attention(q, k, v, score_mod=mask, scale=scale, enable_gqa=True).transpose(1, 2)


@pytest.mark.nightly
def test_flex_attention_conforms_where_it_does_not_refuse():
    """At night, as it is another package's function."""
    rows = verdicts(by_flex_attention, forward_only=True)  # torch has no backward of it on a CPU
    assert [claim for claim, verdict in rows.items() if verdict is CheckStatus.REFUSED] == ["packed documents"]
    # It multiplies values that are not read by weights of 0.
    assert [claim for claim, verdict in rows.items() if verdict is CheckStatus.FAILS] == [NAN]


def one_token_too_many(q, k, v, block_indices, **options):
    k, v = (torch.cat((x[:, 1:], x[:, -1:]), 1) for x in (k, v))
    return nsa.block_sparse_attention(q, k, v, block_indices, **options)


def repeats_count_twice(q, k, v, block_indices, **options):
    parts = [nsa.block_sparse_attention(q, k, v, one[..., None], return_lse=True, **options)
             for one in block_indices.unbind(-1)]  # fmt: skip
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    shares = lses.softmax(0).nan_to_num()[..., None]
    return (outs * shares).sum(0)


def none_is_the_first(q, k, v, block_indices, **options):
    return nsa.block_sparse_attention(q, k, v, block_indices.clamp(min=0), **options)


def documents_forgotten(q, k, v, block_indices, cu_seqlens=None, **options):
    return nsa.block_sparse_attention(q, k, v, block_indices, **options)


def values_have_no_gradient(q, k, v, block_indices, **options):
    return nsa.block_sparse_attention(q, k, v.detach(), block_indices, **options) + 0 * v.sum()


def other_bits_every_time(q, k, v, block_indices, **options):
    return nsa.block_sparse_attention(q, k, v, block_indices, **options) * (1 + 3e-7 * torch.rand(()))


def all_keys_are_read(q, k, v, block_indices, **options):
    return nsa.block_sparse_attention(q, k, v, block_indices, **options) + 0 * k.sum()


@pytest.mark.parametrize(
    ("fault", "rows"),
    [
        (one_token_too_many, {"blocks of 16", "packed documents", RANDOM}),
        (repeats_count_twice, {RANDOM}),
        (none_is_the_first, {"queries without a block", "blocks of 16"}),
        *(
            pytest.param(fault, rows, marks=pytest.mark.nightly)  # of rows that have failed for one of the others
            for fault, rows in (
                (documents_forgotten, {"packed documents"}),
                (values_have_no_gradient, {"blocks of 1", "blocks of 128", NAN}),
                (all_keys_are_read, {NAN}),
            )
        ),
        (other_bits_every_time, {"25 runs"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_fails_in_the_rows_that_it_breaks(fault, rows):
    assert rows <= failing(fault)


def test_the_command_prints_rows_and_counts_and_refuses_by_name(capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["nsa.check.conformance"], "CASES", CASES[2:3])
    assert main(["--conformance", "nsa:block_sparse_attention"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("holds  blocks of 16: ")
    assert lines[-1] == "5 hold · 0 fail · 0 refused"
    assert main(["--conformance", f"{__name__}:documents_forgotten", "--json"]) == 0
    assert {row["holds"] for row in json.loads(capsys.readouterr().out)["checks"]} == {True}
    for path, reason in (("nsa", "MODULE:FUNCTION"), ("nsa:nothing", "no attribute"), ("nsa:__all__", "not a function"),
                         ("no_such_module:f", "No module named")):  # fmt: skip
        assert main(["--conformance", path]) == ExitCode.CONFIG
        assert reason in capsys.readouterr().err
