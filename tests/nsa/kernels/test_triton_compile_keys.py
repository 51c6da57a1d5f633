"""Kernels are compiled once per model: their compile keys do not depend on lengths, packings or positions."""

import random

import pytest
import torch

from nsa.core.functional import nsa_attention
from nsa.core.nsa_attention import NSAAttention
from nsa.geometry import Geometry
from tests.shapes import GEOMETRIES, attention_args

pytest.importorskip("triton", reason="it is in the dev extra")
import triton

from nsa.kernels.triton import selected
from tests.nsa.kernels.launch_recorder import RecordedLaunch, keys_by_kernel, recorded_launches

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")

GEOMETRY = Geometry(**GEOMETRIES["seed"])
PACKINGS = 50
MOST_KEYS = 2  # in the model's dtype and in fp32, where partial results are added
VECTORIZED = {"q", "k", "v", "out", "dout", "dq", "dk", "dv", "slot", "mixed", "compressed", "selected", "sliding"}
ROW_STRIDES = ("q_b", "q_s", "q_g", "q_r", "k_b", "k_t", "k_g", "v_b", "v_t", "v_g", "do_b", "do_s", "do_g", "do_r")


def random_packing(rng: random.Random) -> tuple[int, list[int] | None]:
    """A row's length, and where its documents begin and end; None for rows of one document."""
    length = rng.choice([rng.randrange(1, 5000), rng.randrange(1, 300) * 16, 1024, 1 + rng.randrange(40)])
    if rng.random() < 0.3:
        return length, None
    cuts = sorted(rng.randrange(length + 1) for _ in range(rng.randrange(12)))
    return length, [0, *cuts, length]


def forward_and_backward(rng: random.Random, heads: int, groups: int, d_k: int, d_v: int) -> None:
    length, documents = random_packing(rng)
    batch = 1 if documents else rng.choice([1, 1, 2, 3])
    # Views of one fused projection, as a model makes them.
    rows = torch.empty(batch, length, heads * d_k + groups * (d_k + d_v), dtype=torch.bfloat16, requires_grad=True)
    q, k, v = rows.split((heads * d_k, groups * d_k, groups * d_v), -1)
    out = nsa_attention(
        q.unflatten(-1, (heads, d_k)), k.unflatten(-1, (groups, d_k)), v.unflatten(-1, (groups, d_v)),
        torch.empty(batch, length, heads, 3), geometry=GEOMETRY, cu_seqlens=documents, kernels="triton",
    )  # fmt: skip
    out.backward(torch.empty_like(out))


def over_packings(monkeypatch, heads: int = 12, groups: int = 2, d_k: int = 64, d_v: int = 64) -> list[RecordedLaunch]:
    rng = random.Random(heads)
    with recorded_launches() as launches:
        for _ in range(PACKINGS):
            # Rows of a million tokens are taken in spans: here so are those of a few hundred, now and then.
            monkeypatch.setattr(selected, "SLOT_BYTES", rng.choice([2**30, 2**24]))
            forward_and_backward(rng, heads, groups, d_k, d_v)
    return launches


@pytest.mark.parametrize(
    "model",
    [  # the largest for every change
        pytest.param((12, 2, 64, 64), id="base", marks=pytest.mark.nightly),
        pytest.param((64, 4, 192, 128), id="paper"),
        pytest.param((16, 1, 128, 128), id="one-group", marks=pytest.mark.nightly),
    ],
)
def test_packings_need_at_most_two_compilations_of_each_kernel(model, monkeypatch):
    launches = over_packings(monkeypatch, *model)
    counts = {kernel: len(keys) for kernel, keys in keys_by_kernel(launches).items()}
    assert len(counts) >= 17, "a kernel of training was not launched"
    assert {kernel: n for kernel, n in counts.items() if n > MOST_KEYS} == {}


def test_what_vectorized_loads_need_is_still_known_to_the_compiler(monkeypatch):
    """Addresses and strides of rows are divisible by 16; without that the compiler loads elements one by one."""
    seen = set()
    for launch in over_packings(monkeypatch):
        for name, (kind, assumed) in launch.special.items():
            if (name in VECTORIZED and kind.startswith("*")) or name in ROW_STRIDES:
                seen.add(name)
                assert assumed == "D" or launch.arguments[name] == 1, (launch.kernel, name, launch.arguments[name])
    assert seen > set(ROW_STRIDES)


def decode_steps(steps: int, capacity: int, batch: int) -> list[RecordedLaunch]:
    sizes = attention_args("seed", (12, 2), dim=768, d_k=64, d_v=64)
    attention = NSAAttention(**sizes, kernels="triton").to(torch.bfloat16).eval()
    cache = attention.new_cache(batch, capacity)
    with recorded_launches() as launches, torch.no_grad():
        for _ in range(steps):
            attention(torch.zeros(batch, 1, 768, dtype=torch.bfloat16), cache=cache)
    return launches


def test_decoding_needs_one_compilation_of_each_kernel_whatever_the_position():
    launches = decode_steps(200, 256, 1)
    assert len(launches) == 200 * 4
    assert {len(keys) for keys in keys_by_kernel(launches).values()} == {1}


def test_decoding_with_other_batches_and_caches_needs_no_other_compilation():
    launches = [x for batch, room in ((1, 256), (2, 257), (3, 1000), (16, 4111)) for x in decode_steps(2, room, batch)]
    assert {len(keys) for keys in keys_by_kernel(launches).values()} == {1}
