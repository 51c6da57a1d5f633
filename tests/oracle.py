"""An oracle for NSA that shares nothing with the package: numpy in fp64, Python loops, one query at a time.

It is written from the paper's sentences, not from the code it judges, and is slow on purpose: every token, head, block
and key is visited by name.
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softmax_row(scores: list[float]) -> list[float]:
    if not scores:
        return []
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    return [x / sum(weights) for x in weights]


def attend_to(q: Array, keys: list[Array], values: list[Array], width: int, scale: float) -> Array:
    """One head of one query over the listed keys."""
    out = np.zeros(width)
    for p, value in zip(softmax_row([scale * float(q @ k) for k in keys]), values, strict=True):
        out += p * value
    return out


def window_tokens(t: int, w: int) -> list[int]:
    """The query's own token and the w − 1 before it, as far as they exist."""
    return [i for i in range(t + 1) if t - i <= w - 1]


def complete_blocks(t: int, l: int, d: int) -> list[int]:
    """Compressed blocks, numbered by their stride, that end at or before token t."""
    found, block = [], 0
    while block * d + (l - 1) <= t:
        found.append(block)
        block += 1
    return found


def chosen_blocks(heads: list[Array], compressed_keys: list[Array], t: int, *, l: int, d: int, l_sel: int, n_sel: int,
                  scale: float) -> list[int]:  # fmt: skip
    """The selection blocks of one query and group: counted token by token, stride by stride."""
    visible = complete_blocks(t, l, d)
    mass = dict.fromkeys(visible, 0.0)
    for q in heads:
        for c, p in zip(visible, softmax_row([scale * float(q @ compressed_keys[c]) for c in visible]), strict=True):
            mass[c] += p
    last_block = t // l_sel
    score: dict[int, float] = {}
    for j in range(last_block + 1):
        score[j] = 0.0
        for c in visible:
            shared_tokens = sum(1 for token in range(c * d, c * d + l) if j * l_sel <= token <= j * l_sel + l_sel - 1)
            score[j] += mass[c] * shared_tokens / d
    chosen = {0, last_block, max(0, last_block - 1)}
    ranked = sorted((j for j in score if j not in chosen), key=lambda j: (-score[j], j))
    for j in ranked:
        if len(chosen) < n_sel:
            chosen.add(j)
    return sorted(chosen)


def rotated(x: Array, pos: float, base: float, scale: float) -> Array:
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = pos / scale / base ** (2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def compress_block(tokens: list[Array], weights: dict[str, Array], group: int) -> Array:
    """φ of one block of one group's keys or values. `weights` are the stream's own, empty for the mean."""
    if "pos_emb" in weights:
        tokens = [token + weights["pos_emb"][i, group] for i, token in enumerate(tokens)]
    if "w_place" in weights:
        return sum((weights["w_place"][group, i] * token for i, token in enumerate(tokens)), np.zeros_like(tokens[0]))
    if "w_score" in weights:
        linear, square = weights["w_score"][group], weights["w_square"][group]
        shares = [math.exp(sum(linear * token) + sum(square * token**2) / len(token)) for token in tokens]
        return sum((share * token for share, token in zip(shares, tokens, strict=True)), 0 * tokens[0]) / sum(shares)
    if "w_block" in weights:
        out = np.zeros(weights["w_block"].shape[-1])
        for i, token in enumerate(tokens):
            out += token @ weights["w_block"][group, i]
        return out
    if "w_in" in weights:
        hidden = weights["b_in"][group].copy()
        for i, token in enumerate(tokens):
            hidden += token @ weights["w_in"][group, i]
        return np.array([gelu(h) for h in hidden]) @ weights["w_out"][group]
    return sum(tokens, np.zeros_like(tokens[0])) / len(tokens)


def nsa_layer(x: Array, weights: dict[str, Array], *, n_heads: int, n_kv_groups: int, d_k: int, d_v: int, l: int,
              d: int, l_sel: int, n_sel: int, w: int, gate: str = "softmax", gate_per: str = "head",
              gate_temperature: float = 1.0, rope_base: float = 500_000.0, rope_scale: float = 1.0,
              rope_compressed: str = "auto", kv: str = "per_branch", qk_norm_eps: float = 1e-6,
              **_: object) -> Array:  # fmt: skip
    """A whole NSAAttention on one document x [S, D], from its state dict."""
    n_tokens, heads_per_group, scale = len(x), n_heads // n_kv_groups, 1 / math.sqrt(d_k)
    out = np.zeros((n_tokens, n_heads * d_v))
    reads_channels = any(f"phi_k.{name}" in weights for name in ("w_score", "w_block", "w_in"))
    if rope_compressed == "auto":
        rope_compressed = "after" if reads_channels else "before"

    def turn(vector: Array, pos: float) -> Array:
        return rotated(vector, pos, rope_base, rope_scale)

    def projected(name: str, row: int, width: int, token: Array) -> Array:
        """`width` rows of a projection, normalised where the layer has QK-norm."""
        out = weights[f"{name}.weight"][row : row + width] @ token
        if f"{name}.bias" in weights:
            out = out + weights[f"{name}.bias"][row : row + width]
        norm = name.replace("w_", "") + "_norm.weight"
        if norm in weights:
            out = out / math.sqrt(float(out @ out) / len(out) + qk_norm_eps) * weights[norm]
        return out

    for g in range(n_kv_groups):
        keys, values = {}, {}
        for b, branch in enumerate(("cmp", "sel", "win")):
            key_place = g * 3 + b if kv == "per_branch" else g
            value_place = g if kv == "shared" else g * 3 + b
            raw = [projected("w_k", key_place * d_k, d_k, x[t]) for t in range(n_tokens)]
            straight = branch == "cmp" and rope_compressed == "after"
            keys[branch] = raw if straight else [turn(k, t) for t, k in enumerate(raw)]
            values[branch] = [projected("w_v", value_place * d_v, d_v, x[t]) for t in range(n_tokens)]

        phi_k = {name[6:]: value for name, value in weights.items() if name.startswith("phi_k.")}
        phi_v = {name[6:]: value for name, value in weights.items() if name.startswith("phi_v.")}
        c_keys, c_values = [], []
        for c in complete_blocks(n_tokens - 1, l, d):
            key = compress_block(keys["cmp"][c * d : c * d + l], phi_k, g)
            c_keys.append(turn(key, c * d + l - 1) if rope_compressed == "after" else key)
            c_values.append(compress_block(values["cmp"][c * d : c * d + l], phi_v, g))

        for t in range(n_tokens):
            heads = []
            for r in range(heads_per_group):
                row = (g * heads_per_group + r) * d_k
                heads.append(turn(projected("w_q", row, d_k, x[t]), t))
            blocks = chosen_blocks(heads, c_keys, t, l=l, d=d, l_sel=l_sel, n_sel=n_sel, scale=scale)
            picked = [i for i in range(t + 1) if i // l_sel in blocks]
            near = window_tokens(t, w)
            seen = complete_blocks(t, l, d)
            for r, q in enumerate(heads):
                h = g * heads_per_group + r
                parts = (
                    attend_to(q, [c_keys[c] for c in seen], [c_values[c] for c in seen], d_v, scale),
                    attend_to(q, [keys["sel"][i] for i in picked], [values["sel"][i] for i in picked], d_v, scale),
                    attend_to(q, [keys["win"][i] for i in near], [values["win"][i] for i in near], d_v, scale),
                )
                row = (h if gate_per == "head" else g) * 3
                logits = weights["gates.proj.weight"][row : row + 3] @ x[t] + weights["gates.proj.bias"][row : row + 3]
                logits = logits / gate_temperature
                shares = softmax_row(list(logits)) if gate == "softmax" else [1 / (1 + math.exp(-z)) for z in logits]
                for share, part in zip(shares, parts, strict=True):
                    out[t, h * d_v : h * d_v + d_v] += share * part
    return out @ weights["w_out.weight"].T + weights.get("w_out.bias", np.zeros(1))
