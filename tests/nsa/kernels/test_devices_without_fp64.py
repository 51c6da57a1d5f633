"""Apple's GPUs, and some of Intel's, have no fp64: on fake tensors of theirs, no operation of ours gives one."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from nsa.core import probe as probes
from nsa.core.probe import probing
from nsa.core.selector_loss_sampling import _sampled_queries
from nsa.kernels import precision
from nsa.kernels.choice_text import slow_kernels_warning
from nsa.kernels.registry import BackendRequest, plan
from nsa.model.loss import linear_score_sums
from tests.nsa.kernels.fake_gpu import IndexingWithoutDevice, RecordedOperations, fake_attention

SIZES = dict(dim=768, n_heads=12, n_kv_groups=2, d_k=64, d_v=64)


class WithoutFp64(RecordedOperations):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        loss = func.namespace == "nsa" and "token_scores" in func.__name__  # its operations follow its inputs' dtype
        result = func(*args) if loss else super().__torch_dispatch__(func, types, args, kwargs)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device.type == self.device and x.dtype == torch.float64:
                raise TypeError(f"{func}: {self.device} has no float64")
        return result


@pytest.fixture(params=["mps", "xpu"])
def device(request, monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=False))
    return request.param


def attend(device: str) -> None:
    """A forward pass with figures, then a prompt and a token over a cache, with the mask that Transformers gives."""
    with IndexingWithoutDevice(), FakeTensorMode(), WithoutFp64(device), torch.no_grad():
        module = fake_attention(device=device, **SIZES)
        with probing(module):
            module(torch.empty(1, 300, 768, device=device))
        cache = module.new_cache(2, 512)
        module(torch.empty(2, 300, 768, device=device), cache=cache)
        positions = torch.empty(2, 1, dtype=torch.int64, device=device)
        module(torch.empty(2, 1, 768, device=device), cache=cache, position_ids=positions)


def test_attention_its_figures_and_its_cache_need_none(device):
    attend(device)


def test_a_sum_in_fp64_is_seen(device, monkeypatch):
    monkeypatch.setattr(probes, "widest_float", lambda device: torch.float64)
    with pytest.raises(TypeError, match="has no float64"):
        attend(device)


def test_losses_and_sampled_queries_need_none(device):
    with IndexingWithoutDevice(), FakeTensorMode(), WithoutFp64(device), torch.no_grad():
        hidden, weight = torch.empty(64, 32, device=device), torch.empty(100, 32, device=device)
        sums = linear_score_sums(hidden, weight, torch.empty(64, dtype=torch.int64, device=device))
        assert sums.nats.device.type == device
        assert _sampled_queries(1000, 0.1, 3, torch.device(device)).shape == (100,)


def test_where_there_is_fp64_it_is_used(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=True))
    assert {precision.widest_float(torch.device(name)) for name in ("cpu", "cuda", "xpu")} == {torch.float64}


def test_that_nothing_fast_exists_there_is_warned_about(device):
    where = torch.device(device), torch.bfloat16
    choices = plan(BackendRequest(), *where, fake_shape()).choices
    assert {choice.backend for choice in choices} == {"portable"}
    assert f"none of the fast backends runs on {device}" in slow_kernels_warning(choices, device)


def fake_shape():
    with torch.device("meta"):
        from nsa.core.nsa_attention import NSAAttention

        return NSAAttention(**SIZES).strategy.shape
