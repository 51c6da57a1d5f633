"""An oracle for NSA that shares nothing with the package: numpy in fp64, Python loops, one query at a time.

It is written from the paper's sentences, not from the code it checks, and is slow on purpose: every token, head, block
and key is visited by name.
"""

import math
from typing import NamedTuple

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


class HeadGradients(NamedTuple):
    """One head of one query: what it read, and gradients of its query, keys and values."""

    out: Array
    lse: float
    q: Array
    keys: list[Array]
    values: list[Array]


def attend_and_differentiate(q: Array, keys: list[Array], values: list[Array], scale: float, dout: Array,
                             dlse: float) -> HeadGradients:  # fmt: skip
    """One head of one query over the listed keys, and its gradients for those of its output and log-sum-exp."""
    if not keys:
        return HeadGradients(np.zeros(len(dout)), -math.inf, np.zeros(len(q)), [], [])
    scores = [scale * float(q @ k) for k in keys]
    shares = softmax_row(scores)
    out = attend_to(q, keys, values, len(dout), scale)
    pulls = [p * (float(v @ dout) - float(out @ dout) + dlse) for p, v in zip(shares, values, strict=True)]
    dq = sum((scale * pull * k for pull, k in zip(pulls, keys, strict=True)), np.zeros(len(q)))
    top = max(scores)
    lse = top + math.log(sum(math.exp(s - top) for s in scores))
    return HeadGradients(out, lse, dq, [scale * pull * q for pull in pulls], [p * dout for p in shares])


def tokens_of_blocks(t: int, blocks: list[int], block_size: int) -> list[int]:
    """Tokens up to token t that lie in one of the blocks."""
    return [token for token in range(t + 1) if token // block_size in blocks]


def window_tokens(t: int, w: int) -> list[int]:
    """The query's own token and the w − 1 before it, as far as they exist."""
    return [i for i in range(t + 1) if t - i <= w - 1]


def complete_blocks(t: int, l: int, d: int) -> list[int]:
    """Compressed blocks, numbered by their stride, that end at or before token t."""
    blocks, block = [], 0
    while block * d + (l - 1) <= t:
        blocks.append(block)
        block += 1
    return blocks


def take_best(taken: set[int], score: dict[int, float], candidates: list[int], n: int, gaps: list[float]) -> None:
    """Add the candidates with the highest scores, the lower number first where these are equal, until n are taken. By
    how much the last one that is taken beats the first that is not is appended to `gaps`."""
    ranked = sorted(candidates, key=lambda j: (-score[j], j))
    n_best = max(0, n - len(taken))
    if 0 < n_best < len(ranked):
        gaps.append(score[ranked[n_best - 1]] - score[ranked[n_best]])
    taken.update(ranked[:n_best])


def entries_read(heads: list[Array], compressed_keys: list[Array], t: int, *, l: int, d: int, coarse_block: int,
                 n_coarse: int, scale: float, gaps: list[float] | None = None) -> list[int]:  # fmt: skip
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
    take_best(read, liking, [j for j in liking if j not in read], n_coarse, [] if gaps is None else gaps)
    return [c for c in visible if c // coarse_block in read]


def chosen_blocks(heads: list[Array], compressed_keys: list[Array], t: int, *, l: int, d: int, l_sel: int, n_sel: int,
                  scale: float, visible: list[int], coarse_block: int = 0,
                  gaps: list[float] | None = None) -> list[int]:  # fmt: skip
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
    take_best(chosen, score, candidates, n_sel, [] if gaps is None else gaps)
    return sorted(chosen)


def rotated(x: Array, pos: float, base: float, scale: float, width: int | None = None) -> Array:
    """`width`: how many channels, the first ones, are rotated; default all."""
    width = len(x) if width is None else width
    half = width // 2
    out = x.copy()
    for i in range(half):
        angle = pos / scale / base ** (2 * i / width)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def rotated_as(rope: str, x: Array, pos: float, base: float, scale: float, width: int | None) -> Array:
    """Rotate by a layer's kind of RoPE: none at all, without the scale, or with it."""
    return x if rope == "none" else rotated(x, pos, base, scale if rope == "scaled" else 1.0, width)


def projected_rows(weights: dict[str, Array], name: str, row: int, width: int, token: Array, eps: float) -> Array:
    """`width` rows of a projection, normalised where the layer has QK-norm: by themselves, or with all rows."""
    out = weights[f"{name}.weight"] @ token + weights.get(f"{name}.bias", np.zeros(1))
    rows = slice(row, row + width)
    norm = weights.get(name.replace("w_", "") + "_norm.weight")
    if norm is not None and len(norm) == len(out):
        return (out / math.sqrt(float(out @ out) / len(out) + eps) * norm)[rows]
    out = out[rows]
    return out if norm is None else out / math.sqrt(float(out @ out) / width + eps) * norm


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
              coarse_block: int = 0, n_coarse: int = 16, rope: str = "scaled", rotary_dim: int | None = None,
              branches: tuple[str, ...] = ("cmp", "sel", "win"), gaps: list[list[float]] | None = None,
              **_: object) -> Array:  # fmt: skip
    """A whole NSAAttention on one document x [S, D], from its state dict. `branches`: without the last it is a layer
    of kind `global`. `gaps`: one list per token, to which the gaps of its choices are appended (`take_best`)."""
    n_tokens, heads_per_group, scale = len(x), n_heads // n_kv_groups, 1 / math.sqrt(d_k)
    out = np.zeros((n_tokens, n_heads * d_v))
    reads_channels = any(f"phi_k.{name}" in weights for name in ("w_score", "w_block", "w_in"))
    if rope_compressed == "auto":
        rope_compressed = "after" if reads_channels else "before"

    def turn(vector: Array, pos: float) -> Array:
        return rotated_as(rope, vector, pos, rope_base, rope_scale, rotary_dim)

    def projected(name: str, row: int, width: int, token: Array) -> Array:
        return projected_rows(weights, name, row, width, token, qk_norm_eps)

    for g in range(n_kv_groups):
        keys, values = {}, {}
        for b, branch in enumerate(branches):
            key_place = g * len(branches) + b if kv == "per_branch" else g
            value_place = g if kv == "shared" else g * len(branches) + b
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
            of_token = None if gaps is None else gaps[t]
            coarse = dict(coarse_block=coarse_block, n_coarse=n_coarse)
            seen = entries_read(heads, c_keys, t, l=l, d=d, **coarse, scale=scale, gaps=of_token)
            sizes = dict(l=l, d=d, l_sel=l_sel, n_sel=n_sel, coarse_block=coarse_block)
            blocks = chosen_blocks(heads, c_keys, t, **sizes, scale=scale, visible=seen, gaps=of_token)
            picked = [i for i in range(t + 1) if i // l_sel in blocks]
            near = window_tokens(t, w)
            for r, q in enumerate(heads):
                h = g * heads_per_group + r
                parts = [attend_to(q, [c_keys[c] for c in seen], [c_values[c] for c in seen], d_v, scale)]
                for branch, tokens in list(zip(("sel", "win"), (picked, near), strict=True))[: len(branches) - 1]:
                    its_keys, its_values = ([stream[branch][i] for i in tokens] for stream in (keys, values))
                    parts.append(attend_to(q, its_keys, its_values, d_v, scale))
                first = (h if gate_per == "head" else g) * len(branches)
                gate_rows = slice(first, first + len(branches))
                logits = weights["gates.proj.weight"][gate_rows] @ x[t] + weights["gates.proj.bias"][gate_rows]
                logits = logits / gate_temperature
                shares = softmax_row(list(logits)) if gate == "softmax" else [1 / (1 + math.exp(-z)) for z in logits]
                if gate == "tanh":
                    shares = [2 * shares[1] if b == 1 else math.tanh(z) for b, z in enumerate(logits)]
                for share, part in zip(shares, parts, strict=True):
                    out[t, h * d_v : h * d_v + d_v] += share * part
    return out @ weights["w_out.weight"].T + weights.get("w_out.bias", np.zeros(1))


def merged_layer(x: Array, weights: dict[str, Array], *, n_heads: int, n_kv_groups: int, d_k: int, d_v: int, l: int,
                 d: int, l_sel: int, n_sel: int, w: int, rope_compressed: str, qk_norm_eps: float = 1e-6,
                 coarse_block: int = 0, n_coarse: int = 16, rope_base: float = 500_000.0, rope_scale: float = 1.0,
                 rope: str = "scaled", rotary_dim: int | None = None, gaps: list[list[float]] | None = None,
                 **_: object) -> Array:  # fmt: skip
    """A whole layer of kind `merged` on one document x [S, D]: every query attends once, to the union of its window and
    of the blocks that a query at the last token before that window would choose."""
    scale, per_group = 1 / math.sqrt(d_k), n_heads // n_kv_groups
    out = np.zeros((len(x), n_heads * d_v))

    def turn(vector: Array, pos: float) -> Array:
        return rotated_as(rope, vector, pos, rope_base, rope_scale, rotary_dim)

    def projected(name: str, row: int, width: int, token: Array) -> Array:
        return projected_rows(weights, name, row, width, token, qk_norm_eps)

    if rope_compressed == "auto":
        rope_compressed = "after" if any(f"phi_k.{n}" in weights for n in ("w_score", "w_block", "w_in")) else "before"
    phi = {name.removeprefix("phi_k."): value for name, value in weights.items() if name.startswith("phi_k.")}
    for g in range(n_kv_groups):
        straight = [projected("w_k", g * d_k, d_k, token) for token in x]
        keys = [turn(key, t) for t, key in enumerate(straight)]
        values = [projected("w_v", g * d_v, d_v, token) for token in x]
        entries = []
        for c in complete_blocks(len(x) - 1, l, d):
            if rope_compressed == "after":
                entry = turn(compress_block(straight[c * d : c * d + l], phi, g), c * d + l - 1)
            else:
                entry = compress_block(keys[c * d : c * d + l], phi, g)
            entries.append(entry)
        for t, token in enumerate(x):
            rows = [(g * per_group + r) * d_k for r in range(per_group)]
            heads = [turn(projected("w_q", row, d_k, token), t) for row in rows]
            read = window_tokens(t, w)
            last_far = read[0] - 1
            if last_far >= 0:
                coarse = dict(coarse_block=coarse_block, n_coarse=n_coarse)
                of_token = None if gaps is None else gaps[t]
                seen = entries_read(heads, entries, last_far, l=l, d=d, **coarse, scale=scale, gaps=of_token)
                sizes = dict(l=l, d=d, l_sel=l_sel, n_sel=n_sel, coarse_block=coarse_block)
                blocks = chosen_blocks(heads, entries, last_far, **sizes, scale=scale, visible=seen, gaps=of_token)
                read = [i for i in range(last_far + 1) if i // l_sel in blocks] + read
            for r, q in enumerate(heads):
                h = g * per_group + r
                out[t, h * d_v : (h + 1) * d_v] = attend_to(
                    q, [keys[i] for i in read], [values[i] for i in read], d_v, scale
                )
    return out @ weights["w_out.weight"].T + weights.get("w_out.bias", np.zeros(1))


def token_layer(x: Array, weights: dict[str, Array], *, n_heads: int, n_kv_groups: int, d_k: int, d_v: int,
                w: int | None, qk_norm_eps: float = 1e-6, rope_base: float = 500_000.0, rope_scale: float = 1.0,
                rope: str = "scaled", rotary_dim: int | None = None, **_: object) -> Array:  # fmt: skip
    """A layer of kind `window`, or without w of kind `dense`, on one document x [S, D]."""
    scale, per_group = 1 / math.sqrt(d_k), n_heads // n_kv_groups
    out = np.zeros((len(x), n_heads * d_v))
    for h in range(n_heads):
        g, keys, values = h // per_group, [], []
        for t, token in enumerate(x):
            parts = [
                projected_rows(weights, name, at * d_k, d_k, token, qk_norm_eps)
                for name, at in (("w_q", h), ("w_k", g))
            ]
            q, key = (rotated_as(rope, part, t, rope_base, rope_scale, rotary_dim) for part in parts)
            keys.append(key)
            values.append(projected_rows(weights, "w_v", g * d_v, d_v, token, qk_norm_eps))
            read = window_tokens(t, len(x) if w is None else w)
            out[t, h * d_v : (h + 1) * d_v] = attend_to(
                q, [keys[i] for i in read], [values[i] for i in read], d_v, scale
            )
    return out @ weights["w_out.weight"].T + weights.get("w_out.bias", np.zeros(1))
