"""Rotary position embedding: relative positions, exact angles, and the published scaling formulas."""

import math

import numpy as np
import pytest
import torch

from nsa.core.attention_config import RopeConfig, attention_config
from nsa.core.rope import RotaryEmbedding, rotate
from nsa.errors import ConfigError
from tests.nsa_train.train.pretend_cuda import pretended_cuda
from tests.oracle import rotated

CPU = torch.device("cpu")


def rotary_embedding(d_k, base, scale, scaling=None, **options) -> RotaryEmbedding:
    return RotaryEmbedding(d_k, RopeConfig(base=base, scale=scale, scaling=scaling, **options))


def test_scores_depend_on_distance_alone():
    rotary = rotary_embedding(8, base=100.0, scale=1.0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i, j):
        a, b = (rotate(x, rotary.tables(torch.tensor([[p]]))) for x, p in ((q, i), (k, j)))
        return (a * b).sum()

    torch.testing.assert_close(score(5, 3), score(1005, 1003))
    assert not torch.isclose(score(5, 3), score(5, 2))


def test_rotated_pairs_are_half_a_head_apart_and_keep_their_channels():
    """Queries and keys permuted alike would give the same scores, but not fit weights and keys from elsewhere."""
    x = torch.randn(1, 3, 2, 8, dtype=torch.float64)
    got = rotate(x, rotary_embedding(8, 100.0, 2.0).tables(torch.tensor([[0, 5, 11]])))
    for s, pos in enumerate((0, 5, 11)):
        for h in range(2):
            np.testing.assert_allclose(got[0, s, h].numpy(), rotated(x[0, s, h].numpy(), pos, 100.0, 2.0), atol=1e-12)


def test_scale_stretches_positions():
    tables = rotary_embedding(8, 100.0, 4.0).tables(torch.tensor([[40]]))
    torch.testing.assert_close(tables, rotary_embedding(8, 100.0, 1.0).tables(torch.tensor([[10]])))


def test_angles_are_exact_at_a_million_tokens():
    cos, _ = rotary_embedding(64, 500_000.0, 1.0).tables(torch.tensor([[1_000_003]]))
    for i, value in enumerate(cos[0, 0].tolist()):
        assert abs(value - math.cos(1_000_003 / 500_000.0 ** (2 * i / 64))) < 1e-8


# Scaling: frequencies computed here one by one, as the formulas of Llama 3 and YaRN are published.


def plain(i: int, d_k: int, base: float) -> float:
    return base ** (-2 * i / d_k)


def llama3(i, d_k, base, *, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings):
    frequency = plain(i, d_k, base)
    wavelength = 2 * math.pi / frequency
    if wavelength < original_max_position_embeddings / high_freq_factor:
        return frequency
    if wavelength > original_max_position_embeddings / low_freq_factor:
        return frequency / factor
    smooth = original_max_position_embeddings / wavelength - low_freq_factor
    smooth /= high_freq_factor - low_freq_factor
    return (1 - smooth) * frequency / factor + smooth * frequency


def yarn(i, d_k, base, *, factor, original_max_position_embeddings, beta_fast=32, beta_slow=1, truncate=True, **_):
    def dimension(rotations):
        return d_k * math.log(original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d_k - 1)
    ramp = min(1.0, max(0.0, (i - low) / (high - low)))
    return plain(i, d_k, base) / factor * ramp + plain(i, d_k, base) * (1 - ramp)


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN = dict(factor=4.0, original_max_position_embeddings=32_768)


@pytest.mark.parametrize(
    ("kind", "options", "formula", "attention_factor"),
    [
        ("default", {}, plain, 1.0),
        ("linear", dict(factor=4.0), lambda i, d_k, base, factor: plain(i, d_k, base) / factor, 1.0),
        ("llama3", LLAMA3, llama3, 1.0),
        ("yarn", YARN, yarn, 0.1 * math.log(4) + 1),
        ("yarn", YARN | dict(beta_fast=16, beta_slow=2, truncate=False), yarn, 0.1 * math.log(4) + 1),
        ("yarn", YARN | dict(attention_factor=0.9), yarn, 0.9),
        ("yarn", YARN | dict(mscale=0.7, mscale_all_dim=2.0), yarn, (0.07 * math.log(4) + 1) / (0.2 * math.log(4) + 1)),
        ("yarn", YARN | dict(factor=0.5), yarn, 1.0),
    ],
)
def test_scaled_frequencies_are_the_published_ones(kind, options, formula, attention_factor):
    d_k, base = 128, 500_000.0
    rotary = rotary_embedding(d_k, base, 1.0, {"rope_type": kind, **options})
    cos, sin = rotary.tables(torch.tensor([[777]]))
    for i in range(d_k // 2):
        angle = 777 * formula(i, d_k, base, **options)
        assert cos[0, 0, i].item() == pytest.approx(math.cos(angle) * attention_factor, abs=1e-9), i
        assert sin[0, 0, i].item() == pytest.approx(math.sin(angle) * attention_factor, abs=1e-9), i
    assert rotary.frequencies(torch.device("cpu"))[0].item() == pytest.approx(formula(0, d_k, base, **options))


def test_llama3_has_all_three_ranges():
    frequencies = rotary_embedding(128, 500_000.0, 1.0, {"rope_type": "llama3", **LLAMA3}).frequencies(CPU)
    ratio = rotary_embedding(128, 500_000.0, 1.0).frequencies(CPU) / frequencies
    assert ratio[0] == 1
    assert ratio[-1] == 8
    assert ((ratio > 1) & (ratio < 8)).any()


def test_the_older_key_and_the_theta_of_a_config_are_understood():
    old = rotary_embedding(8, 100.0, 1.0, {"type": "linear", "factor": 4.0, "rope_theta": 100.0})
    new = rotary_embedding(8, 100.0, 4.0)
    torch.testing.assert_close(old.tables(torch.tensor([[40]])), new.tables(torch.tensor([[40]])))


@pytest.mark.parametrize(
    ("scaling", "scale"),
    [
        (dict(rope_type="dynamic", factor=2.0), 1.0),
        (dict(rope_type="linear"), 1.0),
        (dict(rope_type="linear", factor=2.0, beta_fast=3), 1.0),
        (dict(rope_type="linear", factor=0.0), 1.0),
        (dict(rope_type="linear", factor=2.0), 2.0),
        (dict(rope_type="linear", factor=2.0, rope_theta=7.0), 1.0),
        (dict(rope_type="llama3", **LLAMA3) | dict(low_freq_factor=4.0), 1.0),
        (dict(factor=2.0), 1.0),
    ],
    ids=str,
)
def test_impossible_scaling_is_refused(scaling, scale):
    with pytest.raises(ConfigError, match="rope_scaling"):
        attention_config(8, 1, 1, 8, 8, rope_base=100.0, rope_scale=scale, rope_scaling=scaling)


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}]
)
@pytest.mark.parametrize("angles", ["fp64", "fp32"])
def test_an_accelerator_gets_the_tables_of_the_cpu(scaling, angles):
    """Bit for bit, from a table without fp64 on the device."""
    rotary = rotary_embedding(16, 500_000.0, 1.0, scaling, rotary_dim=12, angles=angles)
    pos = torch.tensor([[0, 1, 77, 1023, 5]])
    expected = [table.float() for table in rotary.tables(pos)]
    with pretended_cuda() as device:
        tables = rotary.tables(pos.to("cuda:0", non_blocking=True), torch.float32, limit=1024)
    assert all(torch.equal(mine.values, its) for mine, its in zip(tables, expected, strict=True))
    assert torch.float64 not in device.dtypes
    assert not device.waits


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize(
    "scaling",
    [
        dict(rope_type="default"),
        dict(rope_type="linear", factor=3.0),
        dict(rope_type="llama3", **LLAMA3),
        dict(rope_type="llama3", **{**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 1000}),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096),
        dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.8),
        dict(rope_type="yarn", factor=1.7, original_max_position_embeddings=777, beta_fast=9.0, truncate=False),
        dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=512, attention_factor=1.3),
    ],
    ids=str,
)
@pytest.mark.parametrize(("d_k", "base"), [(128, 500_000.0), (24, 12_345.0)])
def test_fp32_angles_are_those_of_transformers_bit_for_bit(d_k, base, scaling, partial):
    pytest.importorskip("transformers", reason="Transformers is in the hf extra")
    from transformers import Phi3Config
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    sizes = dict(hidden_size=d_k, num_attention_heads=1, max_position_embeddings=131_072, pad_token_id=0)
    sizes |= dict(rope_parameters=dict(scaling, rope_theta=base, partial_rotary_factor=partial))
    if scaling["rope_type"] == "default" and partial < 1:  # Llama's ignores the factor if nothing is scaled
        theirs = Phi3RotaryEmbedding(Phi3Config(**sizes))
    else:
        theirs = LlamaRotaryEmbedding(LlamaConfig(**sizes, head_dim=d_k))
    ours = rotary_embedding(d_k, base, 1.0, scaling, rotary_dim=int(partial * d_k), angles="fp32")
    pos = torch.cat([torch.arange(5000), torch.arange(5000, 131_073, 97), torch.tensor([131_071, 131_072])])[None]
    for table, wanted in zip(ours.tables(pos, torch.float32), theirs(torch.zeros(1), pos), strict=True):
        half = table.shape[-1]
        assert torch.equal(wanted[..., :half], wanted[..., half:])
        assert torch.equal(table, wanted[..., :half])
    exact = rotary_embedding(d_k, base, 1.0, scaling, rotary_dim=int(partial * d_k)).tables(pos, torch.float32)
    assert not torch.equal(exact[0], table)
