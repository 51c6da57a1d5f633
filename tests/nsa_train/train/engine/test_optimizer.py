"""`EagerAdamW` is torch's AdamW, bit for bit, without its compiler."""

import inspect
import subprocess
import sys

import pytest

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

import torch
from torch.optim import AdamW
from torch.optim.optimizer import Optimizer

from nsa_train.train.engine.optimizer import EagerAdamW

OPTIONS = ({}, {"foreach": True}, {"fused": True}, {"weight_decay": 0.0, "betas": (0.9, 0.95)})


def trained(optimizer_class: type[AdamW], options: dict) -> tuple[list[torch.Tensor], dict]:
    """Weights and optimizer state after five steps, the last two with an optimizer that was loaded."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    optimizer = optimizer_class(model.parameters(), lr=1e-2, **options)
    for step in range(5):
        if step == 3:
            state = optimizer.state_dict()
            optimizer = optimizer_class(model.parameters(), lr=1e-2, **options)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        model(torch.randn(3, 5)).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], optimizer.state_dict()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_and_state_are_those_of_torch(options):
    for ours, theirs in zip(trained(EagerAdamW, options), trained(AdamW, options), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_step_records_no_gradients_and_calls_its_hooks_once():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, calls = EagerAdamW([weight]), []
    optimizer.register_step_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    AdamW([weight])  # torch wraps the class's own step when the first instance is made
    weight.square().sum().backward()
    optimizer.step()
    assert (calls, torch.is_grad_enabled(), weight.grad_fn) == ([True], True, None)


def test_no_method_of_it_imports_the_compiler():
    program = (
        "import sys, torch, nsa_train.train.engine\n"
        "from nsa_train.train.engine.optimizer import EagerAdamW\n"
        "weight = torch.nn.Parameter(torch.ones(2)); optimizer = EagerAdamW([weight])\n"
        "weight.square().sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "optimizer.load_state_dict(optimizer.state_dict())\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"


def test_every_method_that_torch_hides_from_its_compiler_is_replaced():
    """A method that a version of torch hides in addition fails here by name."""
    hidden = {
        name
        for owner in (Optimizer, torch.optim.Adam, AdamW)
        for name, value in vars(owner).items()
        if inspect.isfunction(value) and value is not inspect.unwrap(value)
        and value.__code__.co_filename.endswith("_compile.py")
    }  # fmt: skip
    assert hidden == {"add_param_group", "zero_grad", "state_dict", "load_state_dict"}
    assert hidden | {"step"} <= set(vars(EagerAdamW))
