"""The head's chunked loss against the engine's own, which holds all logits."""

import pytest
import torch

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.lm_head import LMHead, LMHeadConfig

from nsa.model import loss as loss_module
from nsa.model.loss import ScoreSums
from nsa_train.train.engine.transformer import SCORE_SUMS, ChunkedHead

ROWS, TOKENS, DIM, VOCAB = 2, 33, 16, 57


def heads(bias=False) -> tuple[LMHead, LMHead]:
    """Ours and the engine's, with the same weights."""
    torch.manual_seed(0)
    norm = LayerNormConfig(name=LayerNormType.rms, bias=False)
    pair = [LMHeadConfig(layer_norm=norm, bias=bias).build(d_model=DIM, vocab_size=VOCAB) for _ in range(2)]
    pair[0].load_state_dict(pair[1].state_dict())
    pair[0].__class__ = ChunkedHead
    return pair[0], pair[1]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    labels = torch.randint(VOCAB, (ROWS, TOKENS), generator=dice)
    labels[:, ::4] = -100
    return torch.randn(ROWS, TOKENS, DIM, generator=dice), labels


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("reduction", "divisor"), [("sum", 50), ("mean", 1)])
def test_losses_and_gradients_are_those_of_the_engine(monkeypatch, reduction, divisor, autocast):
    monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", 7 * VOCAB)
    x, labels = inputs()
    results = []
    for head in heads():
        hidden = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = head(hidden, labels=labels, return_logits=False, loss_reduction=reduction)
        loss, ce_loss = output.loss / divisor, output.ce_loss / divisor
        loss.backward()
        results.append([loss, ce_loss, hidden.grad, *(p.grad for p in head.parameters())])
        assert output.logits is None
        assert output.loss.requires_grad
        assert not output.ce_loss.requires_grad
    tolerance = dict(rtol=2e-2, atol=1e-3) if autocast else dict(rtol=1e-5, atol=1e-6)
    for ours, engines in zip(*results, strict=True):
        assert ours.dtype == engines.dtype
        torch.testing.assert_close(ours, engines, **tolerance)


@pytest.mark.parametrize(
    "options",
    [
        dict(return_logits=True),
        dict(return_logits=None),
        dict(loss_reduction="none", return_logits=False),
        dict(z_loss_multiplier=1e-2, return_logits=False),
        dict(ignore_index=3, return_logits=False),
        dict(logits_to_keep=5, return_logits=False),
        dict(loss_reduction="sum", loss_div_factor=50, return_logits=False),
    ],
    ids=str,
)
def test_what_needs_all_logits_is_the_engines_own(options):
    x, labels = inputs()
    labels[labels == -100] = 3
    ours, engines = (head(x, labels=labels, **options) for head in heads())
    for mine, theirs in zip(ours, engines, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)
    ours, engines = (head(x) for head in heads())
    assert torch.equal(ours, engines)


def test_a_head_with_a_bias_is_the_engines_own():
    x, labels = inputs()
    ours, engines = (head(x, labels=labels, return_logits=False).loss for head in heads(bias=True))
    assert torch.equal(ours, engines)


def test_sums_of_scores_are_those_of_all_logits():
    x, labels = inputs()
    ours, engines = heads()
    with torch.no_grad():
        logits = engines(x)
        labels[0] = logits[0].argmax(-1)
        sums = ours(x, labels=labels, loss_reduction=SCORE_SUMS, return_logits=False)
        wanted = engines(x, labels=labels, loss_reduction="sum").loss
    assert isinstance(sums, ScoreSums)
    torch.testing.assert_close(sums.nats.float(), wanted)
    assert sums.tokens == (labels != -100).sum()
    assert sums.hits == (logits.argmax(-1) == labels).sum() >= TOKENS
