"""Triton's whole step for one new token per row, from projections on: equal to the reference over the cache's append.

For every φ, kind of gate, norm and rotation. Interpreted.
"""

import pytest
import torch

from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError
from nsa.kernels.registry import BackendRequest
from tests.backends import RUN_HERE
from tests.shapes import attention_args

pytest.importorskip("triton", reason="it is in the dev extra")
from nsa.kernels.triton import decode

pytestmark = pytest.mark.skipif("triton" not in RUN_HERE, reason="runs under TRITON_INTERPRET=1")

LENGTHS, STEPS = (2, 37), 6  # the first row ends its first block, the second one two
TRITON, REFERENCE = (BackendRequest(*[name] * 4) for name in ("triton", "reference"))
CASES = [
    ("nsa", dict()),
    ("nsa", dict(phi="softmax", gate="sigmoid", gate_per="group")),
    ("nsa", dict(phi="softmax", kv="shared", qk_norm=True, gate="tanh", rotary_dim=4)),
    ("nsa", dict(phi="weighted", kv="shared_keys", gate_temperature=2.0, bias=True)),
    ("nsa", dict(phi="mlp", kv="shared", phi_pos_emb=True)),
    ("nsa", dict(phi="linear", rope="none")),
    ("nsa", dict(phi="avg", rope_compressed="after", qk_norm=True, qk_norm_per="layer", kv="shared")),
    ("nsa", dict(phi="softmax", d_k=24, d_v=40)),  # rows in two parts
    ("nsa", dict(phi="softmax", l=24, d=4, l_sel=8, n_sel=5, w=7)),  # tokens of a block in two rounds
    ("global", dict(phi="weighted", gate="sigmoid")),
    ("global", dict(phi="softmax", kv="shared")),
    ("merged", dict(phi="softmax")),
    ("merged", dict(phi="linear")),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Several parts, and several rounds of a block's tokens."""
    for name, value in dict(PROGRAMS=4, WINDOW_PART=16, STRETCHES=2, BLOCKS_AT_ONCE=16, MERGED_AT_ONCE=2).items():
        monkeypatch.setattr(decode, name, value)


def modules(kind, heads=(3, 1), **options):
    """One that steps, and the reference with the same weights."""
    args = attention_args("tiny", heads, **options)
    torch.manual_seed(0)
    stepping, whole = (NSAAttention(**args, kind=kind, kernels=request).eval() for request in (TRITON, REFERENCE))
    for parameter in stepping.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    whole.load_state_dict(stepping.state_dict())
    return stepping, whole


def filled(module, whole, x, **options):
    cache = module.new_cache(len(LENGTHS), x.shape[1], **options)
    whole(x[:, : max(LENGTHS)], cache=cache, new_lens_B=torch.tensor(LENGTHS))
    return cache


@torch.no_grad()
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_a_step_leaves_the_cache_that_the_caches_own_append_leaves(kind, options, monkeypatch):
    """Its output is the reference's."""
    stepping, whole = modules(kind, **options)
    x = torch.randn(2, max(LENGTHS) + STEPS, 24)
    caches = [filled(stepping, whole, x) for _ in range(2)]
    steps = []
    step = decode.TritonDecoder.step
    monkeypatch.setattr(decode.TritonDecoder, "step", lambda *args: steps.append(1) or step(*args))
    rows = torch.arange(2)
    for n in range(STEPS):
        token = x[rows, torch.tensor(LENGTHS) + n][:, None]
        got, want = stepping(token, cache=caches[0]), whole(token, cache=caches[1])
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        for name in ("length_B", "n_compressed_B", "_pos_B1", "_window_pos_B1"):
            assert torch.equal(getattr(caches[0], name), getattr(caches[1], name)), name
    assert len(steps) == STEPS
    for ours, theirs in zip(*(cache._all_slots() for cache in caches), strict=True):
        torch.testing.assert_close(ours.content(), theirs.content(), atol=1e-6, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_where_pytorch_rounds(dtype):
    stepping, whole = (module.to(dtype) for module in modules("nsa", phi="softmax", qk_norm=True))
    x = torch.randn(2, max(LENGTHS) + STEPS, 24, dtype=dtype)
    caches = [filled(stepping, whole, x) for _ in range(2)]
    for n in range(STEPS):
        token = x[torch.arange(2), torch.tensor(LENGTHS) + n][:, None]
        got, want = stepping(token, cache=caches[0]), whole(token, cache=caches[1])
        torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)
    for ours, theirs in zip(*(cache._all_slots() for cache in caches), strict=True):
        torch.testing.assert_close(ours.content(), theirs.content(), atol=torch.finfo(dtype).eps, rtol=0.02)


@torch.no_grad()
def test_more_heads_than_a_tile_has_rows_and_pages_in_any_order(monkeypatch):
    """Programs of other heads append the same token; rows that were reordered share pages."""
    stepping, whole = modules("nsa", (17, 1), phi="softmax")
    x = torch.randn(2, 60, 24)
    caches = [stepping.new_cache(2, 60) for _ in range(2)]
    for cache in caches:
        whole(x[:, :30], cache=cache)
        cache.reorder([1, 1])
        assert not cache.page_table.in_order
    for n in range(30, 36):
        got, want = stepping(x[:, n : n + 1], cache=caches[0]), whole(x[:, n : n + 1], cache=caches[1])
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_full_cache_refuses_a_step_and_keeps_what_it_has():
    stepping, whole = modules("nsa")
    x = torch.randn(2, max(LENGTHS) + 1, 24)
    cache = filled(stepping, whole, x)
    stepping(x[:, :1], cache=cache)
    before = [slots.data.clone() for slots in cache._all_slots()]
    with pytest.raises(ConfigError, match="max_len"):
        stepping(x[:, :1], cache=cache)
    assert cache.length_B.tolist() == [3, 38]
    assert all(torch.equal(slots.data, was) for slots, was in zip(cache._all_slots(), before, strict=True))
