"""Options of published dense models against a few lines of plain PyTorch; their caches, packed rows and exports."""

import math

import pytest
import torch

from nsa.core.layer_pattern import repeated
from nsa.core.rope import RotaryEmbedding
from nsa.errors import ConfigError
from nsa.model.transformer import NSATransformer
from nsa_train.config.schema import RunConfig
from nsa_train.convert.export_folder import exported_config
from nsa_train.run_model import build_model
from tests.attention_options import FAMILIES

SIZES = dict(dim=24, n_layers=3, n_heads=4, n_kv_groups=2, d_k=8, d_v=8)
BLOCKS = dict(l=8, d=4, l_sel=8, n_sel=3, w=12)
VOCAB, LENGTH = 61, 60
LINEAR = dict(rope_type="linear", factor=3.0)
DENSE = {
    "none of them": {},
    "post_norm": dict(post_norm=True),
    "qk_norm_per": dict(qk_norm=True, qk_norm_per="layer"),
    "ffn_bias": dict(ffn_bias=True),
    "rotary_dim": dict(rotary_dim=4),
    "rope_layers": dict(rope_layers=["scaled", "none", "plain"], rope_scaling=LINEAR),
    "window": dict(attention=["window", "dense"], window=5),
    "nsa.w": dict(attention=["window", "dense"]),
    "all": dict(
        post_norm=True, qk_norm=True, qk_norm_per="layer", ffn_bias=True, rotary_dim=6, rope_scaling=LINEAR,
        rope_layers=["plain", "scaled", "none"], attention=["window", "dense"], window=5,
    ),
}  # fmt: skip


def run(**sections) -> RunConfig:
    model, nsa = (dict(base, **sections.get(name, {})) for name, base in (("model", SIZES), ("nsa", BLOCKS)))
    return RunConfig.model_validate({"model": model, "nsa": nsa, "train": {"seq_len": 64}})


def model_of(config: RunConfig, seed: int = 0) -> NSATransformer:
    """Build a model in fp64, with norms and biases that have an effect."""
    torch.manual_seed(seed)
    model = build_model(config, VOCAB).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens(batch=2, length=LENGTH):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(5))


def normed(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, channels, factor, base):
    """The first channels as complex numbers, x[i] + x[i + half]·j, times e^(angle·j)."""
    half = channels // 2
    speed = torch.tensor([base ** (-2 * i / channels) for i in range(half)], dtype=torch.float64) / factor
    angle = torch.arange(x.shape[1])[:, None, None] * speed
    z = torch.complex(x[..., :half], x[..., half:channels]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag, x[..., channels:]), -1)


def plain_logits(config: RunConfig, state: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """A dense model with these options, written without any code of ours."""
    m, (batch, length) = config.model, ids.shape
    x = state["embeddings.weight"][ids]
    for layer, (kind, rope) in enumerate(
        zip(repeated(m.attention, m.n_layers), repeated(m.rope_layers, m.n_layers), strict=True)
    ):
        of = {name.split(".", 2)[2]: p for name, p in state.items() if name.startswith(f"blocks.{layer}.")}

        def product(h, name, of=of):
            return h @ of[f"{name}.weight"].T + of.get(f"{name}.bias", 0)

        h = x if m.post_norm else normed(x, of["attention_norm.weight"], m.norm_eps)
        q, k, v = (product(h, f"attention.{name}") for name in ("w_q", "w_k", "w_v"))
        if m.qk_norm:
            q, k = (normed(y, of[f"attention.{n}.weight"], m.norm_eps) for y, n in ((q, "q_norm"), (k, "k_norm")))
        q, k, v = (y.view(batch, length, -1, m.d_k) for y in (q, k, v))
        if rope != "none":
            factor = LINEAR["factor"] if rope == "scaled" and m.rope_scaling.rope_type == "linear" else 1
            q, k = (turned(y, m.rotary_dim or m.d_k, factor, m.rope_base) for y in (q, k))
        k, v = (y.repeat_interleave(m.n_heads // m.n_kv_groups, 2) for y in (k, v))
        scores = torch.einsum("bshk,bthk->bhst", q, k) / math.sqrt(m.d_k)
        age = torch.arange(length)[:, None] - torch.arange(length)
        seen = (age >= 0) & (age < (m.window or config.nsa.w if kind == "window" else length))
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        branch_out = product(torch.einsum("bhst,bthv->bshv", shares, v).flatten(2), "attention.w_out")
        x = x + (normed(branch_out, of["attention_norm.weight"], m.norm_eps) if m.post_norm else branch_out)
        h = x if m.post_norm else normed(x, of["feed_forward_norm.weight"], m.norm_eps)
        gate = product(h, "feed_forward.w1")
        branch_out = product(gate * gate.sigmoid() * product(h, "feed_forward.w3"), "feed_forward.w2")
        x = x + (normed(branch_out, of["feed_forward_norm.weight"], m.norm_eps) if m.post_norm else branch_out)
    return normed(x, state["lm_head.norm.weight"], m.norm_eps) @ state["lm_head.w_out.weight"].T


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_model_is_that_of_plain_torch(name):
    config = run(model={"attention": "dense", **DENSE[name]})
    model = model_of(config)
    wanted = plain_logits(config, model.state_dict(), tokens())
    torch.testing.assert_close(model(tokens()), wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_caches_and_packed_documents_give_what_a_whole_row_does(name):
    model, ids = model_of(run(**FAMILIES[name])), tokens(1)
    whole, close = model(ids), dict(atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(model(ids, cu_doc_lens=[0, 23, LENGTH])[:, 23:], model(ids[:, 23:]), **close)
    cache = model.new_cache(1, LENGTH)
    parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 30), (30, 31), (31, 32), (32, LENGTH))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **close)
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :20] = 0
    padded = model(torch.cat([ids, ids.roll(20, 1)]), attention_mask=mask)
    torch.testing.assert_close(padded[:1], whole, **close)
    torch.testing.assert_close(padded[1:, 20:], whole[:, :40], **close)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_gets_a_gradient(name):
    model, ids = model_of(run(**FAMILIES[name])), tokens()
    model.loss(ids, ids.roll(-1, 1)).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize("layers", [("scaled",), ("scaled", "plain"), ("scaled", "none", "plain")], ids="-".join)
def test_layers_that_rotate_alike_share_one_table(layers, monkeypatch):
    computed, compute = [], RotaryEmbedding._computed
    monkeypatch.setattr(RotaryEmbedding, "_computed", lambda self, *a: computed.append(self.key) or compute(self, *a))
    model = model_of(run(model=dict(n_layers=6, attention="dense", rope_layers=layers, rope_scaling=LINEAR)))
    model(tokens())
    assert len(computed) == len(set(computed)) == len({*layers} - {"none"})
    computed.clear()
    model_of(run(model=dict(n_layers=6, attention="dense", rope_layers=layers)))(tokens())  # nothing to scale by
    assert len(computed) == 1


def test_the_window_of_its_layers_alone_changes():
    model = build_model(run(model=dict(attention=["window", "nsa", "dense"], window=5)), VOCAB)
    assert [block.attention.geometry.w for block in model.blocks] == [5, 12, 12]


def test_a_layer_without_rope_does_not_know_positions():
    model, ids = model_of(run(model=dict(n_layers=1, attention="dense", rope_layers="none"))), tokens(1)
    others = torch.randperm(LENGTH - 1, generator=torch.Generator().manual_seed(1))
    shuffled = torch.cat([ids[:, others], ids[:, -1:]], 1)
    torch.testing.assert_close(model(shuffled)[:, -1], model(ids)[:, -1])


def test_position_embeddings_serve_one_rotation():
    ids, two = tokens(), model_of(run(model=dict(attention="dense", rope_layers=["scaled", "none"])))
    tables = two.blocks[0].attention.rotary.tables(torch.arange(LENGTH)[None])
    torch.testing.assert_close(two(ids, position_embeddings=tables), two(ids))
    scaled = dict(attention="dense", rope_layers=["scaled", "plain"], rope_scaling=LINEAR)
    with pytest.raises(ConfigError, match="position_embeddings"):
        model_of(run(model=scaled))(ids, position_embeddings=tables)
    moved = model_of(run(model=scaled))(ids, position_ids=torch.arange(LENGTH) + 3)
    torch.testing.assert_close(moved, model_of(run(model=scaled))(ids))  # positions matter relative to each other


@pytest.mark.parametrize(
    ("model", "nsa", "words"),
    [
        (dict(rotary_dim=3), {}, ["model.rotary_dim (3)", "model.d_k (8)", "model.rotary_dim=4"]),
        (dict(rotary_dim=10), {}, ["model.rotary_dim (10)", "model.d_k (8)", "model.rotary_dim=8"]),
        (dict(qk_norm_per="layer"), {}, ["model.qk_norm_per (layer)", "model.qk_norm (false)"]),
        (
            dict(qk_norm=True, qk_norm_per="layer"),
            dict(kv="per_branch"),
            ["model.qk_norm_per (layer)", "nsa.kv (per_branch)", "nsa.kv=shared"],
        ),
        (dict(rope_layers=["none"] * 4), {}, ["model.rope_layers", "4 layers", "model.n_layers is 3"]),
        (dict(rope_layers=[]), {}, ["model.rope_layers"]),
    ],
    ids=str,
)
def test_impossible_options_are_refused(model, nsa, words):
    with pytest.raises(ValueError, match="model") as refused:
        run(model=model, nsa=nsa)
    assert all(word in str(refused.value) for word in words), refused.value
    arguments = {**SIZES, **BLOCKS, **model, **nsa}
    layers = dict(rope_layers=arguments.pop("rope_layers", ["scaled"]))
    with pytest.raises(ConfigError):
        NSATransformer(VOCAB, arguments.pop("dim"), arguments.pop("n_layers"), **layers, **arguments)


@pytest.mark.parametrize("name", FAMILIES)
def test_exported_models_save_load_generate_and_become_runs_again(name, tmp_path):
    pytest.importorskip("transformers", reason="Transformers is in the hf extra")
    from nsa.hf.modeling import NSAForCausalLM
    from nsa.hf.weight_names import from_transformers, to_transformers
    from nsa_train.convert.import_folder import open_exported, run_config

    config = run(**FAMILIES[name])
    ours = model_of(config).float()
    theirs = NSAForCausalLM(exported_config(config, VOCAB, None)).eval()
    theirs.load_state_dict(to_transformers(ours.state_dict()))
    theirs.config.architectures = ["NSAForCausalLM"]
    theirs.save_pretrained(tmp_path)
    again = NSAForCausalLM.from_pretrained(tmp_path)
    ids = tokens()
    torch.testing.assert_close(again(ids).logits, ours(ids))
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(again.generate(ids, **options), again.generate(ids, use_cache=False, **options))
    exported = open_exported(tmp_path)
    assert run_config(exported).model == config.model.model_copy(update={"ffn_dim": config.model.ffn_size})
    assert all(torch.equal(from_transformers(exported.tensors)[n], p) for n, p in ours.state_dict().items())


def test_modelling_code_of_an_export_has_the_positions_of_layers():
    pytest.importorskip("transformers", reason="Transformers is in the hf extra")
    from nsa.hf.remote_code import remote_code_files

    assert "nsa_core_model_layers.py" in remote_code_files()
