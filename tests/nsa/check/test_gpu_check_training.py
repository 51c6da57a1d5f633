"""Rows of the GPU check on training, long rows and a second device: each fails for the fault it is there for."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from nsa.check import module_checks
from nsa.check.cases import ModuleCase, on_gpu, rehearsal
from nsa.check.comparison import CheckStatus
from nsa.kernels import checkpoint_policy
from nsa.kernels.registry import BackendRequest
from nsa_train.record.heartbeat_record import HeartbeatRecord
from nsa_train.train import gpu_check_steps

BY_PORTABLE = BackendRequest(*["portable"] * 4)


CASE = replace(rehearsal(full=False).module, kernels="portable")
"""The rehearsal's module, with the portable backend in place of interpreted Triton."""


def test_a_second_device_is_compared_bit_by_bit():
    assert module_checks.on_two_devices("", CASE, CASE).holds
    assert not module_checks.on_two_devices("", CASE, replace(CASE, kernels="reference")).holds


@pytest.mark.parametrize(("gpus", "said"), [(["A100"], "needs two GPUs"), (["A100", "L4"], "A100 and L4 differ")])
def test_without_two_equal_gpus_the_row_says_so(monkeypatch, gpus, said):
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda n: gpus[n])
    (row,) = module_checks.second_device(on_gpu(torch.device("cuda"), full=False).module)
    assert (row.verdict, said in row.measured) == (CheckStatus.FACT, True)


def test_the_long_row_is_8k_on_a_gpu_and_finds_a_difference(monkeypatch):
    assert on_gpu(torch.device("cuda"), full=False).long.length == 8192
    assert {row.verdict for row in module_checks.against_portable(CASE)} == {CheckStatus.HOLDS}
    attention = ModuleCase.attention

    def other(*args):
        module = attention(*args)
        forward = type(module).forward

        def changed(self, x):
            out = forward(self, x)
            return out if self.kernels == BY_PORTABLE else out * 1.001

        monkeypatch.setattr(type(module), "forward", changed)
        module.kernels = BackendRequest(*["reference"] * 4)
        return module

    monkeypatch.setattr(ModuleCase, "attention", other)
    rows = list(module_checks.against_portable(CASE))
    assert [row.verdict for row in rows] == [CheckStatus.FAILS, CheckStatus.HOLDS, CheckStatus.FAILS]


def test_kernels_that_checkpointing_computes_twice_are_found(monkeypatch):
    assert {row.verdict for row in module_checks.selective_checkpointing(CASE)} == {CheckStatus.HOLDS}
    monkeypatch.setattr(checkpoint_policy, "operator_policy", lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
    same, twice = module_checks.selective_checkpointing(CASE)
    assert (same.verdict, twice.verdict) == (CheckStatus.HOLDS, CheckStatus.FAILS)
    assert "nsa::" in twice.note


def beat(loss):
    return HeartbeatRecord.now(ts=0.0, rank=0, step=1, msg="progress", loss=loss, toks_per_s=1.0)


def test_a_run_that_fails_or_takes_other_kernels_is_found(monkeypatch):
    scope = rehearsal(full=False)
    kernels = {branch: {"backend": "triton", "reason": "verified on this GPU"} for branch in BackendRequest._fields}
    rows = list(gpu_check_steps._trained(scope, "steps", [], [beat(2.0)], {"kernels": kernels}))
    assert [row.verdict for row in rows] == [CheckStatus.HOLDS, CheckStatus.HOLDS, CheckStatus.FACT]
    kernels["select"] = {"backend": "portable", "reason": "triton: its check failed"}
    rows = gpu_check_steps._trained(scope, "steps", [], [beat(float("nan"))], {"kernels": kernels})
    finite, other, _ = rows
    assert (finite.verdict, other.verdict) == (CheckStatus.FAILS, CheckStatus.FAILS)
    assert "its check failed" in other.note
    monkeypatch.setattr(
        gpu_check_steps.subprocess,
        "run",
        lambda *_, **__: SimpleNamespace(returncode=20, stdout="ConfigError: no GPU\n"),
    )
    (row,) = gpu_check_steps._train_50k(scope)
    assert (row.verdict, row.measured, row.note) == (CheckStatus.FAILS, 20, "ConfigError: no GPU")


def test_the_steps_on_a_gpu_change_nothing_of_the_model():
    from nsa_train.config import load

    changes = on_gpu(torch.device("cuda"), full=False).training
    short, whole = load(gpu_check_steps.CONFIG, overrides=changes), load(gpu_check_steps.CONFIG)
    assert (short.model, short.nsa, short.runtime, short.kernels) == (
        whole.model,
        whole.nsa,
        whole.runtime,
        whole.kernels,
    )
    assert (short.train.batch_size, short.train.seq_len) == (whole.train.batch_size, whole.train.seq_len)
