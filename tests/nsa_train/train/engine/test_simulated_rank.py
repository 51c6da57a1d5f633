"""A simulated rank against ranks of real gloo runs, counted by the same counters: equal collectives, equal memory."""

import pytest

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from tests.nsa_train.train.engine.counted_steps import counted

BF16 = ["runtime.precision=bf16"]
FSDP, HSDP = "parallel.data=fsdp", "parallel.data=hsdp"
FULL, SELECTIVE = "runtime.gradient_checkpointing=full", "runtime.gradient_checkpointing=selective"
FAST = {
    "fsdp": [2, FSDP, FULL, *BF16],
    "context": [2, FSDP, FULL, *BF16, "parallel.cp=2"],
}
SLOW = {
    "accumulation": [2, FSDP, "train.batch_size=2", "train.accumulate_grad_batches=4"],
    "fsdp_off": [4, FSDP, *BF16],
    "fsdp_selective": [4, FSDP, SELECTIVE, *BF16],
    "fsdp_mlp": [4, FSDP, "nsa.preset=paper"],
    "fsdp_tied": [2, FSDP, "model.tie_embeddings=true"],
    "hsdp": [4, HSDP, "parallel.shard_ranks=2", FULL, *BF16],
    "hsdp_accumulation": [4, HSDP, "parallel.shard_ranks=2", "train.accumulate_grad_batches=3"],
    "layers": [2, FSDP, FULL, "model.n_layers=6"],
    "tensor": [2, FSDP, FULL, *BF16, "parallel.tp=2"],
    "data_context": [4, FSDP, FULL, *BF16, "parallel.cp=2"],
    "context_4": [4, FSDP, SELECTIVE, *BF16, "parallel.cp=4", "train.seq_len=128"],
    "context_tensor": [4, FSDP, FULL, *BF16, "parallel.cp=2", "parallel.tp=2"],
}


def without_halos(counts):
    """Halos depend on the rank: the first tokens of a row have none before them."""
    return {group: total for group, total in counts.collectives.items() if group.kind != "all_to_all"}


def require_equal(real, simulated):
    assert real[0].collectives == simulated.collectives
    for rank in real:
        assert without_halos(rank) == without_halos(simulated)
        assert rank.flops == simulated.flops
        assert simulated.peak_bytes == pytest.approx(rank.peak_bytes, rel=0.1)
    assert simulated.held_bytes == real[0].held_bytes  # rank 0 has the largest share of a tensor that does not divide


@pytest.fixture(scope="module")
def fast():
    return counted(**FAST)


@pytest.mark.parametrize("name", FAST)
def test_a_simulated_rank_counts_what_a_real_one_does(fast, name):
    require_equal(*fast[name])


@pytest.mark.parametrize("name", FAST)
def test_its_peak_is_that_of_the_real_rank_to_the_byte(fast, name):
    real, simulated = fast[name]
    assert simulated.peak_bytes == real[0].peak_bytes


@pytest.mark.nightly
@pytest.mark.parametrize("name", SLOW)
def test_every_layout_counts_what_a_real_rank_does(name):
    require_equal(*counted(**{name: SLOW[name]})[name])
