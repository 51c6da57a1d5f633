"""A token that is not finite: other documents and earlier tokens stay as they are, on all backends but Triton.

Triton multiplies hidden values by a weight of 0, whatever they hold: docs/DESIGN.md says why.
"""

import pytest
import torch

from nsa.core.nsa_attention import NSAAttention
from nsa.kernels.portable import chunk
from tests.attention_options import PHIS
from tests.backends import RUN_HERE as ALL_BACKENDS
from tests.shapes import attention_args

RUN_HERE = [name for name in ALL_BACKENDS if name != "triton"]
DOCUMENTS, BAD = (0, 40, 97, 150), 80
KINDS = {"nsa": {}, "nsa in two levels": dict(coarse_block=4, n_coarse=3), "merged": {}, "dense": {}, "window": {}}
CASES = [(kind, "softmax") for kind in KINDS] + [("nsa", phi) for phi in PHIS if phi != "softmax"]


def layer(kind, backend, phi="softmax"):
    torch.manual_seed(0)
    args = attention_args("tiny", (6, 2), kernels=backend, phi=phi, **KINDS[kind])
    return NSAAttention(**args, kind=kind.split()[0])


def tokens(batch, length):
    return torch.randn(batch, length, 24, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize(("kind", "phi"), CASES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_packed_documents_and_earlier_tokens_stay_clean(backend, kind, phi, value):
    module, clean = layer(kind, backend, phi), tokens(1, DOCUMENTS[-1])
    bad = clean.clone()
    bad[0, BAD, 3] = value
    results = []
    for x in (bad, clean):
        out = module(x.requires_grad_(), cu_doc_lens=DOCUMENTS)
        results.append((out, torch.autograd.grad(out.sum(), x)[0]))
    (got, got_dx), (want, want_dx) = results
    others = torch.ones(DOCUMENTS[-1], dtype=torch.bool)
    others[DOCUMENTS[1] : DOCUMENTS[2]] = False
    torch.testing.assert_close(got_dx[0, others], want_dx[0, others])
    others[DOCUMENTS[1] : BAD] = True
    torch.testing.assert_close(got[0, others], want[0, others])
    assert not got[0, BAD].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_portable_backend_cleans_where_the_host_does_not_read(kind, monkeypatch):
    monkeypatch.setattr(chunk, "READABLE_DEVICES", ())  # as on a GPU
    test_packed_documents_and_earlier_tokens_stay_clean("portable", kind, "softmax", torch.nan)


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("kind", KINDS)
def test_what_padding_holds_does_not_matter(backend, kind):
    module, x = layer(kind, backend), tokens(2, 60)
    mask = torch.ones(2, 60, dtype=torch.int64)
    mask[0, :25], mask[1, 50:] = 0, 0
    results = []
    for padding in (torch.nan, 0.0):
        out = module(x.masked_fill(mask[..., None] == 0, padding), attention_mask=mask)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(module.parameters()), allow_unused=True)])
    for got, want in zip(*results, strict=True):
        assert got is want is None or torch.equal(got, want)


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pages", [None, 20])
def test_rows_of_a_cache_stay_clean(backend, kind, pages):
    """Beside a row with a bad token, after padding of NaN, and in a row that a bad one used before."""
    module, x = layer(kind, backend).requires_grad_(False), tokens(2, 64)
    bad = x.clone()
    bad[1, 20], lengths = torch.nan, torch.tensor([40, 37])
    bad[1, 37:40] = torch.nan
    outs = []
    for prompt in (bad, x):
        cache = module.new_cache(2, 64, pages=pages)
        parts = [module(prompt[:, :40], cache=cache, new_lens_B=lengths)[0]]
        parts += [module(x[:, t : t + 1], cache=cache)[0] for t in range(40, 48)]
        cache.reset([1])
        parts += [module(x[:, t : t + 1], cache=cache).flatten(0, 1) for t in range(48, 62)]
        outs.append(torch.cat(parts))
    torch.testing.assert_close(*outs)
