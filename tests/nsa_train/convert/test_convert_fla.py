"""Models of flash-linear-attention's NSA compute here what the equations of that package say, in plain PyTorch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from nsa.errors import CheckpointError, ConfigError

pytest.importorskip("transformers", reason="Transformers is in the hf extra")
from nsa_train.convert.dense.conversion_plan import ConversionOptions
from nsa_train.convert.dense.convert_folder import convert_folder, export_dense
from nsa_train.infer.load_model import load_model

HEAD_DIM, BLOCK, N_BLOCKS, WINDOW = 8, 8, 4, 12
CONFIG: dict[str, Any] = dict(
    model_type="nsa",
    architectures=["NSAForCausalLM"],
    vocab_size=67,
    hidden_size=32,
    num_hidden_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,  # which that package's model does not use
    qkv_bias=True,
    block_size=BLOCK,
    block_counts=N_BLOCKS,
    window_size=WINDOW,
    rope_theta=1000.0,
    hidden_ratio=4,
    hidden_act="swish",
    norm_eps=1e-6,
    max_position_embeddings=128,
    fuse_norm=True,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)
LAYERS, HEADS, GROUPS, DIM = (CONFIG[key] for key in ("num_hidden_layers", "num_heads", "num_kv_heads", "hidden_size"))
FFN_DIM = 256  # 2/3 · 4 · 32 = 85, up to a multiple of 256


def fla_tensors() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embeddings.weight": (67, DIM), "model.norm.weight": (DIM,), "lm_head.weight": (67, DIM)
    }  # fmt: skip
    q, kv = HEADS * HEAD_DIM, GROUPS * HEAD_DIM
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": (DIM,), "mlp_norm.weight": (DIM,), "attn.q_proj.weight": (q, DIM),
            "attn.q_proj.bias": (q,), "attn.k_proj.weight": (kv, DIM), "attn.k_proj.bias": (kv,),
            "attn.v_proj.weight": (kv, DIM), "attn.v_proj.bias": (kv,), "attn.g_proj.weight": (3 * HEADS, DIM),
            "attn.o_proj.weight": (DIM, q), "mlp.gate_proj.weight": (FFN_DIM, DIM),
            "mlp.up_proj.weight": (FFN_DIM, DIM), "mlp.down_proj.weight": (DIM, FFN_DIM),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator) * (0.3 if "norm" in name else 0.2) + ("norm" in name)
        for name, shape in shapes.items()
    }


def save_fla(folder: Path, tensors: Mapping[str, Tensor] | None = None, **changes: Any) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(dict(tensors or fla_tensors()), folder / "model.safetensors", metadata={"format": "pt"})


def rotated(x_SHK: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    angle_SF = torch.arange(len(x_SHK))[:, None] * 1000.0 ** (-torch.arange(half) / half)
    cos, sin = angle_SF.cos()[:, None], angle_SF.sin()[:, None]
    a, b = x_SHK[..., :half], x_SHK[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def attended(q_K: Tensor, k_TK: Tensor, v_TV: Tensor) -> Tensor:
    return (k_TK @ q_K * HEAD_DIM**-0.5).softmax(0) @ v_TV if len(k_TK) else torch.zeros(HEAD_DIM)


def fla_attention(x_SD: Tensor, own: Mapping[str, Tensor]) -> Tensor:
    """Compute one query at a time: complete blocks pooled by the mean; the first and the two nearest blocks and the
    ones with the largest sum of compressed probabilities over the heads of the group; the window; three sigmoid
    gates."""

    def projected(name: str) -> Tensor:
        projection_SD = F.linear(x_SD, own[f"attn.{name}_proj.weight"], own[f"attn.{name}_proj.bias"])
        return projection_SD.view(len(x_SD), -1, HEAD_DIM)

    q, k, v = rotated(projected("q")), rotated(projected("k")), projected("v")
    gates = F.linear(x_SD, own["attn.g_proj.weight"]).sigmoid().view(len(x_SD), HEADS, 3)
    out, per_group = torch.zeros_like(q), HEADS // GROUPS
    for t in range(len(x_SD)):
        complete, current = (t + 1) // BLOCK, t // BLOCK
        for group in range(GROUPS):
            k_g, v_g = k[:, group], v[:, group]
            k_cmp, v_cmp = (x[: complete * BLOCK].view(complete, BLOCK, HEAD_DIM).mean(1) for x in (k_g, v_g))
            heads = range(group * per_group, (group + 1) * per_group)
            mass = torch.zeros(current + 1)
            for head in heads:
                mass[:complete] += (k_cmp @ q[t, head] * HEAD_DIM**-0.5).softmax(0)
            forced = {0, max(0, current - 1), current}
            ranked = sorted(range(current + 1), key=lambda block: (block not in forced, -float(mass[block])))
            tokens = [i for block in ranked[:N_BLOCKS] for i in range(block * BLOCK, min(t + 1, (block + 1) * BLOCK))]
            near = slice(max(0, t + 1 - WINDOW), t + 1)
            for head in heads:
                parts = attended(q[t, head], k_cmp, v_cmp), attended(q[t, head], k_g[tokens], v_g[tokens])
                parts = (*parts, attended(q[t, head], k_g[near], v_g[near]))
                out[t, head] = sum(gate * part for gate, part in zip(gates[t, head], parts, strict=True))
    return F.linear(out.flatten(1), own["attn.o_proj.weight"])


def fla_logits(tensors: Mapping[str, Tensor], ids_S: Tensor) -> Tensor:
    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    x = tensors["model.embeddings.weight"][ids_S]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        own = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
        x = x + fla_attention(normed(x, own["attn_norm.weight"]), own)
        y = normed(x, own["mlp_norm.weight"])
        gate, up = (F.linear(y, own[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, own["mlp.down_proj.weight"])
    return F.linear(normed(x, tensors["model.norm.weight"]), tensors["lm_head.weight"])


def test_logits_are_those_of_the_equations(tmp_path):
    save_fla(tmp_path / "fla")
    convert_folder(tmp_path / "fla", tmp_path / "ours")
    model = load_model(tmp_path / "ours", needs_text=False).model
    ids = torch.randint(0, 67, (1, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = fla_logits(fla_tensors(), ids[0])
        assert (model(ids).logits[0] - expected).abs().max() <= 1e-4
        step = model(ids[:, :60])
        for place in range(60, 90):
            step = model(ids[:, place : place + 1], past_key_values=step.past_key_values)
            assert (step.logits[0, 0] - expected[place]).abs().max() <= 1e-4


def test_a_round_trip_is_bit_exact(tmp_path):
    save_fla(tmp_path / "fla")
    convert_folder(tmp_path / "fla", tmp_path / "ours")
    back = export_dense(tmp_path / "ours", tmp_path / "back")
    assert back.dropped == {"attention.gates.proj.bias": LAYERS}
    tensors = load_file(tmp_path / "back/model.safetensors")
    assert tensors.keys() == fla_tensors().keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in fla_tensors().items())


@pytest.mark.parametrize(
    "changes",
    [
        {"block_counts": 3},
        {"block_counts": 6},
        {"block_counts": None},
        {"window_size": 0},
        {"window_size": None},
        {"hidden_act": "gelu"},
        {"num_heads": 3},
        {"num_heads": 0},
        {"num_hidden_layers": 10**9},
        {"block_size": 2**40},
        {"hidden_size": "32"},
        {"rope_theta": None},
    ],
)
def test_what_would_compute_something_else_is_refused(changes, tmp_path):
    save_fla(tmp_path / "fla", **changes)
    with pytest.raises(CheckpointError):
        convert_folder(tmp_path / "fla", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_missing_tensor_and_options_are_refused(tmp_path):
    tensors = fla_tensors()
    tensors.pop("model.layers.0.attn.q_proj.weight")
    save_fla(tmp_path / "fla", tensors)
    with pytest.raises(CheckpointError):
        convert_folder(tmp_path / "fla", tmp_path / "ours")
    save_fla(tmp_path / "whole")
    with pytest.raises(ConfigError, match="sparse already"):
        convert_folder(tmp_path / "whole", tmp_path / "ours", ConversionOptions())
