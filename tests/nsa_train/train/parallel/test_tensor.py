"""Tensor parallelism against one process: weights, gradients, steps and evaluation, for every way to build a layer."""

import pytest
import torch

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from tests import fork_server
from tests.nsa_train.train.parallel.tensor_cases import FAST, SLOW
from tests.nsa_train.train.runs import ROOT, environment


def run_cases(folder, names, timeout_s):
    command = ["-m", "tests.nsa_train.train.parallel.tensor_cases", str(folder), *names]
    done = fork_server.run(command, cwd=ROOT, env=environment(), timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("tensor"), FAST, 300)


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("tensor_slow"), SLOW, 1500)


def require_equal(divided, alone, tolerance):
    """`tolerance` is relative to the largest value of the tensor."""
    assert divided.keys() == alone.keys()
    for name, tensor in alone.items():
        limit = tolerance * max(tensor.abs().max().item(), 1e-6)
        torch.testing.assert_close(divided[name], tensor, rtol=0, atol=limit, msg=lambda text, n=name: f"{n}: {text}")


def check(folder, name):
    divided, alone = (torch.load(folder / f"{name}.{who}", weights_only=True) for who in ("divided", "alone"))
    require_equal(divided["initial"], alone["initial"], 0)
    require_equal(divided["gradients"], alone["gradients"], 1e-5)
    steps, wanted = (torch.tensor(each["steps"]) for each in (divided, alone))
    torch.testing.assert_close(steps, wanted, rtol=1e-5, atol=1e-5)
    for weight, tensor in alone["weights"].items():
        torch.testing.assert_close(divided["weights"][weight], tensor, rtol=0, atol=1e-4)
    nats, *counts = divided["scores"].tolist()
    assert nats == pytest.approx(alone["scores"][0].item(), rel=1e-4)
    assert counts == alone["scores"][1:].tolist()
    assert divided["flops"] == alone["flops"]


@pytest.mark.parametrize("name", FAST)
def test_ranks_compute_what_one_process_does(fast, name):
    check(fast, name)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SLOW)
def test_every_option_on_several_ranks(slow, name):
    check(slow, name)
