"""NSA inside the engine's architectures, and one state dict for the engine's model and ours."""

import copy

import pytest
import torch
from olmo_core.nn.attention import SequenceMixerConfig
from olmo_core.nn.transformer import TransformerConfig

from nsa.core.attention_config import SLIDING_GATE_INIT
from nsa.core.pooling import rows_shape
from nsa.errors import ConfigError
from nsa_train.config.model_sections import ModelConfig, SparseAttentionConfig
from nsa_train.config.schema import RunConfig, TrainConfig
from nsa_train.run_model import build_model
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.build import build_train_module
from nsa_train.train.engine.mixer import NSAMixer, NSAMixerConfig
from nsa_train.train.engine.transformer import transformer_config
from nsa_train.train.parallel.context_parallel import ContextGroup, RowSplit
from tests.attention_options import FAMILIES, OPTIONS, PHIS
from tests.initial_weights import RAISED, require_raised

VOCAB, SEQ = 61, 48
SIZES = dict(n_heads=4, n_kv_groups=2, d_k=8, d_v=8)
BLOCKS = dict(l=8, d=4, l_sel=8, n_sel=4, w=16)


def run(nsa=None, **model) -> RunConfig:
    return RunConfig(
        model=ModelConfig(**{"dim": 32, "n_layers": 2, **SIZES, **model}),
        nsa=SparseAttentionConfig(**{**BLOCKS, **(nsa or {})}),
        train=TrainConfig(seq_len=SEQ, seed=5),
    )


def with_option(name: str) -> RunConfig:
    sections = {**OPTIONS, **FAMILIES}[name]
    return run(sections.get("nsa"), **sections.get("model", {}))


def with_nsa(config: TransformerConfig, layers: set[int] | None = None) -> TransformerConfig:
    """An engine architecture with NSA in all layers, or in these."""
    nsa = copy.deepcopy(config.block)
    nsa.sequence_mixer = NSAMixerConfig(SIZES | BLOCKS)
    if layers is None:
        config.block = nsa
    else:
        config.block_overrides = dict.fromkeys(layers, nsa)
    return config


def architectures() -> dict[str, TransformerConfig]:
    common = dict(d_model=32, vocab_size=VOCAB, n_layers=3, n_heads=4)
    return {
        "dense": with_nsa(TransformerConfig.llama_like(**common)),
        "hybrid": with_nsa(TransformerConfig.llama_like(**common), {0, 2}),
        "moe": with_nsa(
            TransformerConfig.llama_like_moe(**common, num_experts=4, top_k=2, expert_hidden_size=32, dropless=True)
        ),
    }


class PermutationOnCpu:
    """The engine moves tokens to their experts with Triton; these plain stand-ins do the same without a GPU."""

    @staticmethod
    def gather(x, indices, bin_ids, weights, bins, top_k):
        rows = x[indices // top_k]
        return rows if weights is None else rows * weights[indices, None]

    @staticmethod
    def scatter(x, indices, bin_ids, weights, bins, top_k):
        rows = x if weights is None else x * weights[indices, None]
        return x.new_zeros(len(indices) // top_k, x.shape[1]).index_add_(0, indices // top_k, rows)

    @staticmethod
    def scatter_wgrad(x, grad, indices, bin_ids, bins, top_k):
        return x.new_zeros(len(indices)).index_add_(0, indices, (x * grad[indices // top_k]).sum(-1))


@pytest.mark.parametrize("name", ["dense", "hybrid", "moe"])
def test_an_engine_architecture_trains(name, monkeypatch):
    monkeypatch.setattr("olmo_core.ops.moe.kernels", PermutationOnCpu)
    config = architectures()[name]
    model = config.build()
    assert sum(p.numel() for p in model.parameters()) == config.num_params
    model.init_weights(max_seq_len=SEQ, max_local_microbatch_size=4 * SEQ)
    mixers = [block.attention for block in model.blocks.values()]
    assert sum(isinstance(mixer, NSAMixer) for mixer in mixers) == (2 if name == "hybrid" else 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(VOCAB, (4, SEQ), generator=torch.Generator().manual_seed(0))
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    losses = []
    for _ in range(8):
        loss = model(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("change", [{}, {"tie_embeddings": True}, {"ffn_dim": 40}, {"norm_eps": 1e-2}, {"dim": 48}])
@pytest.mark.parametrize(
    "nsa",
    [
        {},
        {"phi": "mlp", "gate": "sigmoid"},
        {"phi": "linear", "rope_compressed": "after"},
        {"phi": "weighted"},
        {"phi": "softmax"},
    ],
)
def test_one_state_dict_fits_both_models(change, nsa):
    both_models_are_one(run(nsa, **change))


@pytest.mark.parametrize("name", [*OPTIONS, *FAMILIES])
def test_both_models_have_every_option_of_the_attention(name):
    both_models_are_one(with_option(name))


def test_both_models_have_the_second_level():
    both_models_are_one(run(dict(coarse_block=2, n_coarse=4)))


def both_models_are_one(config: RunConfig) -> None:
    torch.manual_seed(0)
    ours, engines = build_model(config, VOCAB), transformer_config(config, VOCAB).build()
    shapes, by_group = ({name: p.shape for name, p in model.named_parameters()} for model in (engines, ours))
    in_rows = {
        name: rows_shape(name.split(".")[-1], shape) if ".phi_" in name else shape for name, shape in by_group.items()
    }
    assert shapes == in_rows
    assert engines.num_params == ours.num_params()
    with torch.no_grad():
        for parameter in ours.parameters():  # biases and norms too: as they begin they change nothing
            parameter.add_(0.1 * torch.randn_like(parameter))
    engines.load_state_dict(ours.state_dict(), strict=True)
    tokens = torch.randint(VOCAB, (2, SEQ))
    cu = torch.tensor([0, 20, 48, 60, 96], dtype=torch.int32)
    doc_lens = torch.tensor([[20, 28], [12, 36]])
    with torch.no_grad():
        torch.testing.assert_close(engines(tokens), ours(tokens), atol=1e-5, rtol=1e-5)
        packed = engines(tokens, doc_lens=doc_lens, max_doc_lens=[28, 36])
        torch.testing.assert_close(packed, ours(tokens, cu_doc_lens=cu), atol=1e-5, rtol=1e-5)
        assert not torch.equal(packed, engines(tokens))
    ours.load_state_dict(engines.state_dict(), strict=True)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
def test_an_option_reaches_the_model(name):
    torch.manual_seed(0)
    plain, changed = (build_model(config, VOCAB).double() for config in (run(), with_option(name)))
    sizes = [{name: p.shape for name, p in model.named_parameters()} for model in (plain, changed)]
    if "rope_scaling" in OPTIONS[name].get("model", {}):
        assert changed.blocks[0].attention.rotary.scaling["rope_type"] != "default"
        tables = [model.blocks[0].attention.rotary.tables(torch.tensor([[40]])) for model in (plain, changed)]
        assert not torch.equal(tables[0][0], tables[1][0])
    else:
        assert sizes[0] != sizes[1]


def test_the_norm_of_queries_and_keys_has_the_models_epsilon():
    attention = build_model(run(qk_norm=True, norm_eps=1e-2), VOCAB).blocks[0].attention
    assert (attention.q_norm.eps, attention.k_norm.eps) == (1e-2, 1e-2)


@pytest.mark.parametrize("name", [*OPTIONS, *FAMILIES])
def test_flops_are_those_of_our_model(name):
    config = with_option(name)
    ours, engines = build_model(config, VOCAB), transformer_config(config, VOCAB).build()
    norms = 6 * config.model.dim  # the engine counts the final norm's weights as a matrix
    assert engines.num_flops_per_token(SEQ) == pytest.approx(ours.flops_per_token(SEQ) + norms, abs=2)


@pytest.mark.parametrize("phi", PHIS)
def test_weights_begin_as_in_nsa_core_whatever_the_global_seed(phi):
    config = transformer_config(run({"phi": phi}), VOCAB)
    first, second = config.build(init_device="meta"), config.build()
    torch.manual_seed(1)
    first.init_weights(device=torch.device("cpu"))
    torch.manual_seed(2)
    second.init_weights(device=torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    one, two = (block.attention for block in first.blocks.values())
    assert not torch.equal(one.w_q.weight, two.w_q.weight)
    assert one.w_q.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert one.w_out.weight.std().item() == pytest.approx(0.02 / 4**0.5, rel=0.1)  # 2 layers
    assert one.gates.proj.weight.std().item() == pytest.approx(1e-3, rel=0.3)
    if phi == "linear":
        assert torch.equal(one.phi_k.weight("w_block")[0, 0], torch.eye(8) / 8)
    if phi == "weighted":
        assert torch.equal(one.phi_k.weight("w_place"), torch.full((2, 8), 1 / 8))
    if phi == "softmax":
        assert not one.phi_k.w_score.any()
        assert (one.phi_k.w_square == 1).all()


@pytest.mark.parametrize(
    "nsa", [{}, {"phi": "linear", "phi_pos_emb": True}, {"phi": "mlp", "phi_pos_emb": True}], ids=str
)
def test_the_initial_standard_deviation_reaches_every_weight_as_in_the_plain_model(nsa):
    def started(**model):
        config = run(nsa, dim=64, qkv_bias=True, **model)
        torch.manual_seed(1)
        plain = build_model(config, VOCAB)
        return build_train_module(config, VOCAB, RankInfo(), torch.device("cpu")).model, plain

    (default, default_plain), (raised, raised_plain) = started(), started(init_std=RAISED)
    require_raised(default, raised)
    require_raised(default_plain, raised_plain)
    for name, weight in raised_plain.named_parameters():
        want = 0.0 if weight.numel() < 2 else weight.std().item()
        # The engine cuts its normal distribution at three standard deviations.
        measured, drawn_apart = raised.get_parameter(name).std().item(), 5 / weight.numel() ** 0.5
        assert measured == pytest.approx(want, rel=0.02 + drawn_apart), name


def test_the_sliding_gate_starts_where_the_settings_say():
    config = run({"sliding_gate_init": -3.0}, dim=64, attention=["nsa", "global"])
    model = build_train_module(config, VOCAB, RankInfo(), torch.device("cpu")).model
    biases = [weight for name, weight in model.named_parameters() if name.endswith("gates.proj.bias")]
    three, two = biases[:2]
    assert (three.unflatten(0, (-1, 3)) == torch.tensor([0.0, 0.0, -3.0])).all()
    assert not two.any()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("init_device", ["cpu", "meta"])
def test_biases_begin_at_zero_and_norms_at_one(name, init_device):
    model = transformer_config(with_option(name), VOCAB).build(init_device=init_device)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.init_weights(device=torch.device("cpu"))
    for parameter_name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), parameter_name
        if parameter_name.endswith("gates.proj.bias"):
            assert (parameter.unflatten(0, (-1, 3)) == torch.tensor([0.0, 0.0, SLIDING_GATE_INIT])).all()
        elif parameter_name.endswith((".bias", ".b_in")):
            assert (parameter == 0).all(), parameter_name
        elif parameter_name.endswith("norm.weight"):
            assert (parameter == 1).all(), parameter_name
        elif parameter_name.endswith(("w_q.weight", "w_k.weight", "w_v.weight")):
            assert parameter.std().item() == pytest.approx(0.02, rel=0.15), parameter_name


def test_it_is_registered_and_survives_a_dictionary():
    for config in (NSAMixerConfig.of_run(run({"phi": "mlp"})), NSAMixerConfig.of_run(with_option("all"))):
        assert SequenceMixerConfig.from_dict(config.as_config_dict()) == config


def test_what_it_cannot_do_it_refuses():
    mixer = NSAMixerConfig(SIZES | BLOCKS).build(32, layer_idx=0, n_layers=1)
    with pytest.raises(ConfigError, match="cache_leftpad"):
        mixer(torch.zeros(1, 8, 32), cache_leftpad=torch.zeros(1))
    mixer.context = ContextGroup(RowSplit(2, 0), "")
    with pytest.raises(ConfigError, match="no positions"):
        mixer(torch.zeros(1, 8, 32))
