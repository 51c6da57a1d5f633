"""vLLM generates the same tokens as Transformers: batches, chunks of prompts, prefixes, preemption, speculation."""

import pytest
import torch

from tests.nsa.vllm.engines import (
    BLOCK,
    GEOMETRY,
    counter,
    engine,
    export_small_model,
    random_prompts,
    transformers_tokens,
    vllm_tokens,
)

LENGTHS = (1, 7, 33, 64, 100, 300, 1200)
"""Shorter than a compressed block, around blocks, and many times what a token reads."""
N_NEW = 40


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="base"),
        pytest.param({"kv": "shared", "phi": "avg", "tie_word_embeddings": True}, id="shared-means-tied"),
        pytest.param(
            {"kv": "per_branch", "phi": "mlp", "phi_pos_emb": True, "gate": "sigmoid", "bias": True, "out_bias": True},
            id="paper-bias",
        ),
        pytest.param(
            {
                **{"post_norm": True, "ffn_bias": True, "qk_norm": True, "qk_norm_per": "layer", "rotary_dim": 8},
                **{"rope_layers": ["scaled", "none"], "rope_angles": "fp32"},
            },
            id="families",
        ),
        pytest.param(
            {"kv": "shared", "phi": "linear", "gate_per": "group", "qk_norm": True},
            id="shared-linear",
            marks=pytest.mark.nightly,
        ),
        pytest.param({"kv": "shared", "phi": "weighted"}, id="shared-weighted", marks=pytest.mark.nightly),
        pytest.param({"kv": "per_branch", "phi": "avg"}, id="per-branch-means", marks=pytest.mark.nightly),
    ],
)
def test_same_tokens_in_batches_chunks_and_after_prefix_hits(tmp_path, options):
    model = export_small_model(tmp_path, **options)
    prompts = random_prompts(LENGTHS)
    expected = transformers_tokens(model, prompts, N_NEW)
    with engine(tmp_path, max_num_batched_tokens=64) as llm:
        first, cached = vllm_tokens(llm, prompts, N_NEW)
        assert first == expected
        assert cached == [0] * len(prompts)
        again, cached = vllm_tokens(llm, prompts, N_NEW)
    assert again == expected
    # All full blocks but the one with the last token, whose logits are needed.
    assert cached == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]


def test_requests_that_share_a_prefix_do_not_change_each_other(tmp_path):
    """A compressed block may begin in one page and end in the next: what a shared page holds must not depend on it."""
    model = export_small_model(tmp_path)
    common, *endings = random_prompts((10 * BLOCK, 5, 90, 6, 3 * BLOCK, 1))
    prompts = [common + ending for ending in endings]
    expected = transformers_tokens(model, prompts, N_NEW)
    with engine(tmp_path) as llm:
        one_by_one = [vllm_tokens(llm, [prompt], N_NEW) for prompt in prompts]
        assert [tokens[0] for tokens, _ in one_by_one] == expected
        assert [cached[0] for _, cached in one_by_one[1:]] == [10 * BLOCK] * (len(prompts) - 1)
        assert vllm_tokens(llm, prompts, N_NEW)[0] == expected


def test_the_papers_geometry_at_four_thousand_tokens(tmp_path):
    geometry = dict(l=32, d=16, l_sel=64, n_sel=8, w=512, max_position_embeddings=4352)
    model = export_small_model(tmp_path, **geometry)
    prompts = random_prompts((4100, 3000, 31, 700))
    with engine(tmp_path, block_size=64, max_model_len=4352, max_num_batched_tokens=512) as llm:
        assert vllm_tokens(llm, prompts, 24)[0] == transformers_tokens(model, prompts, 24)


def test_preempted_requests_are_computed_again(tmp_path):
    model = export_small_model(tmp_path)
    prompts = random_prompts((300, 310, 290, 305))
    few = dict(num_gpu_blocks_override=44, max_model_len=512, max_num_batched_tokens=64, enable_prefix_caching=False)
    with engine(tmp_path, **few) as llm:
        before = counter(llm, "num_preemptions")
        tokens, _ = vllm_tokens(llm, prompts, 120)
        preempted = counter(llm, "num_preemptions") - before
    assert preempted > 0
    assert tokens == transformers_tokens(model, prompts, 120)


@pytest.mark.nightly  # numba compiles for most of a minute
def test_rejected_drafts_leave_nothing_behind(tmp_path):
    model, few = export_small_model(tmp_path), 8
    with torch.no_grad():  # few tokens are ever the most likely, so that drafts are right now and then
        weight = model.lm_head.weight
        number = torch.arange(len(weight))
        weight.copy_(weight[number % few] * (1 - number / (2 * len(weight)))[:, None])
    model.save_pretrained(tmp_path)
    prompts = [[token % few for token in prompt] * 3 for prompt in random_prompts((30, 101, 222))]
    drafts = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)
    with engine(tmp_path, speculative_config=drafts, async_scheduling=False) as llm:
        tokens, _ = vllm_tokens(llm, prompts, 100)
        proposed, accepted = (
            counter(llm, "spec_decode_num_draft_tokens"),
            counter(llm, "spec_decode_num_accepted_tokens"),
        )
    assert tokens == transformers_tokens(model, prompts, 100)
    assert 0 < accepted < proposed


def test_pages_behind_the_window_are_freed(tmp_path):
    """Window and tail need a few pages of a long request; all of selected and compressed remain."""
    export_small_model(tmp_path, kv="per_branch")
    (prompt,) = random_prompts((1600,))
    with engine(tmp_path, max_num_batched_tokens=64) as llm:
        pools = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        held = []
        manager = pools.coordinator.single_type_managers
        original = pools.allocate_slots

        def allocate(request, *args, **kwargs):
            result = original(request, *args, **kwargs)
            held.append([sum(not block.is_null for block in one.req_to_blocks[request.request_id]) for one in manager])
            return result

        pools.allocate_slots = allocate
        vllm_tokens(llm, [prompt], 8)
        assert pools.usage == 0
    most = [max(counts) for counts in zip(*held, strict=True)]
    assert sorted(most)[-1] == -(-1608 // BLOCK)
    assert sorted(most)[:-1] == [
        pytest.approx((64 + last) // BLOCK + 1, abs=1) for last in (GEOMETRY["l"], GEOMETRY["w"])
    ]
