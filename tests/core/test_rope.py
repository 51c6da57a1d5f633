import math

import torch

from nsa.core.rope import RotaryEmbedding, rotate


def test_scores_depend_on_distance_alone():
    rotary = RotaryEmbedding(8, base=100.0, scale=1.0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i, j):
        a, b = (rotate(x, rotary.tables(torch.tensor([[p]]))) for x, p in ((q, i), (k, j)))
        return (a * b).sum()

    torch.testing.assert_close(score(5, 3), score(1005, 1003))
    assert not torch.isclose(score(5, 3), score(5, 2))


def test_scale_stretches_positions():
    tables = RotaryEmbedding(8, 100.0, 4.0).tables(torch.tensor([[40]]))
    torch.testing.assert_close(tables, RotaryEmbedding(8, 100.0, 1.0).tables(torch.tensor([[10]])))


def test_angles_are_exact_at_a_million_tokens():
    cos, _ = RotaryEmbedding(64, 500_000.0, 1.0).tables(torch.tensor([[1_000_003]]))
    for i, value in enumerate(cos[0, 0].tolist()):
        assert abs(value - math.cos(1_000_003 / 500_000.0 ** (2 * i / 64))) < 1e-8
