"""Correctness check: planted errors must withhold the ratio, and correct implementations must keep it."""

from dataclasses import replace

import pytest
import torch

from nsa.bench.case import SHAPES, BenchCase, BenchRunner, BenchTask
from nsa.bench.correctness import _choice_error, _sampled_rows, check_correctness, short_length
from nsa.bench.implementations import DENSE, all_implementations
from nsa.bench.measurement import choose_implementations, measure
from nsa.kernels.registry import BACKENDS

TINY = SHAPES["tiny"]
LENGTH = 90  # longer than what is checked completely


def task(op="attention", **changes):
    return replace(BenchTask(op, TINY, LENGTH, "fp32", backward=op == "attention"), **changes)


def run(implementations, what):
    measured = measure(what, implementations, data="random", threads=1, budget_s=0.0, peaks=None, log=lambda text: None)
    return {entry.name: entry for entry in measured.entries}


def spoiled(implementation, spoil, op="attention"):
    """The implementation with its results changed by `spoil(runner, case)`."""

    def make(case, task):
        return spoil(implementation.make[op](case, task), case)

    return replace(implementation, make=implementation.make | {op: make})


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows):
        ctx.rows = rows
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        dx[:, ctx.rows] *= 1.05
        return dx, None


def wrong_output(rows):
    def spoil(runner: BenchRunner, case: BenchCase) -> BenchRunner:
        forward = runner.forward

        def changed():
            out = forward().clone()
            out[:, rows] = out[:, rows] * 1.01
            return out

        return replace(runner, forward=changed)

    return spoil


def wrong_gradient(name, rows=slice(None)):
    def spoil(runner: BenchRunner, case: BenchCase) -> BenchRunner:
        to_case = runner.to_case

        def changed(results):
            results = to_case(results)
            if name in results:
                wrong = results[name].clone()
                wrong[:, rows] = wrong[:, rows] * 1.01
                results = results | {name: wrong}
            return results

        return replace(runner, to_case=changed)

    return spoil


@pytest.mark.parametrize("op", ["attention", "prefill", "decode"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_correct_implementations_get_a_ratio(op, dtype):
    entries = run(choose_implementations(BACKENDS, with_peers=False), task(op, dtype=dtype))
    assert entries.keys() == {DENSE, *BACKENDS}
    assert "GPU" in entries["triton"].absent
    assert entries["flash"].absent
    for name in BACKENDS.keys() - {"triton", "flash"}:
        assert entries[name].ratio is not None, entries[name].refused or entries[name].absent
        dense_s, our_s = entries[DENSE].samples_s[0], entries[name].samples_s[0]
        assert len(entries[name].samples_s) > 1 or entries[name].ratio.median == pytest.approx(dense_s / our_s)


@pytest.mark.parametrize("part", ["compressed", "select", "selected", "sliding"])
def test_parts_are_checked_too(part):
    entries = run(choose_implementations(["portable"], with_peers=False), task(part=part, backward=part != "select"))
    assert entries["portable"].ratio is not None, entries["portable"].refused


@pytest.mark.parametrize("rows", [slice(None), slice(LENGTH - 1, LENGTH), slice(40, 41)], ids=["all", "last", "middle"])
def test_a_wrong_output_withholds_the_ratio(rows):
    every = all_implementations()
    entry = run([every[DENSE], spoiled(every["portable"], wrong_output(rows))], task(backward=False))["portable"]
    assert entry.ratio is None
    assert "out by" in entry.refused
    assert entry.samples_s  # the time may be shown; the ratio may not


@pytest.mark.parametrize("name", ["q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates"])
def test_a_right_output_with_a_wrong_gradient_withholds_the_ratio(name):
    every = all_implementations()
    entry = run([every[DENSE], spoiled(every["portable"], wrong_gradient(name))], task())["portable"]
    assert entry.ratio is None
    assert f"{name} by" in entry.refused
    assert "out by" not in entry.refused


@pytest.mark.parametrize("name", ["q", "k_cmp", "v_sel", "k_win"])
def test_a_gradient_that_is_wrong_at_full_length_only_is_seen(name):
    every = all_implementations()

    def only_long(runner, case):
        return wrong_gradient(name, slice(-1, None))(runner, case) if case.length == LENGTH else runner

    assert short_length(BenchCase(TINY, 1, torch.float32)) < LENGTH
    assert run([every[DENSE], spoiled(every["portable"], only_long)], task())["portable"].ratio is None


def test_a_wrong_gradient_inside_backward_itself_is_seen():
    every = all_implementations()

    def spoil(runner, case):
        forward = runner.forward
        return replace(runner, forward=lambda: _WrongGradient.apply(forward(), slice(10, 20)))

    assert "out by" not in run([every[DENSE], spoiled(every["portable"], spoil)], task())["portable"].refused
    assert run([every[DENSE], spoiled(every["portable"], spoil)], task())["portable"].ratio is None


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_a_wrong_cached_output_withholds_the_ratio(op):
    every = all_implementations()
    wrong = spoiled(every["portable"], wrong_output(slice(-1, None)), op)
    assert run([every[DENSE], wrong], task(op))["portable"].ratio is None


def test_not_a_number_withholds_the_ratio():
    every = all_implementations()

    def spoil(runner, case):
        forward = runner.forward
        return replace(runner, forward=lambda: forward() * torch.nan)

    assert run([every[DENSE], spoiled(every["portable"], spoil)], task(backward=False))["portable"].ratio is None


def test_a_wrong_dense_withholds_everyones_ratio():
    every = all_implementations()
    entries = run([spoiled(every[DENSE], wrong_gradient("v_sel")), every["portable"]], task())
    assert entries["portable"].agreement.agrees
    assert entries["portable"].ratio is None
    assert entries["portable"].refused.startswith(DENSE)


def test_a_peer_that_computes_something_else_is_timed_without_a_ratio():
    every = all_implementations()
    peer = replace(every["portable"], name="peer", kind="other", differs="it computes another function")
    entry = run([every[DENSE], peer], task(backward=False))["peer"]
    assert entry.samples_s
    assert (entry.ratio, entry.refused) == (None, "it computes another function")


def test_a_peer_that_fails_is_left_out_and_a_backend_that_fails_is_not_hidden():
    every = all_implementations()

    def fail(case, task):
        raise RuntimeError("no kernel for this\ndetails")

    broken = replace(every["portable"], make={"attention": fail})
    entries = run([every[DENSE], replace(broken, name="peer"), every["portable"]], task(backward=False))
    assert entries["peer"].absent == "it failed here: RuntimeError: no kernel for this"
    assert entries["portable"].ratio is not None
    with pytest.raises(RuntimeError, match="no kernel"):
        run([every[DENSE], broken], task(backward=False))


def test_a_choice_of_worse_blocks_is_seen():
    case = BenchCase(TINY, LENGTH, torch.float32)
    g, rows = TINY.geometry, torch.arange(LENGTH)
    right = BACKENDS["reference"].functions.select(
        case.q_BSGRK, case.k_BCGK, rows[None], torch.zeros_like(rows)[None],
        geometry=g, scale=case.scale,
    )  # fmt: skip
    assert _choice_error(case, case.k_BCGK, rows, right) == 0
    wrong = right.clone()
    last = wrong[0, -1, 0]
    free = next(j for j in range(1, (LENGTH - 1) // g.l_sel - 1) if j not in last)
    wrong[0, -1, 0] = torch.tensor([0, free, *last[2:].tolist()])
    assert _choice_error(case, case.k_BCGK, rows, wrong) > 1e-3
    twice = right.clone()
    twice[0, -1, 0, 1] = twice[0, -1, 0, 2]
    assert _choice_error(case, case.k_BCGK, rows, twice) == float("inf")


def test_a_backend_that_attends_rightly_to_the_wrong_blocks_gets_no_ratio():
    every = all_implementations()

    def spoil(runner, case):
        choose = runner.chosen
        return replace(runner, chosen=lambda rows: choose(rows).roll(1, -1))

    refused = run([every[DENSE], spoiled(every["portable"], spoil)], task())["portable"].refused
    assert "blocks by" in refused


def test_the_last_queries_are_always_among_the_sampled():
    rows = _sampled_rows(1000)
    assert rows[-1] == 999
    assert rows.unique().numel() == rows.numel()


def test_an_implementation_that_would_exhaust_memory_is_not_timed():
    entry = all_implementations()["reference"]
    reason = entry.refusal(BenchTask("attention", SHAPES["base"], 65_536, "fp32", backward=True))
    assert reason is not None
    assert "GiB" in reason


def test_every_registered_backend_is_an_implementation():
    assert set(BACKENDS) <= all_implementations().keys()
    for name in BACKENDS:
        assert all_implementations()[name].make.keys() == {"attention", "prefill", "decode"}


def test_a_check_reports_which_queries_were_checked():
    case, what = BenchCase(TINY, LENGTH, torch.float32), task()
    portable = all_implementations()["portable"]
    agreement = check_correctness(portable, what, case, portable.make["attention"](case, what))
    assert agreement.agrees
    assert agreement.errors.keys() == {"blocks", "out", *case.inputs()}
    assert f"of {LENGTH}" in agreement.checked
