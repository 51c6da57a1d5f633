"""`generate` of Transformers: whatever the strategy, padding and cache, the tokens are those without a cache."""

import pytest
import torch

from tests.hf.tiny_model import padded, prompts, tiny_model

VARIANTS = [
    dict(),
    dict(phi="mlp", phi_pos_emb=True),
    dict(phi="linear", rope_compressed="after", qk_norm=True, bias=True, out_bias=True),
    dict(kv="shared", v_head_dim=16),
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


@pytest.mark.parametrize("variant", VARIANTS[:3], ids=str)
def test_each_row_of_a_padded_batch_gets_the_tokens_it_gets_alone(variant):
    model, (ids, mask) = tiny_model(**variant), padded(LENGTHS)
    together = generated(model, ids, attention_mask=mask)
    for row, n in enumerate(LENGTHS):
        assert torch.equal(together[row], generated(model, prompts(1, n, seed=row))[0])
