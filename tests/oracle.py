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


def entries_read(heads: list[Array], compressed_keys: list[Array], t: int, *, l: int, d: int, coarse_block: int,
                 n_coarse: int, scale: float) -> list[int]:  # fmt: skip
    """The compressed entries that one query and group attend to: all that are complete, or, with coarse blocks, those
    in the first coarse block, in the last two, and in the ones whose mean keys the heads like best."""
    visible = complete_blocks(t, l, d)
    if not coarse_block or not visible:
        return visible
    liking: dict[int, float] = {}
    whole = list(range(len(visible) // coarse_block))
    means = [sum(compressed_keys[j * coarse_block : (j + 1) * coarse_block]) / coarse_block for j in whole]
    for q in heads:
        for j, p in zip(whole, softmax_row([scale * float(q @ mean) for mean in means]), strict=True):
            liking[j] = liking.get(j, 0.0) + p
    last = visible[-1] // coarse_block
    read = {0, last, max(0, last - 1)}
    for j in sorted((j for j in liking if j not in read), key=lambda j: (-liking[j], j)):
        if len(read) < n_coarse:
            read.add(j)
    return [c for c in visible if c // coarse_block in read]


def chosen_blocks(heads: list[Array], compressed_keys: list[Array], t: int, *, l: int, d: int, l_sel: int, n_sel: int,
                  scale: float, visible: list[int], coarse_block: int = 0) -> list[int]:  # fmt: skip
    """The selection blocks of one query and group: counted token by token, stride by stride. `visible`: the compressed
    entries that it reads; with coarse blocks, a block that none of them covers is chosen only if all blocks are."""
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
    candidates = [j for j in score if j not in chosen]
    if coarse_block and last_block >= n_sel:
        covered = {token // l_sel for c in visible for token in range(c * d, c * d + l)}
        candidates = [j for j in candidates if j in covered]
    ranked = sorted(candidates, key=lambda j: (-score[j], j))
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
              coarse_block: int = 0, n_coarse: int = 16,
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
            seen = entries_read(heads, c_keys, t, l=l, d=d, coarse_block=coarse_block, n_coarse=n_coarse, scale=scale)
            sizes = dict(l=l, d=d, l_sel=l_sel, n_sel=n_sel, coarse_block=coarse_block)
            blocks = chosen_blocks(heads, c_keys, t, **sizes, scale=scale, visible=seen)
            picked = [i for i in range(t + 1) if i // l_sel in blocks]
            near = window_tokens(t, w)
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
                if gate == "tanh":
                    shares = [math.tanh(logits[0]), 2 * shares[1], math.tanh(logits[2])]
                for share, part in zip(shares, parts, strict=True):
                    out[t, h * d_v : h * d_v + d_v] += share * part
    return out @ weights["w_out.weight"].T + weights.get("w_out.bias", np.zeros(1))


def merged_layer(x: Array, weights: dict[str, Array], *, n_heads: int, n_kv_groups: int, d_k: int, d_v: int, l: int,
                 d: int, l_sel: int, n_sel: int, w: int, rope_compressed: str, qk_norm_eps: float = 1e-6,
                 coarse_block: int = 0, n_coarse: int = 16) -> Array:  # fmt: skip
    """A whole layer of kind `merged` on one document x [S, D]: every query attends once, to the union of its window and
    of the blocks that a query at the last token before that window would choose."""
    scale, per_group = 1 / math.sqrt(d_k), n_heads // n_kv_groups
    out = np.zeros((len(x), n_heads * d_v))

    def projected(name: str, row: int, width: int, token: Array) -> Array:
        made = weights[f"{name}.weight"][row : row + width] @ token
        made = made + weights.get(f"{name}.bias", np.zeros(row + width))[row : row + width]
        norm = weights.get(name.replace("w_", "") + "_norm.weight")
        return made if norm is None else made / math.sqrt(float(made @ made) / width + qk_norm_eps) * norm

    phi = {name.removeprefix("phi_k."): value for name, value in weights.items() if name.startswith("phi_k.")}
    for g in range(n_kv_groups):
        straight = [projected("w_k", g * d_k, d_k, token) for token in x]
        keys = [rotated(key, t, 500_000.0, 1.0) for t, key in enumerate(straight)]
        values = [projected("w_v", g * d_v, d_v, token) for token in x]
        entries = []
        for c in complete_blocks(len(x) - 1, l, d):
            if rope_compressed == "after":
                entry = rotated(compress_block(straight[c * d : c * d + l], phi, g), c * d + l - 1, 500_000.0, 1.0)
            else:
                entry = compress_block(keys[c * d : c * d + l], phi, g)
            entries.append(entry)
        for t, token in enumerate(x):
            rows = [(g * per_group + r) * d_k for r in range(per_group)]
            heads = [rotated(projected("w_q", row, d_k, token), t, 500_000.0, 1.0) for row in rows]
            read = window_tokens(t, w)
            last_far = read[0] - 1
            if last_far >= 0:
                coarse = dict(coarse_block=coarse_block, n_coarse=n_coarse)
                seen = entries_read(heads, entries, last_far, l=l, d=d, **coarse, scale=scale)
                sizes = dict(l=l, d=d, l_sel=l_sel, n_sel=n_sel, coarse_block=coarse_block)
                blocks = chosen_blocks(heads, entries, last_far, **sizes, scale=scale, visible=seen)
                read = [i for i in range(last_far + 1) if i // l_sel in blocks] + read
            for r, q in enumerate(heads):
                h = g * per_group + r
                out[t, h * d_v : (h + 1) * d_v] = attend_to(
                    q, [keys[i] for i in read], [values[i] for i in read], d_v, scale
                )
    return out @ weights["w_out.weight"].T + weights.get("w_out.bias", np.zeros(1))
