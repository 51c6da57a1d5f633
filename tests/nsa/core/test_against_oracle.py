"""The whole module against an oracle that shares no code with it, in fp64."""

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from nsa.core.nsa_attention import NSAAttention
from nsa.kernels.registry import BackendRequest
from tests.attention_options import KV_PROJECTIONS, PHIS, PHIS_OF_UNROTATED_KEYS
from tests.oracle import nsa_layer
from tests.shapes import HEADS, attention_args, fp64_backends

TOLERANCE = 1e-10


def make(seed: int = 0, **args) -> NSAAttention:
    """An fp64 module whose gates and learned compression are far from their initial values."""
    torch.manual_seed(seed)
    module = NSAAttention(**args).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spread = 1.0 if "gates" in name else 0.3
            parameter.copy_(torch.randn_like(parameter) * spread)
    return module


def expected(module: NSAAttention, x_SD: torch.Tensor, args: dict) -> np.ndarray:
    weights = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    return nsa_layer(x_SD.detach().numpy(), weights, **args)


@pytest.mark.parametrize("backend", fp64_backends())
@pytest.mark.parametrize(
    ("length", "args"),
    [
        (131, attention_args("tiny")),
        (77, attention_args("no_overlap")),
        (70, attention_args("long_blocks")),
        (150, attention_args("showcase", n_sel=3)),
        (250, attention_args("odd", (2, 1))),
        (90, attention_args("tiny", phi="linear", phi_pos_emb=True)),
        (90, attention_args("tiny", phi="mlp", phi_pos_emb=True)),
        (60, attention_args("tiny", phi="mlp")),
        (90, attention_args("tiny", phi="weighted")),
        (90, attention_args("odd", kv="shared", phi="weighted", rope_compressed="after")),
        (90, attention_args("tiny", phi="softmax")),
        (90, attention_args("odd", kv="shared", phi="softmax")),
        (90, attention_args("tiny", rope_compressed="after", rope_base=100.0, rope_scale=2.0)),
        (90, attention_args("tiny", gate="sigmoid", gate_per="group", gate_temperature=0.5)),
        (90, attention_args("tiny", gate_per="group", gate_temperature=2.0)),
        (90, attention_args("tiny", gate="tanh", gate_temperature=1.5)),
        (40, attention_args("tiny", (16, 1), dim=32, d_k=192, d_v=128)),  # the paper's group
        (90, attention_args("tiny", kv="shared", bias=True)),
        (90, attention_args("tiny", kv="shared_keys", bias=True)),
        (90, attention_args("tiny", kv="shared_keys", phi="mlp", qk_norm=True)),
        (90, attention_args("tiny", kv="shared", phi="linear", qk_norm=True, out_bias=True)),
        (90, attention_args("long_blocks", qk_norm=True, qk_norm_eps=0.1, bias=True)),
        (3, attention_args("tiny")),
        (1, attention_args("tiny")),
        *[(50, attention_args("tiny", heads)) for heads in HEADS],
    ],
)
def test_equals_the_oracle(backend, length, args):
    module = make(**args, kernels=BackendRequest(*[backend] * 4))
    x_BSD = torch.randn(2, length, args["dim"], dtype=torch.float64)
    out_BSD = module(x_BSD).detach().numpy()
    for b in range(2):
        np.testing.assert_allclose(out_BSD[b], expected(module, x_BSD[b], args), atol=TOLERANCE)


@st.composite
def cases(draw):
    d = draw(st.integers(1, 5))
    args = dict(
        dim=8,
        n_kv_groups=draw(st.integers(1, 2)),
        d_k=2 * draw(st.integers(1, 3)),
        d_v=draw(st.integers(1, 5)),
        l=d * draw(st.integers(1, 4)),
        d=d,
        l_sel=d * draw(st.integers(1, 4)),
        n_sel=draw(st.integers(3, 6)),
        w=draw(st.integers(1, 20)),
        phi=draw(st.sampled_from(PHIS)),
        kv=draw(st.sampled_from(KV_PROJECTIONS)),
        qk_norm=draw(st.booleans()),
        bias=draw(st.booleans()),
    )
    args["rope_compressed"] = draw(
        st.sampled_from(["auto", "after"] + ["before"] * (args["phi"] not in PHIS_OF_UNROTATED_KEYS))
    )
    args["n_heads"] = args["n_kv_groups"] * draw(st.integers(1, 4))
    documents = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any))
    return args, documents, draw(st.integers(0, 2**16))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_any_sizes_and_any_packing_equal_the_oracle(case):
    args, documents, seed = case
    module = make(seed, **args)
    x_SD = torch.randn(sum(documents), args["dim"], dtype=torch.float64)
    cu_doc_lens = torch.tensor([0, *np.cumsum(documents)], dtype=torch.int32)
    out_SD = module(x_SD[None], cu_doc_lens=cu_doc_lens)[0].detach().numpy()
    for begin, end in pairwise(cu_doc_lens.tolist()):
        if begin < end:
            want = expected(module, x_SD[begin:end], args)
            np.testing.assert_allclose(out_SD[begin:end], want, atol=TOLERANCE)
