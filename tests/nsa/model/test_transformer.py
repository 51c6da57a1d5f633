import pytest
import torch

from nsa.model.transformer import NSATransformer
from nsa_train.config import load
from nsa_train.run_model import build_model, wanted_kernels
from tests.shapes import attention_args

VOCAB = 50


def make(**changes) -> NSATransformer:
    torch.manual_seed(0)
    return NSATransformer(VOCAB, n_layers=2, **attention_args("tiny", **changes))


def test_parameter_names_are_the_engines():
    names = set(make(phi="avg").state_dict())
    engine = {f"blocks.{i}.{part}.weight" for i in range(2) for part in (
        "attention_norm", "attention.w_q", "attention.w_k", "attention.w_v", "attention.w_out",
        "feed_forward_norm", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")}  # fmt: skip
    engine |= {"embeddings.weight", "lm_head.norm.weight", "lm_head.w_out.weight"}
    gates = {f"blocks.{i}.attention.gates.proj.{part}" for i in range(2) for part in ("weight", "bias")}
    assert names == engine | gates


def test_generation_with_a_cache_equals_the_whole():
    model = make(phi="linear")
    tokens = torch.randint(VOCAB, (2, 101))
    with torch.no_grad():
        cache = model.new_cache(2, 101)
        parts = [model(part, cache=cache) for part in tokens.split([60, 20, *[1] * 21], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), atol=1e-5, rtol=1e-5)
    assert cache.length_B.tolist() == [101, 101]
    assert cache.n_bytes() == sum(layer.n_bytes() for layer in cache.layers)


def test_documents_in_one_row_equal_documents_alone():
    model = make()
    tokens = torch.randint(VOCAB, (1, 90))
    packed = model(tokens, cu_doc_lens=torch.tensor([0, 37, 90], dtype=torch.int32))
    alone = torch.cat((model(tokens[:, :37]), model(tokens[:, 37:])), 1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def test_tied_embeddings_are_one_parameter():
    tied, untied = make(), NSATransformer(VOCAB, n_layers=2, tie_embeddings=True, **attention_args("tiny"))
    assert tied.num_params() - untied.num_params() == VOCAB * 24
    assert untied.lm_head.w_out.weight is untied.embeddings.weight


def test_initial_loss_is_that_of_a_uniform_guess():
    model = make()
    tokens = torch.randint(VOCAB, (4, 80))
    loss = model.loss(tokens, tokens.roll(-1, 1))
    assert abs(loss.item() - torch.tensor(float(VOCAB)).log().item()) < 0.05


def test_residual_outputs_start_smaller_in_deeper_models():
    deep = NSATransformer(VOCAB, n_layers=8, **attention_args("tiny", dim=256))
    assert deep.blocks[0].feed_forward.w2.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert deep.blocks[0].attention.w_out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert deep.blocks[0].feed_forward.w1.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_it_learns_to_copy():
    """Ten steps on one batch: loss falls, every parameter gets a finite gradient."""
    model = make(phi="mlp", phi_pos_emb=True)
    tokens = torch.randint(VOCAB, (2, 60))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model.loss(tokens, tokens)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_flops_count_what_the_profiler_counts_plus_the_attention():
    """Projections are counted by torch; what the sparse branches read is checked in tests/nsa/core/test_probe.py."""
    from torch.utils.flop_counter import FlopCounterMode

    model = make()
    tokens = torch.randint(VOCAB, (1, 64))
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    seen = sum(counter.get_flop_counts()["Global"].values())
    forward = 2.0 * model.lm_head.w_out.weight.numel()
    for block in model.blocks:
        forward += 2.0 * sum(p.numel() for p in block.feed_forward.parameters())
        forward += block.attention.flops(64)["projections"]
    assert seen == forward * 64
    attention = model.blocks[0].attention.flops(64)
    reads = model.blocks[0].attention.geometry.total_reads(64)
    assert attention["sliding"] == 2 * 6 * (8 + 6) * reads["sliding"] / 64
    assert attention["select"] == 2 * 6 * 8 * reads["compressed"] / 64
    trained = 3 * forward + 2 * sum(3 * sum(b for n, b in attention.items() if n in reads) + attention["select"]
                                    for _ in range(1))  # fmt: skip
    assert model.flops_per_token(64) == pytest.approx(trained)


def test_a_config_becomes_its_model():
    config = load("configs/train_showcase.yaml", overrides=["nsa.phi=mlp", "runtime.use_flash=false"])
    model = build_model(config, vocab_size=257)
    attention = model.blocks[0].attention
    assert (len(model.blocks), model.embeddings.weight.shape) == (config.model.n_layers, (257, 128))
    assert (attention.geometry.l, attention.geometry.w, attention.phi_k.phi) == (16, 64, "mlp")
    assert set(wanted_kernels(config)) == {"portable"}
    assert model.blocks[0].feed_forward.w1.weight.shape[0] == config.model.ffn_size
    named = load("configs/train_showcase.yaml", overrides=["kernels.selected=reference"])
    assert wanted_kernels(named).selected == "reference"
