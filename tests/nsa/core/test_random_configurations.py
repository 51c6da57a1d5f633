"""Random layers, inputs and ways to call them, against the oracle: outputs, and gradients of a part of them.

A case is a number: `Case(number)` draws everything from it, so that a failure is repeated by its number. Choices of
blocks that hang on less than rounding are not compared; exact ties are.
"""

import random
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa.core.nsa_attention import NSAAttention
from tests import oracle
from tests.attention_options import GATES, GATES_PER, KV_PROJECTIONS, PHIS, PHIS_OF_UNROTATED_KEYS, PHIS_WITH_POS_EMB
from tests.backends import RUN_HERE
from tests.shapes import fp64_backends

CASES, PARTS, BY_DAY = 500, 10, 4
LARGEST_SCORE = 1e4
"""Of the values that are called large."""
BACKENDS = [name for name in RUN_HERE if name != "triton"]  # interpreted, it takes seconds for each case
KINDS = ["nsa"] * 6 + ["merged"] * 3 + ["global", "window", "dense"]
WAYS = ["whole", "packed", "left", "right", "chunks", "tokens", "ragged"]
VALUES = ["ordinary"] * 5 + ["large", "large", "equal tokens", "zero queries", "zeros"]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Of the largest number of an output."""
LARGE_TOLERANCE = 2e-5 * LARGEST_SCORE
"""Of fp32 with large scores, whose error is of that size; all backends have the same."""
UNDECIDED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Difference of two blocks' scores below which rounding may decide."""


class Case:
    """One configuration with its inputs: rows, or documents of one row."""

    def __init__(self, number: int) -> None:
        self.number, draw = number, random.Random(number)
        self.backend, self.kind, self.way = draw.choice(BACKENDS), draw.choice(KINDS), draw.choice(WAYS)
        narrow = [torch.float32, torch.float32, torch.bfloat16]
        self.dtype = draw.choice([torch.float64, torch.float64, *narrow] if self.backend in fp64_backends() else narrow)
        self.values = "ordinary" if self.dtype == torch.bfloat16 else draw.choice(VALUES)
        self.arguments = self._arguments(draw)
        longest = draw.choice([1, 7, 24, 24, 40])
        self.lengths = [draw.randint(0 if self.way == "packed" else 1, longest) for _ in range(draw.randint(1, 3))]
        if self.way in ("whole", "chunks", "tokens") or not any(self.lengths):
            self.lengths = [longest] * len(self.lengths)
        self.pages = draw.random() < 0.5
        self.draw = draw

    def __repr__(self) -> str:
        named = (f"{name}={value}" for name, value in vars(self).items() if name != "draw")
        return f"Case({', '.join(named)})"

    def _arguments(self, draw: random.Random) -> dict[str, Any]:
        d, groups = draw.randint(1, 5), draw.randint(1, 3)
        phi = draw.choice(PHIS)
        rotated_before = ["before"] * (phi not in PHIS_OF_UNROTATED_KEYS)
        sizes = dict(
            dim=draw.randint(1, 12), n_heads=groups * draw.randint(1, 4), n_kv_groups=groups,
            d_k=2 * draw.randint(1, 5), d_v=draw.randint(1, 9), l=d * draw.randint(1, 4), d=d,
            l_sel=d * draw.randint(1, 4), n_sel=draw.randint(3, 5), w=draw.randint(1, 16),
        )  # fmt: skip
        kv, qk_norm = draw.choice(KV_PROJECTIONS), draw.random() < 0.3
        options = dict(
            phi=phi, phi_pos_emb=phi in PHIS_WITH_POS_EMB and draw.random() < 0.5, gate=draw.choice(GATES),
            gate_per=draw.choice(GATES_PER), gate_temperature=draw.choice([1.0, 0.5, 2.0]), kv=kv,
            rope_base=draw.choice([100.0, 500_000.0]), rope_scale=draw.choice([1.0, 1.0, 4.0]),
            rope=draw.choice(["scaled", "scaled", "plain", "none"]),
            rope_compressed=draw.choice(["auto", "after", *rotated_before]),
            rotary_dim=draw.choice([None, None, 2 * draw.randint(1, sizes["d_k"] // 2)]), qk_norm=qk_norm,
            qk_norm_per=draw.choice(["head", "layer"]) if qk_norm and kv == "shared" else "head",
            bias=draw.random() < 0.3, out_bias=draw.random() < 0.3,
        )  # fmt: skip
        if draw.random() < 0.3 and self.kind in ("nsa", "global", "merged"):
            blocks = -(-sizes["l"] // sizes["l_sel"]) * draw.randint(1, 2)
            entries = blocks * sizes["l_sel"] // d
            options |= dict(coarse_block=entries, n_coarse=max(3, -(-sizes["n_sel"] // blocks)))
        return sizes | options

    def module_and_rows(self) -> tuple[NSAAttention, list[Tensor]]:
        """The layer, and the tokens of each row or document [S, D]."""
        torch.manual_seed(self.number)
        module = NSAAttention(**self.arguments, kernels=self.backend, kind=self.kind).double().eval()  # type: ignore[arg-type]
        rows = [torch.randn(length, module.dim, dtype=torch.float64) for length in self.lengths]
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(torch.randn_like(parameter) * (1.0 if "gates" in name else 0.3))
            if self.values == "zeros":
                rows = [torch.zeros_like(row) for row in rows]
            elif self.values == "equal tokens":
                rows = [row[:1].expand_as(row).clone() for row in rows]
            elif self.values in ("zero queries", "large"):
                of_queries = [p for name, p in module.named_parameters() if name.startswith(("w_q.", "q_norm."))]
                factor = 0.0 if self.values == "zero queries" else LARGEST_SCORE / self._highest_score(module, rows)
                for parameter in of_queries[-1:] if module.q_norm is not None else of_queries:
                    parameter.mul_(factor)
            module.to(self.dtype)
            rows = [row.to(self.dtype) for row in rows]
        return module, rows

    def _highest_score(self, module: NSAAttention, rows: list[Tensor]) -> float:
        """Upper bound of the score of a query and a key, from their lengths."""
        x = torch.cat(rows)[None]
        q, streams = module.project(x, module.locate(x).tables)
        keys = [k for k in (streams.k_cmp, streams.k_sel, streams.k_win) if k.numel()]
        longest_key = max(float(k.norm(dim=-1).max()) for k in keys)
        return max(1e-3, float(q.norm(dim=-1).max()) * longest_key * module.scale)

    def outputs(self, module: NSAAttention, rows: list[Tensor]) -> list[Tensor]:
        """Call the layer in the case's way and return its output for each row or document."""
        if self.way == "packed":
            cu = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
            return list(module(torch.cat(rows)[None], cu_doc_lens=cu)[0].split(self.lengths))
        longest = max(self.lengths)
        if self.way == "left":
            x = torch.stack([torch.nn.functional.pad(row, (0, 0, longest - len(row), 0)) for row in rows])
            mask = torch.tensor([[0] * (longest - n) + [1] * n for n in self.lengths])
            return [out[longest - n :] for out, n in zip(module(x, attention_mask=mask), self.lengths, strict=True)]
        x = torch.stack([torch.nn.functional.pad(row, (0, 0, 0, longest - len(row))) for row in rows])
        if self.way == "whole":
            return list(module(x))
        if self.way == "right":
            mask = torch.tensor([[1] * n + [0] * (longest - n) for n in self.lengths])
            return [out[:n] for out, n in zip(module(x, attention_mask=mask), self.lengths, strict=True)]
        return self._cached(module, x)

    def _cached(self, module: NSAAttention, x: Tensor) -> list[Tensor]:
        pages = len(x) * (-(-x.shape[1] // module.geometry.l_sel) + 1) if self.pages else None
        cache, outputs = module.new_cache(len(x), x.shape[1], pages=pages), [[] for _ in x]
        for begin, end in pairwise([0, *self._ends(x.shape[1])]):
            new = torch.tensor([min(max(n - begin, 0), end - begin) for n in self.lengths])
            out = module(x[:, begin:end], cache=cache, **(dict(new_lens_B=new) if self.way == "ragged" else {}))
            for row, n, part in zip(outputs, new.tolist(), out, strict=True):
                row.append(part[:n])
        return [torch.cat(row) for row in outputs]

    def _ends(self, length: int) -> Iterator[int]:
        at = 0
        while at < length:
            at = min(length, at + (1 if self.way == "tokens" else self.draw.choice([1, 1, 2, 5, 17])))
            yield at

    def expected(self, module: NSAAttention, rows: list[Tensor], gaps: list[list[list[float]]]) -> list[np.ndarray]:
        weights = {name: value.detach().double().numpy() for name, value in module.state_dict().items()}
        arguments, outputs = self.arguments, []
        for row, of_tokens in zip(rows, gaps, strict=True):
            x = row.detach().double().numpy()
            if self.kind in ("window", "dense"):
                outputs.append(
                    oracle.token_layer(x, weights, **arguments | (dict(w=None) if self.kind == "dense" else {}))
                )
            elif self.kind == "merged":
                outputs.append(oracle.merged_layer(x, weights, **arguments, gaps=of_tokens))
            else:
                branches = ("cmp", "sel", "win")[: 2 if self.kind == "global" else 3]
                outputs.append(oracle.nsa_layer(x, weights, **arguments, branches=branches, gaps=of_tokens))
        return outputs


def decided(gaps: list[list[float]], limit: float, ties: bool) -> np.ndarray:
    """Return which tokens choose their blocks by more than rounding, or, with `ties`, among equals."""
    return np.array([all(gap > limit or (ties and gap == 0) for gap in of_token) for of_token in gaps], dtype=bool)


def check(case: Case) -> None:
    module, rows = case.module_and_rows()
    gaps: list[list[list[float]]] = [[[] for _ in row] for row in rows]
    want = case.expected(module, rows, gaps)
    with torch.no_grad():
        got = case.outputs(module, rows)
    tolerance, undecided, ties = TOLERANCE[case.dtype], UNDECIDED[case.dtype], True
    if case.values == "large" and case.dtype == torch.float32:  # rounding of large scores, and of what underflows
        tolerance, undecided, ties = LARGE_TOLERANCE, LARGE_TOLERANCE, False
    for out, expected, of_tokens in zip(got, want, gaps, strict=True):
        compared = decided(of_tokens, undecided, ties)
        size = max(1.0, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(out.double().numpy()[compared], expected[compared], rtol=0, atol=tolerance * size)
    if case.dtype == torch.float64 and case.values == "ordinary" and case.way in ("whole", "packed", "left", "right"):
        check_gradients(case, module, rows, gaps)


def check_gradients(case: Case, module: NSAAttention, rows: list[Tensor], gaps: list[list[list[float]]]) -> None:
    """Along one direction of all parameters and inputs, against differences of the oracle's outputs."""
    parts = [*module.parameters(), *rows]
    directions = [torch.randn_like(part) for part in parts]
    shares = [torch.randn(len(row), module.dim, dtype=torch.float64) for row in rows]
    for share, of_tokens in zip(shares, gaps, strict=True):
        share[~torch.from_numpy(decided(of_tokens, 1e-3, ties=False))] = 0
    for row in rows:
        row.requires_grad_()
    sum((out * share).sum() for out, share in zip(case.outputs(module, rows), shares, strict=True)).backward()
    got = sum(
        float((part.grad * direction).sum())
        for part, direction in zip(parts, directions, strict=True)
        if part.grad is not None
    )
    step, sides = 1e-6, []
    for sign in (1, -1):
        with torch.no_grad():
            for part, direction in zip(parts, directions, strict=True):
                part.add_(direction, alpha=sign * step)
            outputs = case.expected(module, rows, [[[] for _ in row] for row in rows])
            sides.append(sum((out * share.numpy()).sum() for out, share in zip(outputs, shares, strict=True)))
            for part, direction in zip(parts, directions, strict=True):
                part.sub_(direction, alpha=sign * step)
    want = (sides[0] - sides[1]) / (2 * step)
    assert got == pytest.approx(want, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    "part", [part if part < BY_DAY else pytest.param(part, marks=pytest.mark.nightly) for part in range(PARTS)]
)
def test_random_configurations_equal_the_oracle(part: int) -> None:
    """A `ConfigError` fails too: every case is one that the rules allow."""
    failed = []
    for number in range(part, CASES, PARTS):
        case = Case(number)
        try:
            check(case)
        except Exception as error:  # noqa: BLE001 (every kind of failure is one of the case, which must be named)
            failed.append(f"{case}: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} cases\n" + "\n".join(failed)
