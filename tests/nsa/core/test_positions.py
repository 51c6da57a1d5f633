"""Padding masks, position ids and external cos/sin: each real token gives what its row alone gives."""

import pytest
import torch

from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError
from nsa.model.transformer import NSATransformer
from tests.shapes import attention_args

LENGTHS = [50, 7, 1, 33]
WIDTH = max(LENGTHS)
OPTIONS = [dict(), dict(phi="mlp", phi_pos_emb=True), dict(kv="shared", qk_norm=True, bias=True)]


def make(**changes) -> NSAAttention:
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny", **changes)).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def padded(rows: list[torch.Tensor], side: str, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in one tensor, padding that would be seen if it were read, and the mask."""
    x = torch.full((len(rows), width, *rows[0].shape[1:]), 1e3, dtype=rows[0].dtype)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for b, row in enumerate(rows):
        at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        x[b, at], mask[b, at] = row, 1
    return x, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_a_padded_batch_equals_each_row_alone(side, changes):
    module = make(**changes)
    rows = [torch.randn(n, 24, dtype=torch.float64) for n in LENGTHS]
    x, mask = padded(rows, side)
    x.requires_grad_()
    out = module(x, attention_mask=mask)
    alone = [module(row[None])[0] for row in rows]
    for b, want in enumerate(alone):
        torch.testing.assert_close(out[b][mask[b] == 1], want, atol=1e-12, rtol=1e-10)
        assert not out[b][mask[b] == 0].any()
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    assert not gradient[mask == 0].any()
    assert gradient[mask == 1].any(-1).all()
    assert torch.equal(module(x, attention_mask=mask.bool()), out)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_a_padded_prompt_and_decode_with_a_cache_equal_each_row_alone(side, changes):
    """The mask covers earlier columns too, as Transformers passes it; prefill comes in chunks."""
    module = make(**changes)
    rows = [torch.randn(n + 20, 24, dtype=torch.float64) for n in LENGTHS]
    x, mask = padded([row[:-20] for row in rows], side)
    cache, parts = module.new_cache(len(rows), WIDTH + 20), []
    for begin, end in ((0, 30), (30, 31), (31, WIDTH)):
        parts.append(module(x[:, begin:end], cache=cache, attention_mask=mask[:, :end]))
    prompt = torch.cat(parts, 1)
    assert cache.length_B.tolist() == LENGTHS
    steps = []
    for t in range(20):
        mask = torch.cat((mask, torch.ones(len(rows), 1, dtype=torch.int64)), 1)
        new = torch.stack([row[len(row) - 20 + t] for row in rows])[:, None]
        steps.append(module(new, cache=cache, attention_mask=mask))
    decoded = torch.cat(steps, 1)
    with torch.no_grad():
        for b, row in enumerate(rows):
            got = torch.cat((prompt[b][mask[b, :WIDTH] == 1], decoded[b]))
            torch.testing.assert_close(got, module(row[None])[0], atol=1e-10, rtol=1e-8)


def test_a_masked_token_inside_a_row_does_not_exist():
    module = make()
    x = torch.randn(1, 40, 24, dtype=torch.float64)
    mask = torch.ones(1, 40, dtype=torch.int64)
    mask[0, 5:9] = mask[0, 20] = 0
    torch.testing.assert_close(module(x, attention_mask=mask)[mask == 1], module(x[mask == 1][None])[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_model_takes_a_padding_mask(side):
    torch.manual_seed(0)
    model = NSATransformer(50, n_layers=2, **attention_args("tiny", kv="shared", qk_norm=True)).double().eval()
    rows = [torch.randint(50, (n,)) for n in LENGTHS]
    tokens, mask = padded(rows, side)
    tokens = tokens.where(mask == 1, 0)
    with torch.no_grad():
        logits = model(tokens, attention_mask=mask)
        cache = model.new_cache(len(rows), WIDTH + 1)
        cached = model(tokens, cache=cache, attention_mask=mask)
        following = model(tokens[:, :1], cache=cache)
        for b, row in enumerate(rows):
            want = model(torch.cat((row, tokens[b, :1]))[None])[0]
            torch.testing.assert_close(logits[b][mask[b] == 1], want[:-1], atol=1e-10, rtol=1e-8)
            torch.testing.assert_close(cached[b][mask[b] == 1], want[:-1], atol=1e-10, rtol=1e-8)
            torch.testing.assert_close(following[b, 0], want[-1], atol=1e-10, rtol=1e-8)
    labels = tokens.masked_fill(mask == 0, -100)
    losses = [model.loss(row[None], row[None]) * len(row) for row in rows]
    torch.testing.assert_close(model.loss(tokens, labels, attention_mask=mask) * sum(LENGTHS), sum(losses))


def test_a_padding_mask_compiles():
    module = make()
    x, mask = padded([torch.randn(n, 24, dtype=torch.float64) for n in LENGTHS], "left")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, attention_mask=mask), module(x, attention_mask=mask))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(4, 1, WIDTH, WIDTH, dtype=torch.bool),
        torch.ones(WIDTH, WIDTH, dtype=torch.bool),
        torch.zeros(4, WIDTH),
        torch.ones(4, WIDTH + 1, dtype=torch.int64),
        torch.full((4, WIDTH), 2),
        torch.ones(3, WIDTH, dtype=torch.int64),
    ],
    ids=["4-d", "square", "additive", "longer", "values", "rows"],
)
def test_other_masks_are_refused(mask):
    with pytest.raises(ConfigError, match="attention_mask"):
        make()(torch.randn(4, WIDTH, 24, dtype=torch.float64), attention_mask=mask)


def test_a_mask_excludes_what_already_marks_padding():
    module, x = make(), torch.randn(2, 9, 24, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, 0] = 0
    for options in (
        dict(cu_doc_lens=[0, 18]),
        dict(where=module.locate(x)),
        dict(cache=module.new_cache(2, 9), new_lens_B=torch.tensor([8, 9])),
    ):
        with pytest.raises(ConfigError, match="attention_mask"):
            module(x, attention_mask=mask, **options)


# position ids and cos/sin


@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_position_ids_that_count_change_nothing(changes):
    module, x = make(**changes), torch.randn(2, 60, 24, dtype=torch.float64)
    pos = torch.arange(60)
    want = module(x)
    for ids in (pos, pos[None], pos.expand(2, -1)):
        assert torch.equal(module(x, position_ids=ids), want)
    cu = [0, 25, 120]
    packed = torch.cat([torch.arange(25), torch.arange(95)]).view(2, 60)
    assert torch.equal(module(x, cu_doc_lens=cu, position_ids=packed), module(x, cu_doc_lens=cu))
    cache = module.new_cache(2, 60)
    with torch.no_grad():
        parts = [module(x[:, a:b], cache=cache, position_ids=pos[a:b]) for a, b in ((0, 40), (40, 41), (41, 60))]
        torch.testing.assert_close(torch.cat(parts, 1), want, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_outputs_depend_on_distances_between_position_ids_alone(changes):
    module, x = make(**changes), torch.randn(2, 60, 24, dtype=torch.float64)
    pos = torch.arange(60)
    torch.testing.assert_close(module(x, position_ids=pos + 1000), module(x), atol=1e-8, rtol=1e-6)
    stretched = make(**changes, rope_scale=0.5)
    torch.testing.assert_close(module(x, position_ids=2 * pos), stretched(x), atol=1e-10, rtol=1e-8)
    assert not torch.allclose(module(x, position_ids=2 * pos), module(x), atol=1e-3)


def test_left_padding_with_the_position_ids_of_transformers():
    module = make(phi="mlp")
    x, mask = padded([torch.randn(n, 24, dtype=torch.float64) for n in LENGTHS], "left")
    ids = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    assert torch.equal(module(x, attention_mask=mask, position_ids=ids), module(x, attention_mask=mask))
    cache = module.new_cache(4, WIDTH)
    with torch.no_grad():
        got = module(x, cache=cache, attention_mask=mask, position_ids=ids)
        torch.testing.assert_close(got, module(x, attention_mask=mask), atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_external_cos_and_sin_take_the_place_of_the_modules_own(changes):
    module, x = make(**changes), torch.randn(2, 60, 24, dtype=torch.float64)
    other = make(**changes, rope_base=100.0)
    tables = other.rotary.tables(torch.arange(60)[None])
    doubled = [torch.cat((table, table), -1) for table in tables]
    want = other(x)
    assert not torch.allclose(module(x), want, atol=1e-3)
    for embeddings in (tables, doubled, [table[0] for table in doubled], [table.expand(2, -1, -1) for table in tables]):
        torch.testing.assert_close(module(x, position_embeddings=embeddings), want, atol=1e-12, rtol=1e-10)


def test_positions_that_a_cache_cannot_follow_are_refused():
    before, after = make(), make(phi="linear")
    x, pos = torch.randn(1, 20, 24, dtype=torch.float64), torch.arange(20)
    tables = before.rotary.tables(pos[None])
    with pytest.raises(ConfigError, match="position_ids"):
        after(x, cache=after.new_cache(1, 20), position_ids=pos + 1)
    with pytest.raises(ConfigError, match="position_embeddings"):
        after(x, cache=after.new_cache(1, 20), position_embeddings=tables)
    with torch.no_grad():
        for options in (dict(position_ids=pos + 7), dict(position_embeddings=tables)):
            got = before(x, cache=before.new_cache(1, 20), **options)
            torch.testing.assert_close(got, before(x, **options), atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize(
    "options",
    [
        dict(position_ids=torch.arange(19)),
        dict(position_ids=torch.zeros(3, 20, dtype=torch.int64)),
        dict(position_ids=torch.arange(20.0)),
        dict(position_embeddings=[torch.ones(1, 19, 4)] * 2),
        dict(position_embeddings=[torch.ones(1, 20, 5)] * 2),
        dict(position_embeddings=[torch.ones(3, 20, 4)] * 2),
    ],
)
def test_positions_of_other_tokens_are_refused(options):
    with pytest.raises(ConfigError, match="position_"):
        make()(torch.randn(2, 20, 24, dtype=torch.float64), **options)
