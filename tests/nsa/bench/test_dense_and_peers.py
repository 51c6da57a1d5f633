"""The dense baseline is the fastest variant at the length that is timed; packages of others are called as they want."""

import sys
from types import SimpleNamespace

import pytest
import torch

from nsa.bench import dense, implementations
from nsa.bench.case import SHAPES, BenchCase, BenchTask
from nsa.bench.correctness import check_correctness
from nsa.bench.implementations import all_implementations, peer_versions

TINY = SHAPES["tiny"]


def test_the_dense_baseline_is_the_fastest_at_the_length_that_is_timed(monkeypatch):
    now = 0.0

    def form(cost):
        def attend(q, k, v, shape):
            nonlocal now
            now += cost(q.shape[2])
            return right(q, k, v, shape)

        return attend

    right = dense._FORMS["enable_gqa"]
    monkeypatch.setattr(dense, "_FORMS", {"short": form(lambda n: n), "long": form(lambda n: 3000)})
    monkeypatch.setattr(dense, "clock_of", lambda device: lambda: now)
    dense._fastest_form.cache_clear()
    chosen = {}
    for length in (64, 2048, 4096):
        task = BenchTask("attention", TINY, length, "fp32")
        runner = dense.attention(BenchCase(TINY, length, torch.float32), task)
        chosen[length] = runner.note.partition(" ")[0]
        before = now
        runner.forward_only()
        assert now - before == min(length, 3000)
    dense._fastest_form.cache_clear()
    assert chosen == {64: "short", 2048: "short", 4096: "long"}


def test_variants_that_cannot_run_are_named_and_ours_must():
    def fails(error):
        def run():
            raise error

        return run

    ok = {"enable_gqa": lambda: None}
    others = {"FlashAttention 4": fails(ModuleNotFoundError("flash_attn")), "cuDNN": fails(RuntimeError("no kernel"))}
    fastest = dense._fastest(ok | others, torch.device("cpu"))
    assert fastest.name == "enable_gqa"
    assert "FlashAttention 4 not installed" in fastest.note
    assert "cuDNN RuntimeError" in fastest.note
    with pytest.raises(RuntimeError):
        dense._fastest({"enable_gqa": fails(RuntimeError("broken"))}, torch.device("cpu"))


def test_flash_attention_gets_its_own_layout(monkeypatch):
    def flash_attn_func(q, k, v, *, causal):
        assert causal
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2), None

    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=flash_attn_func))
    case = BenchCase(TINY, 50, torch.float32)
    q, k, v = (x.detach() for x in dense._tensors(case).values())
    got = dense._FORMS["FlashAttention 4"](q, k, v, TINY)
    assert torch.equal(got, dense._FORMS["enable_gqa"](q, k, v, TINY))


def test_every_package_is_named_with_its_version_or_as_absent():
    versions = peer_versions()
    assert set(versions) == {"FlashAttention 2", "FlashAttention 4", "cuDNN", "cuDNN frontend", "fla", "FSA"}
    assert all(version == "not installed" or version[0].isdigit() for version in versions.values())


def selected(q_BSHK, k_BTGK, v_BTGV, idx_BSGN, block, scale):
    """Selected attention as a mask over all keys."""
    n, heads = k_BTGK.shape[1], q_BSHK.shape[2] // k_BTGK.shape[2]
    seen = ((torch.arange(n) // block)[:, None] == idx_BSGN[..., None, :]).any(-1)
    seen = (seen & (torch.arange(n) <= torch.arange(n)[:, None])[:, None]).repeat_interleave(heads, 2)
    k, v = (x.repeat_interleave(heads, 2) for x in (k_BTGK, v_BTGV))
    scores = torch.einsum("bshk,bthk->bsht", q_BSHK, k) * scale
    return torch.einsum("bsht,bthv->bshv", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def parallel_nsa(q, k, v, *, block_indices, block_counts, block_size, scale):
    """With the signature of fla-core 0.6."""
    assert (block_indices.dtype, block_counts) == (torch.int64, TINY.geometry.n_sel)
    return selected(q, k, v, block_indices, block_size, scale)


class FSATopkSparseAttention:
    """With the arguments of Flash-Sparse-Attention's function: no batch, indices [groups, tokens, blocks]."""

    @staticmethod
    def apply(q, k, v, topk_idx, block_size, ends_q, ends_k, longest_q, longest_k, scale):
        assert topk_idx.dtype == ends_q.dtype == ends_k.dtype == torch.int32
        assert ends_q.tolist() == ends_k.tolist() == [0, longest_q] == [0, longest_k]
        return selected(q[None], k[None], v[None], topk_idx.transpose(0, 1)[None], block_size, scale)[0]


@pytest.mark.parametrize(
    ("name", "module", "content"),
    [
        ("fla", "fla.ops.nsa.parallel", SimpleNamespace(parallel_nsa=parallel_nsa)),
        ("FSA", "fsa.ops.FSA_topk_sparse_attention", SimpleNamespace(FSATopkSparseAttention=FSATopkSparseAttention)),
    ],
)
def test_selected_parts_of_packages_are_checked_before_they_are_timed(monkeypatch, name, module, content):
    monkeypatch.setitem(sys.modules, module, content)
    implementation = all_implementations()[name]
    task = BenchTask("attention", TINY, 70, "fp32", backward=True, part="selected")
    case = BenchCase(TINY, 70, torch.float32)
    check = check_correctness(implementation, task, case, implementation.make["attention"](case, task))
    assert check.agrees, check.reason


def test_packages_say_why_they_are_not_timed(monkeypatch):
    every = all_implementations()
    task = BenchTask("attention", SHAPES["base"], 2048, "bf16", True, "selected", "cuda")
    monkeypatch.setattr(implementations, "find_spec", lambda package: None)
    assert "not installed" in every["fla"].why_not(task)
    assert "github.com" in every["FSA"].why_not(task)
    monkeypatch.setattr(implementations, "find_spec", lambda package: True)
    assert "power of two" in every["fla"].why_not(task)
    assert every["FSA"].why_not(task) is None
    assert "need a GPU" in every["FSA"].why_not(BenchTask("attention", TINY, 64, "fp32", part="selected"))
