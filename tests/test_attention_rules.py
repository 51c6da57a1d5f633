"""A mistake gets one message, in a config and in the arguments of `NSAAttention`, in the names of either."""

import re
from collections import Counter

import pytest

from nsa.core.layer_pattern import kind_counts, repeated
from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa_train.config import load
from tests.attention_options import LLAMA3, YARN

MISTAKES: dict[str, dict[str, dict]] = {
    "groups": {"model": dict(n_heads=12, n_kv_groups=5)},
    "odd": {"model": dict(d_k=63)},
    "heads_and_odd": {"model": dict(n_heads=7, d_k=5)},
    "pos_emb": {"nsa": dict(phi_pos_emb=True)},
    "rotated": {"nsa": dict(phi="mlp", rope_compressed="before")},
    "strides": {"nsa": dict(d=12)},
    "positions": {"nsa": dict(w=2**31)},
    "large_blocks": {"nsa": dict(l=65_552, l_sel=65_600)},
    "too_many_blocks": {"nsa": dict(n_sel=65_537)},
    "two_scalings": {"model": dict(rope_scale=2.0, rope_scaling=dict(rope_type="linear", factor=4.0))},
    "missing": {"model": dict(rope_scaling=dict(rope_type="llama3", factor=4.0))},
    "unknown": {"model": dict(rope_scaling=dict(rope_type="linear", factor=4.0, beta_fast=3.0))},
    "llama3": {"model": dict(rope_scaling=LLAMA3 | dict(high_freq_factor=0.5))},
    "yarn": {"model": dict(rope_scaling=YARN | dict(beta_slow=9.0))},
}


@pytest.mark.parametrize("name", MISTAKES)
def test_settings_and_arguments_are_refused_with_the_same_words_each_in_its_own_names(name, tmp_path):
    sections = MISTAKES[name]
    words = [f"{section}.{key}={value}" for section, values in sections.items() for key, value in values.items()
             if key != "rope_scaling"]  # fmt: skip
    scaling = sections.get("model", {}).get("rope_scaling", {})
    words += [f"model.rope_scaling.{key}={value}" for key, value in scaling.items()]
    file = tmp_path / "run.yaml"
    file.write_text("train:\n")
    arguments = load(file).attention.options()
    for values in sections.values():
        arguments |= values
    with pytest.raises(ConfigError) as in_config:
        load(file, overrides=words)
    with pytest.raises(ConfigError) as in_code:
        NSAAttention(**arguments)
    of_config = [line.partition(": ")[2] for line in str(in_config.value).splitlines()[1:]]
    own_names = [re.sub(r"\b(model|nsa)\.", "", line) for line in of_config]
    assert own_names == str(in_code.value).splitlines() != of_config


@pytest.mark.parametrize(
    "sizes",
    [
        dict(d=3),
        dict(d=12),
        dict(l=8, d=3, l_sel=8),
        dict(l=30, d=20, l_sel=60),
        dict(l=32, d=16, l_sel=24),
        dict(d=99),
    ],
    ids=str,
)
def test_a_stride_that_does_not_divide_gets_one_advice_and_it_fits(sizes):
    with pytest.raises(ConfigError) as refused:
        Geometry(**sizes)
    (message,) = str(refused.value).splitlines()
    name, value = re.search(r"Set e\.g\. (\w+)=(\d+)\.$", message).groups()
    assert Geometry(**sizes | {name: int(value)})


def test_sizes_below_one_are_refused_before_anything_is_divided_by_them():
    with pytest.raises(ConfigError) as refused:
        NSAAttention(64, n_heads=4, n_kv_groups=0, d_k=-2, d_v=8)
    assert [line.split()[0] for line in str(refused.value).splitlines()] == ["n_kv_groups", "d_k"]


@pytest.mark.parametrize("n_layers", [1, 2, 5, 12])
@pytest.mark.parametrize("pattern", [("nsa",), ("dense", "nsa"), ("window", "global", "window")])
def test_layers_are_counted_as_they_are_listed(pattern, n_layers):
    assert kind_counts(pattern, n_layers) == Counter(repeated(pattern, n_layers))


def test_any_number_of_layers_is_counted():
    assert kind_counts(("dense", "nsa"), 10**21 + 1) == {"dense": 5 * 10**20 + 1, "nsa": 5 * 10**20}
