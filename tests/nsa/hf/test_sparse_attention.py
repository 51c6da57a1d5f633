"""`use_sparse_attention`: equal to a model's own attention over the covered tokens, in every way of running it."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    CLIPVisionConfig,
    DataCollatorWithFlattening,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.hf.sparse_architectures import ARCHITECTURES, COVERED, GEOMETRY, compare_architecture, tiny_model
from nsa.hf.sparse_attention import use_sparse_attention
from tests.nsa.hf.tiny_model import prompts

REFUSED = {"gemma2": "soft-capped", "gpt_oss": "sinks", "bloom": "AttentionInterface", "t5": "cross attention"}
ROWS = prompts(2, 2 * COVERED).clamp(3, 63)
LONG = 2 * COVERED


def sparse_model(name="llama", geometry=GEOMETRY, layers=None):
    model = tiny_model(name)
    use_sparse_attention(model, geometry, layers)
    return model


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


def greedy(model, ids, n=12, **options):
    return model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False, **options)


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_equals_its_dense_attention_or_is_refused_by_name(name):
    result = compare_architecture(name)
    if name in REFUSED:
        assert REFUSED[name] in result.refusal
    else:
        assert result.is_equal, result


def test_at_least_twenty_architectures_are_equal():
    assert len(ARCHITECTURES) - len(REFUSED) >= 20


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(num_beams=3),
        dict(prefill_chunk_size=9),
        dict(prompt_lookup_num_tokens=4),
        dict(cache_implementation="static"),
        dict(use_cache=False),
    ],
    ids=str,
)
def test_generation_gives_the_dense_tokens(name, options):
    ids = ROWS[:1, : COVERED - 12]
    assert torch.equal(greedy(sparse_model(name), ids, **options), greedy(tiny_model(name), ids, **options))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_row_gets_the_tokens_that_it_gets_alone_beyond_the_covered_length(name):
    """Padded and alone, with a cache and without one, and in one pass: the same blocks are chosen."""
    model, ids = sparse_model(name), ROWS.clone()
    mask = torch.ones_like(ids)
    ids[1, :30], mask[1, :30] = 0, 0
    together = greedy(model, ids, attention_mask=mask)
    assert torch.equal(together[1:, 30:], greedy(model, ids[1:, 30:]))
    assert torch.equal(together, greedy(model, ids, attention_mask=mask, use_cache=False))
    assert torch.equal(together[:1], greedy(model, ids[:1], cache_implementation="static"))
    close(logits(model, together)[0, LONG - 1 : -1].argmax(-1), together[0, LONG:])


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_scores_with_padding_on_the_right_are_those_without_it(name):
    model, mask = sparse_model(name), torch.ones_like(ROWS)
    mask[1, -25:] = 0
    close(logits(model, ROWS, attention_mask=mask)[1, :-25], logits(model, ROWS[1:, :-25])[0])


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kwargs", [False, True], ids=["position ids", "cumulative lengths"])
def test_packed_documents_do_not_see_each_other(name, kwargs):
    """Lengths that are no multiple of a block, a document shorter than one, and later ones that choose blocks."""
    model, documents = sparse_model(name), ROWS.flatten()[:183].split([61, 2, 120])
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=kwargs, return_tensors="pt")
    batch = collate([{"input_ids": document.tolist()} for document in documents])
    batch.pop("labels")
    if kwargs:  # what the mask function is not told: with a cache Transformers looks at no position ids
        got = logits(model, **dict(batch, ids=batch.pop("input_ids")), use_cache=name == "llama")
    else:
        got = logits(model, batch.pop("input_ids"), use_cache=False, **batch)
    close(got[0], torch.cat([logits(model, document[None])[0] for document in documents]))


def test_blocks_are_those_of_a_converted_model(tmp_path):
    """`nsa convert` reaches the same attention by other code: projections, RoPE and cache of this package."""
    convert_folder = pytest.importorskip("nsa_train.convert.dense.convert_folder").convert_folder
    from nsa_train.convert.dense.conversion_plan import ConversionOptions

    g = GEOMETRY
    tiny_model("llama").save_pretrained(tmp_path / "dense")
    convert_folder(
        tmp_path / "dense", tmp_path / "nsa", ConversionOptions(l=g.l, d=g.d, l_sel=g.l_sel, n_sel=g.n_sel, w=g.w)
    )
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "nsa")
    close(logits(sparse_model("llama", layers=[0, 1]), ROWS), logits(converted, ROWS))


def test_gradients_are_those_of_dense_attention():
    gradients = []
    for model in (tiny_model("qwen3"), sparse_model("qwen3")):
        model.train()
        model(ROWS[:, :COVERED], labels=ROWS[:, :COVERED]).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    dense, sparse = gradients
    for name, gradient in sparse.items():
        close(gradient, dense[name])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_trains_it(tmp_path, checkpointing):
    model, rows = sparse_model("llama"), [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ROWS]
    before = copy.deepcopy(model.state_dict())
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, gradient_checkpointing=checkpointing, report_to=[], use_cpu=True
    )
    assert Trainer(model=model, args=arguments, train_dataset=rows).train().training_loss > 0
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_block_sizes_and_layers_are_saved_with_the_model(tmp_path):
    model = sparse_model("llama", Geometry(l=4, d=4, l_sel=4, n_sel=3, w=5), layers=[1])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="nsa")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, ROWS), logits(model, ROWS))
    assert not torch.allclose(logits(dense, ROWS), logits(model, ROWS), atol=1e-3)


def test_layers_that_are_not_listed_stay_dense():
    """The first layer's hidden states are dense if the first is not listed, and sparse if it is."""
    dense, first, second = tiny_model("llama"), sparse_model(layers=[0]), sparse_model(layers=[1])
    dense, first, second = (model(ROWS, output_hidden_states=True).hidden_states for model in (dense, first, second))
    close(second[1], dense[1])
    assert not torch.allclose(first[1], dense[1], atol=1e-3)
    assert not torch.allclose(second[2], dense[2], atol=1e-3)


def test_a_model_with_default_sizes_needs_no_call():
    model = tiny_model("llama")
    model.set_attn_implementation("nsa")
    close(logits(model, ROWS), logits(tiny_model("llama"), ROWS))


def test_of_a_model_with_images_the_text_part_becomes_sparse():
    text = tiny_model("llama").config
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=63))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15)
    ids = ROWS.clamp(max=62)
    dense = logits(model.eval(), ids)
    assert use_sparse_attention(model, GEOMETRY) == [0, 1]
    sparse = logits(model, ids)
    close(sparse[:, :COVERED], dense[:, :COVERED])
    assert not torch.allclose(sparse, dense, atol=1e-3)
    assert model.config.vision_config._attn_implementation != "nsa"


class FirstBlocks:
    """Chooses the first blocks of every document."""

    def blocks(self, merged, run, q_BSGRK, k_BTGK, far):
        n_sel = merged.shape.geometry.n_sel
        return torch.arange(n_sel, dtype=torch.int32).expand(*q_BSGRK.shape[:3], n_sel).contiguous()


def test_a_layer_takes_the_policy_of_its_attention_module():
    model = sparse_model("llama")
    for layer in model.model.layers:
        layer.self_attn.selection_policy = FirstBlocks()
    ids = ROWS.clone()
    want = logits(model, ids)
    assert not torch.allclose(want, logits(sparse_model("llama"), ids), atol=1e-3)
    far = GEOMETRY.n_sel * GEOMETRY.l_sel
    ids[:, far : far + 3] = (ids[:, far : far + 3] + 7) % 50 + 3  # read by no query that has left it behind
    one = sparse_model("llama", layers=[0, 1])
    one.model.layers = one.model.layers[:1]
    one.model.layers[0].self_attn.selection_policy = FirstBlocks()
    close(logits(one, ids)[:, -1], logits(one, ROWS)[:, -1])


def call(model, **options):
    return lambda: logits(model, ROWS[:, :20], **options)


def with_hole():
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, 5:7] = 0
    return mask


def trained_with_dropout():
    model = sparse_model("llama")
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return model.train()(ROWS)


def loaded_with_soft_cap():
    """Nothing was checked before the first pass."""
    model = tiny_model("gemma2")
    model.set_attn_implementation("nsa")
    return model(ROWS)


def bidirectional():
    model = tiny_model("llama")
    model.config.is_causal = False
    model.set_attn_implementation("nsa")
    return model(ROWS)


def encoder():
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    return use_sparse_attention(BertLMHeadModel(config))


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (call(sparse_model(), attention_mask=with_hole()), "padding between"),
        (call(sparse_model(), attention_mask=torch.ones(2, 1, 20, 20, dtype=torch.bool)), "a mask of"),
        (call(sparse_model(), attention_mask=torch.zeros(2, 1, 20, 20)), "a mask of"),
        (trained_with_dropout, "dropout"),
        (loaded_with_soft_cap, "soft-capped"),
        (bidirectional, "bidirectional"),
        (encoder, "bidirectional"),
        (lambda: sparse_model("gemma3_text", layers=[0]), r"names \[0\]"),
        (lambda: sparse_model("llama", layers=[2]), r"names \[2\]"),
        (lambda: use_sparse_attention(AutoModelForCausalLM.from_config(all_sliding())), "no layer of full"),
    ],
)
def test_what_the_branches_cannot_compute_is_refused(ask, named):
    with pytest.raises(ConfigError, match=named):
        ask()


def all_sliding():
    config = tiny_model("mistral").config
    config.sliding_window = 8
    return config
