"""`generate` of Transformers: whatever the strategy, padding and cache, the tokens are those without a cache."""

import copy
import inspect

import pytest
import torch
from transformers import GenerationMixin, pipeline

from nsa.errors import ConfigError
from nsa.hf import NSAForCausalLM
from tests.covering_cases import each_value
from tests.nsa.hf.tiny_model import byte_tokenizer, padded, prompts, tiny_model

VARIANTS = [
    dict(),
    dict(kv="per_branch", phi="mlp", phi_pos_emb=True),
    dict(phi="linear", rope_compressed="after", qk_norm=True, bias=True, out_bias=True),
    dict(kv="per_branch", phi="avg", v_head_dim=16),
    dict(kv="shared_keys", v_head_dim=16),
    dict(tie_word_embeddings=True, gate="sigmoid", rope_scaling={"rope_type": "linear", "factor": 4.0}),
]
LENGTHS = [100, 37, 5, 64]


def generated(model, ids, new=40, **options):
    return model.generate(ids, max_new_tokens=new, do_sample=False, **options)[:, ids.shape[1] :]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_greedy_tokens_and_logits_are_those_without_a_cache(variant):
    model, ids = tiny_model(**variant), prompts(3, 70)
    ask = dict(max_new_tokens=40, do_sample=False, return_dict_in_generate=True, output_logits=True)
    got, want = model.generate(ids, **ask), model.generate(ids, use_cache=False, **ask)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), atol=1e-3, rtol=1e-4)
    assert len(set(got.sequences[:, 70:].flatten().tolist())) > 10  # one token repeated would prove little


@pytest.mark.parametrize(
    ("options", "variant"),
    each_value(
        [{}, dict(prefill_chunk_size=17), dict(prefill_chunk_size=1), dict(cache_implementation="static")], VARIANTS[:3]
    ),
    ids=str,
)
def test_each_row_of_a_padded_batch_gets_the_tokens_it_gets_alone(variant, options):
    model, (ids, mask) = tiny_model(**variant), padded(LENGTHS)
    together = generated(model, ids, 12, attention_mask=mask, **options)
    for row, n in enumerate(LENGTHS):
        assert torch.equal(together[row], generated(model, prompts(1, n, seed=row), 12)[0])


@pytest.mark.parametrize("use_cache", [True, False])
def test_prompts_that_are_padded_on_the_right_are_refused(use_cache):
    """Transformers warns, and draws the next token after the padding."""
    ids, mask = padded(LENGTHS, side="right")
    with pytest.raises(ConfigError, match="left"):
        generated(tiny_model(), ids, attention_mask=mask, use_cache=use_cache)


@pytest.mark.parametrize(
    "options",
    [
        dict(num_beams=3),
        dict(num_beams=4, num_return_sequences=3, length_penalty=0.5, early_stopping=True, eos_token_id=7),
        dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.9),
        dict(do_sample=True, num_return_sequences=3),
        dict(do_sample=True, num_beams=2),
        dict(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=5),
    ],
    ids=str,
)
def test_strategies_give_the_sequences_they_give_without_a_cache(options):
    model, (ids, mask) = tiny_model(**VARIANTS[1]), padded(LENGTHS)
    ask = dict(attention_mask=mask, max_new_tokens=20) | options
    torch.manual_seed(3)
    got = model.generate(ids, **ask)
    torch.manual_seed(3)
    assert torch.equal(got, model.generate(ids, use_cache=False, **ask))


def near(model, noise):
    """A model that often agrees with another, but not always."""
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return assistant


@pytest.mark.parametrize(("noise", "length"), [(0.0, 90), (0.02, 3), (0.02, 90), (0.3, 90)])
def test_assisted_generation_gives_the_greedy_tokens(noise, length):
    model, ids = tiny_model(), prompts(1, length)
    assert torch.equal(generated(model, ids, assistant_model=near(model, noise)), generated(model, ids))


@pytest.mark.parametrize(("variant", "tokens"), each_value(VARIANTS[:4], [3, 40]), ids=str)
def test_prompt_lookup_gives_the_greedy_tokens(variant, tokens):
    model, ids = tiny_model(**variant), prompts(1, 30).repeat(1, 3)
    got = generated(model, ids, 60, prompt_lookup_num_tokens=tokens)
    assert torch.equal(got, generated(model, ids, 60))


@pytest.mark.parametrize("exit_after", [1, 2])
def test_early_exit_gives_the_greedy_tokens_and_leaves_the_config(exit_after):
    """The first layers draft: Transformers sets num_hidden_layers while they do. It takes a generated token of the
    padding token's id for padding then, so this model has none."""
    model, ids = tiny_model(num_hidden_layers=3, pad_token_id=None), prompts(1, 50)
    assert torch.equal(generated(model, ids, assistant_early_exit=exit_after), generated(model, ids))
    assert model.config.num_hidden_layers == 3


def test_prompt_lookup_with_left_padding():
    model, (ids, mask) = tiny_model(), padded([70, 40])
    got = generated(model, ids[1:], attention_mask=mask[1:], prompt_lookup_num_tokens=6)
    assert torch.equal(got, generated(model, ids[1:, 30:]))


def test_a_returned_cache_can_be_continued():
    model, ids = tiny_model(), prompts(1, 50)
    first = model.generate(ids, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    more = torch.cat([first.sequences, prompts(1, 33, seed=5)], 1)
    cache = copy.deepcopy(first.past_key_values)
    want = generated(model, more)
    assert torch.equal(generated(model, more, past_key_values=first.past_key_values), want)
    assert torch.equal(generated(model, more, past_key_values=cache), want)


def test_tokens_that_the_cache_has_already_are_not_appended_again():
    """Assisted generation of Transformers passes the whole prompt again with a cache that has its beginning."""
    model, ids = tiny_model(), prompts(1, 50)
    first = model.generate(ids, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    more = torch.cat([first.sequences, prompts(1, 33, seed=5)], 1)
    with pytest.raises(ConfigError, match="position_ids"):
        generated(model, more, past_key_values=first.past_key_values, prompt_lookup_num_tokens=4)


def test_generation_from_embeddings():
    model, ids = tiny_model(), prompts(2, 40)
    got = model.generate(inputs_embeds=model.model.embed_tokens(ids), max_new_tokens=20, do_sample=False)
    assert torch.equal(got, generated(model, ids, 20))


@pytest.mark.parametrize("wanted", ["offloaded", "offloaded_static"])
def test_an_offloaded_cache_is_refused(wanted):
    """Transformers would accept it and move nothing."""
    with pytest.raises(ConfigError, match="offloaded"):
        generated(tiny_model(), prompts(1, 5), cache_implementation=wanted)


def test_continuous_batching_is_refused():
    model = tiny_model()
    with pytest.raises(ConfigError, match="vLLM"):
        model.generate_batch(inputs=[[1, 2, 3]])
    with pytest.raises(ConfigError, match="vLLM"):
        model.init_continuous_batching()


def test_generating_while_training_with_checkpointing_uses_the_cache_rightly():
    model, ids = tiny_model(), prompts(2, 40)
    want = generated(model, ids)
    model.train()
    model.gradient_checkpointing_enable()
    assert torch.equal(generated(model, ids), want)


def test_the_text_generation_pipeline(tmp_path):
    model = tiny_model(vocab_size=257, eos_token_id=256, pad_token_id=256)
    tokenizer = byte_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = ["The quick brown fox jumps over the lazy dog", "ab", "déjà vu"]
    talk = pipeline("text-generation", model=str(tmp_path), batch_size=3)
    talk.tokenizer.padding_side = "left"
    answers = talk(texts, max_new_tokens=8, do_sample=False, return_tensors=True)
    for text, (answer,) in zip(texts, answers, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        want = model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()
        assert [t for t in answer["generated_token_ids"] if t != 256] == [t for t in want if t != 256]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (
            "_prepare_cache_for_generation",
            ["self", "generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length"],
        ),
        ("init_continuous_batching", None),
        ("generate_batch", None),
    ],
)
def test_methods_of_transformers_that_are_overridden_are_still_called_so(method, arguments):
    """A renamed method would leave ours unused, silently."""
    theirs = inspect.signature(getattr(GenerationMixin, method))
    assert arguments is None or list(theirs.parameters) == arguments
    assert method in vars(NSAForCausalLM)


def test_the_cache_is_allocated_for_the_whole_request_at_once():
    model, ids = tiny_model(), prompts(2, 40)
    generation = model.generate(ids, max_new_tokens=30, do_sample=False, return_dict_in_generate=True)
    assert generation.past_key_values.layers[0]._cache.max_len == 69  # the last token is not appended
