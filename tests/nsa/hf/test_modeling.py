"""`NSAForCausalLM` computes what `NSATransformer` computes, under Transformers' names and conventions."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from nsa.core.attention_config import INIT_STD
from nsa.core.branches import _GATE_STD
from nsa.errors import ConfigError
from nsa.hf import NSAForCausalLM, NSAModel
from nsa.model.transformer import NSATransformer
from tests.initial_weights import RAISED, require_raised
from tests.nsa.hf.tiny_model import padded, prompts, tiny_config, tiny_model

RENAMES = {
    "model.embed_tokens.": "embeddings.",
    "model.layers.": "blocks.",
    "model.norm.": "lm_head.norm.",
    "lm_head.": "lm_head.w_out.",
}
VARIANTS = [
    dict(),
    dict(kv="per_branch", phi="mlp", phi_pos_emb=True, qk_norm=True, qk_norm_eps=1e-4),
    dict(kv="shared", phi="linear", bias=True, out_bias=True, gate="sigmoid", gate_per="group", gate_temperature=2.0),
    dict(kv="shared", phi="weighted"),
    dict(kv="per_branch", phi="avg"),
    dict(tie_word_embeddings=True, rope_theta=10000.0, rope_scale=2.0, rms_norm_eps=1e-3),
]


def twin(model: NSAForCausalLM) -> NSATransformer:
    """Build the trainer's model with the same weights."""
    config = model.config
    transformer = NSATransformer(
        config.vocab_size,
        config.attention_config(),
        config.num_hidden_layers,
        ffn_dim=config.intermediate_size,
        tie_embeddings=config.tie_word_embeddings,
        norm_eps=config.rms_norm_eps,
    )
    state = {}
    for name, tensor in model.state_dict().items():
        old = next(prefix for prefix in RENAMES if name.startswith(prefix))
        state[RENAMES[old] + name.removeprefix(old)] = tensor
    transformer.load_state_dict(state)
    return transformer.eval()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_logits_are_those_of_the_trained_model_bit_for_bit(variant):
    model, ids = tiny_model(**variant), prompts(2, 90)
    with torch.no_grad():
        want = twin(model)(ids)
        assert torch.equal(model(ids, use_cache=False).logits, want)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_padded_rows_get_the_logits_they_get_alone(side, use_cache):
    model, lengths = tiny_model(), [60, 33, 5]
    ids, mask = padded(lengths, side)
    with torch.no_grad():
        got = model(ids, attention_mask=mask, use_cache=use_cache, output_hidden_states=True)
        for row in range(len(lengths)):
            alone = model(ids[row, mask[row] == 1][None], use_cache=False, output_hidden_states=True)
            torch.testing.assert_close(got.logits[row, mask[row] == 1], alone.logits[0], atol=1e-4, rtol=1e-4)
            for one, other in zip(got.hidden_states, alone.hidden_states, strict=True):
                torch.testing.assert_close(one[row, mask[row] == 1], other[0], atol=1e-4, rtol=1e-4)


def test_hidden_states_are_the_embedding_each_layer_and_the_norm_last():
    model, ids = tiny_model(), prompts(2, 30)
    output = model.model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert torch.equal(output.hidden_states[0], model.model.embed_tokens(ids))
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    assert torch.equal(output.hidden_states[1], model.model.layers[0](output.hidden_states[0]))
    assert model(ids).hidden_states is None


@pytest.mark.parametrize("logits_to_keep", [1, 7, torch.tensor([3, 20])], ids=str)
def test_logits_to_keep(logits_to_keep):
    model, ids = tiny_model(), prompts(2, 30)
    with torch.no_grad():
        want = model(ids).logits
        want = want[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else want[:, logits_to_keep]
        torch.testing.assert_close(model(ids, logits_to_keep=logits_to_keep).logits, want)


def test_a_tuple_on_request():
    model, ids = tiny_model(), prompts(1, 9)
    outputs = model(ids, return_dict=False, use_cache=False)
    assert isinstance(outputs, tuple)
    assert torch.equal(outputs[0], model(ids, use_cache=False).logits)


def test_own_position_ids_are_accepted_and_foreign_ones_refused():
    model, (ids, mask) = tiny_model(), padded([40, 13])
    own = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        want = model(ids, attention_mask=mask)
        got = model(ids, attention_mask=mask, position_ids=own)
        assert torch.equal(got.logits, want.logits)
        for foreign in (own + 1, torch.arange(40)[None], own.flip(1)):
            with pytest.raises(ConfigError, match="position_ids"):
                model(ids, attention_mask=mask, position_ids=foreign)
        new, longer = prompts(2, 2), torch.cat([mask, torch.ones(2, 2).long()], 1)
        next_ids = torch.tensor([[40, 41], [13, 14]])
        model(new, attention_mask=longer, position_ids=next_ids, past_key_values=want.past_key_values)
        with pytest.raises(ConfigError, match="position_ids"):
            model(new, position_ids=next_ids, past_key_values=got.past_key_values.__class__(config=model.config))


def test_unsupported_requests_are_refused():
    model, ids = tiny_model(), prompts(1, 8)
    with pytest.raises(ConfigError, match="attention weights"):
        model(ids, output_attentions=True)
    with pytest.raises(ConfigError, match="input_ids"):
        model(ids, inputs_embeds=model.model.embed_tokens(ids))
    with pytest.raises(ConfigError, match="padding mask"):
        model(ids, attention_mask=torch.ones(1, 1, 8, 8))
    for wanted in ("sdpa", "flash_attention_2"):
        with pytest.raises((ValueError, ImportError)):
            NSAForCausalLM._from_config(tiny_config(), attn_implementation=wanted)


def test_no_cache_is_made_while_gradients_are_computed():
    model, ids = tiny_model(), prompts(1, 30)
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values is None
    with torch.no_grad():
        cache = model(ids).past_key_values
    assert cache is not None
    assert not model(ids, past_key_values=cache).logits.requires_grad  # no gradient rather than a part of it
    with pytest.raises(ConfigError, match="gradients"):
        model(ids, labels=ids, past_key_values=cache)


def test_initial_weights_are_those_of_the_trainer():
    """`post_init` of Transformers initialises everything once more: it must use our scales."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=256, num_hidden_layers=8)
    config = tiny_config(**sizes, phi="linear", phi_pos_emb=True, bias=True, sliding_gate_init=0.0)
    model = NSAForCausalLM(config)
    names = {name: parameter.detach() for name, parameter in model.named_parameters()}
    ours = dict(twin(model).named_parameters())
    assert len(ours) == len(names)
    for name, weight in names.items():
        leaf = name.removesuffix(".weight")
        if name.endswith("norm.weight"):
            assert (weight == 1).all()
        elif name.endswith("bias"):
            assert (weight == 0).all()
        elif name.endswith("w_block"):
            assert torch.equal(weight, torch.eye(weight.shape[-1]).expand_as(weight) / config.l)
        else:
            want = INIT_STD
            if leaf.endswith("gates.proj"):
                want = _GATE_STD
            elif leaf.endswith(("attention.w_out", "feed_forward.w2")):
                want = INIT_STD / 4
            assert abs(float(weight.std()) / want - 1) < 5 / (2 * weight.numel()) ** 0.5, name
            assert abs(float(weight.mean())) / want < 5 / weight.numel() ** 0.5, name


@pytest.mark.parametrize("options", [dict(attention=["dense", "nsa"]), dict(phi="linear", phi_pos_emb=True)], ids=str)
def test_initializer_range_reaches_every_weight(options):
    models = []
    for change in ({}, {"initializer_range": RAISED}):
        torch.manual_seed(2)
        models.append(NSAForCausalLM(tiny_config(**options, **change)))
    require_raised(*models)


def test_the_sliding_gate_starts_where_the_config_says():
    model = NSAForCausalLM(tiny_config(attention=["nsa", "global"], sliding_gate_init=-3.0))
    three, two = (layer.attention.gates.proj.bias for layer in model.model.layers)
    assert (three.unflatten(0, (-1, 3)) == torch.tensor([0.0, 0.0, -3.0])).all()
    assert not two.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_saved_model_is_loaded_bit_for_bit(variant, dtype, tmp_path):
    model, ids = tiny_model(**variant).to(dtype), prompts(2, 50)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is NSAForCausalLM
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) and theirs[name].dtype == dtype for name in mine)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is NSAModel
    assert torch.equal(base.norm.weight, model.model.norm.weight)


def test_the_tied_head_is_stored_once(tmp_path):
    """`_tied_weights_keys` is private to Transformers: if it stops working, files grow and heads come apart."""
    from safetensors import safe_open

    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118


def test_missing_weights_are_initialised_and_the_others_kept(tmp_path):
    """A checkpoint without position embeddings of φ: only those are new."""
    model = tiny_model(phi="linear")
    model.save_pretrained(tmp_path)
    config = tiny_config(phi="linear", phi_pos_emb=True)
    torch.manual_seed(0)
    loaded, report = NSAForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    missing = set(report["missing_keys"])
    assert missing == {f"model.layers.{i}.attention.phi_{x}.pos_emb" for i in range(2) for x in "kv"}
    for name, tensor in loaded.state_dict().items():
        if name in missing:
            assert abs(float(tensor.std()) / INIT_STD - 1) < 0.3
        else:
            assert torch.equal(tensor, model.state_dict()[name]), name


def test_the_vocabulary_can_be_resized():
    model, ids = tiny_model(), prompts(1, 12)
    with torch.no_grad():
        want = model(ids).logits
        model.resize_token_embeddings(110)
        got = model(ids).logits
    assert got.shape[-1] == 110
    torch.testing.assert_close(got[..., :97], want)


def test_bf16_generates():
    model = tiny_model().to(torch.bfloat16)
    tokens = model.generate(prompts(2, 40), max_new_tokens=10, do_sample=False)
    assert tokens.shape == (2, 50)


def test_the_selector_loss_trains_and_leaves_the_loss_as_it_is():
    ids, results = prompts(2, 90), []
    for weight in (0.0, 1.0):
        model = tiny_model(kv="per_branch", phi="avg", selector_loss=weight).train()
        assert all(layer.attention.selector_weight == weight / len(model.model.layers) for layer in model.model.layers)
        loss = model(ids, labels=ids).loss
        loss.backward()
        results.append((loss.item(), model.model.layers[0].attention.w_k.weight.grad))
    assert results[0][0] == results[1][0]
    assert not torch.equal(results[0][1], results[1][1])
