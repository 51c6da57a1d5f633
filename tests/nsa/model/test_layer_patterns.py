"""Models of several kinds of layers: the pattern repeats, what kinds share starts equal, and all of them learn."""

import pytest
import torch

from nsa.errors import ConfigError
from nsa.model.transformer import NSATransformer
from nsa_train.config.schema import RunConfig
from nsa_train.run_model import build_model

SIZES = dict(n_heads=4, n_kv_groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=16, n_sel=4, w=24)
PATTERNS = [
    ("dense",),
    ("window",),
    ("global",),
    ("merged",),
    ("window", "global"),
    ("dense", "nsa", "nsa"),
    ("nsa", "dense"),
]


def transformer(*layers, n_layers=3, seed=3, **changes):
    torch.manual_seed(seed)
    return NSATransformer(64, 32, n_layers, layers=layers or ("nsa",), **{**SIZES, **changes})


def tokens(batch=2, length=96):
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(5))


def test_a_pattern_repeats_over_the_layers():
    kinds = [block.attention.kind for block in transformer("dense", "nsa", n_layers=5).blocks]
    assert kinds == ["dense", "nsa", "dense", "nsa", "dense"]


@pytest.mark.parametrize(("layers", "word"), [(("dense",) * 4, "n_layers"), (("densest",), "densest"), ((), "empty")])
def test_an_invalid_pattern_is_refused(layers, word):
    with pytest.raises(ConfigError, match=word):
        NSATransformer(64, 32, 3, layers=layers, **SIZES)


@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
@pytest.mark.parametrize(
    "options", [{}, dict(qk_norm=True, bias=True, phi="mlp"), dict(kv="shared", init_std=0.08)], ids=str
)
def test_parameters_that_kinds_share_start_equal(pattern, options):
    nsa, other = dict(transformer(**options).named_parameters()), transformer(*pattern, **options)
    shared = ("w_q", "w_out", "q_norm", "k_norm", "feed_forward", "attention_norm", "embeddings", "lm_head")
    own = dict(other.named_parameters())
    compared = [name for name in own if any(part in name for part in shared)]
    assert len(compared) >= 3 * 7 + 3
    for name in compared:
        assert torch.equal(own[name], nsa[name]), name
    state = torch.get_rng_state()
    transformer(**options)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
def test_packed_documents_and_caches_through_all_layers(pattern):
    model, ids = transformer(*pattern).double(), tokens(1)
    whole = model(ids)
    torch.testing.assert_close(model(ids, cu_doc_lens=[0, 40, 96])[:, 40:], model(ids[:, 40:]), atol=1e-9, rtol=1e-9)
    cache = model.new_cache(1, 96)
    parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 50), (50, 51), (51, 52), (52, 96))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-9, rtol=1e-9)


def test_a_crop_that_one_layer_refuses_changes_no_layer():
    model = transformer("dense", "window")
    cache = model.new_cache(1, 96)
    model(tokens(1)[:, :60], cache=cache)
    with pytest.raises(ConfigError, match="rewind"):
        cache.crop(30)
    assert [layer.length_B.tolist() for layer in cache.layers] == [[60]] * 3


@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
def test_it_learns(pattern):
    model = transformer(*pattern)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = tokens(2)
    losses = []
    for _ in range(20):
        loss = model.loss(ids, ids.roll(-1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_the_selector_loss_is_averaged_over_the_layers_that_select():
    apart = dict(kv="per_branch", phi="avg")
    model = transformer("dense", "nsa", "global", selector_loss=1.0, selector_loss_share=1.0, **apart)
    assert [block.attention.selector_weight for block in list(model.blocks)[1:]] == [0.5, 0.5]
    without = transformer("dense", "nsa", "global", **apart)
    ids = tokens(2)
    for each in (model, without):
        each.loss(ids, ids).backward()
    changed = {
        name
        for (name, mine), theirs in zip(model.named_parameters(), without.parameters(), strict=True)
        if not torch.equal(mine.grad, theirs.grad)
    }
    assert changed == {"blocks.1.attention.w_k.weight", "blocks.2.attention.w_k.weight"}


def test_a_model_has_the_layers_that_the_settings_name():
    config = RunConfig.model_validate(
        {"model": {"dim": 32, "n_layers": 3, "attention": ["window", "global"]}, "nsa": {"preset": "paper"}}
    )
    with torch.device("meta"):
        model = build_model(config, 64)
    assert [block.attention.kind for block in model.blocks] == ["window", "global", "window"]
    layer = model.blocks[1].attention
    assert (layer.phi_k.phi, layer.phi_k.pos_emb is None, layer.gates.kind) == ("mlp", False, "sigmoid")


@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
def test_flops_are_those_of_the_layers(pattern):
    model = transformer(*pattern, n_layers=len(pattern))
    alone = [transformer(kind, n_layers=1).flops_per_token(96) for kind in pattern]
    head = 6.0 * 64 * 32
    assert model.flops_per_token(96) == pytest.approx(sum(alone) - (len(pattern) - 1) * head)
