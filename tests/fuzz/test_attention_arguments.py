"""Fuzz targets: arguments of `nsa_attention` and of the KV cache; known attacks are in `tests/nsa/core`.

Oracles: the reference implementation, and a forward pass over the tokens that a cache should hold.
"""

import json
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from nsa.core.functional import nsa_attention
from nsa.core.nsa_attention import NSAAttention
from nsa.errors import NSAError
from nsa.geometry import Geometry
from tests.fuzz.campaign import FuzzCampaign
from tests.fuzz.mutations import STRANGE_VALUES
from tests.shapes import attention_args

DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16", "int64", "bool", "complex64")
}
LAYOUTS = ("transposed", "strided", "expanded", "flat", "zeros", "requires_grad")
HUGE = (-(2**63), -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
ROUNDING = 2e-4


@st.composite
def attention_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes, and up to two changes of the arguments."""
    d = draw(st.sampled_from((1, 2, 4, 4, 8)))
    size = st.integers(1, 3)
    sizes = dict(
        B=draw(st.integers(0, 2)), S=draw(st.integers(0, 40)), G=draw(size), R=draw(size),
        K=draw(st.integers(1, 9)), V=draw(st.integers(1, 9)),
    )  # fmt: skip
    geometry = dict(
        l=d * draw(size), d=d, l_sel=d * draw(size), n_sel=draw(st.integers(3, 5)), w=draw(st.integers(1, 20))
    )
    far = st.sampled_from(HUGE)
    tensor = st.sampled_from(("q", "k", "v", "gates"))
    change = st.one_of(
        st.tuples(st.just("size"), tensor, st.tuples(st.integers(0, 3), st.integers(-2, 2)).map(list)),
        st.tuples(st.just("dtype"), tensor, st.sampled_from(sorted(DTYPES))),
        st.tuples(st.just("layout"), tensor, st.sampled_from(LAYOUTS)),
        st.tuples(st.just("values"), tensor, st.sampled_from(("nan", "inf", "large"))),
        st.tuples(st.just("geometry"), st.sampled_from(sorted(geometry)), st.sampled_from((2, 3, 7, 2**16, *HUGE))),
        st.tuples(st.just("scale"), st.just(""), st.sampled_from([0.0, -1.0, 1e30, 0.5, *STRANGE_VALUES])),
        st.tuples(st.just("cu_seqlens"), st.just(""), st.lists(st.integers(-1, 90) | far, max_size=5)),
        st.tuples(st.just("documents"), st.just(""), st.lists(st.integers(0, 30), min_size=1, max_size=4)),
        st.tuples(st.just("blocks"), st.just(""), st.lists(st.integers(-1, 6) | far, max_size=5)),
        st.tuples(st.just("kernels"), st.just(""), st.sampled_from(("portable", "cpu", "triton", "", "nope", None, 3))),
    )  # fmt: skip
    changes = draw(st.lists(change.map(list), max_size=2))
    return dict(sizes=sizes, geometry=geometry, changes=changes, seed=draw(st.integers(0, 99)))


def changed_layout(x: Tensor, how: str) -> Tensor:
    if how == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x
    if how == "strided":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2] if x.dim() else x
    if how == "expanded":
        return x[:, :1].expand(x.shape) if x.dim() > 1 and x.shape[1] else x
    if how == "flat":
        return x.flatten()
    if how == "zeros":
        return torch.zeros_like(x)
    return x.requires_grad_(x.is_floating_point())


def arguments(case: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Arguments of `nsa_attention`, and whether its result can be compared number by number."""
    torch.manual_seed(case["seed"])
    n, geometry, comparable = case["sizes"], dict(case["geometry"]), True
    heads = n["G"] * n["R"]
    shapes = {
        "q": [n["B"], n["S"], heads, n["K"]],
        "k": [n["B"], n["S"], n["G"], n["K"]],
        "v": [n["B"], n["S"], n["G"], n["V"]],
        "gates": [n["B"], n["S"], heads, 3],
    }
    for what, name, how in case["changes"]:
        if what == "size":
            shapes[name][how[0]] = max(0, shapes[name][how[0]] + how[1])
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    options: dict[str, Any] = {}
    for what, name, how in case["changes"]:
        if what == "dtype":
            tensors[name] = tensors[name].to(DTYPES[how])
            comparable = False
        elif what == "layout":
            tensors[name] = changed_layout(tensors[name], how)
        elif what == "values" and tensors[name].numel() and tensors[name].is_floating_point():
            with torch.no_grad():
                tensors[name][(0,) * tensors[name].dim()] = {"nan": torch.nan, "inf": torch.inf, "large": 1e30}[how]
            comparable = False
        elif what == "geometry":
            geometry[name] = how
        elif what == "documents":
            ends = torch.tensor([0, *how]).cumsum(0)
            total = n["B"] * n["S"]
            options["cu_seqlens"] = [*ends[ends < total].tolist(), total]
        elif what == "blocks":
            options["blocks"] = torch.tensor(how, dtype=torch.int64).expand(n["B"], n["S"], n["G"], len(how))
        elif what in ("scale", "cu_seqlens", "kernels"):
            options[what] = how
    options["geometry"] = Geometry(**geometry)
    operands = [tensors[name] for name in ("q", "k", "v", "gates")]
    return dict(zip(("q_BSHK", "k", "v", "gates_BSH3"), operands, strict=True)) | options, comparable


def test_attention_arguments(fuzz: FuzzCampaign) -> None:
    """Any arguments are refused in words, or the result is that of the reference, number by number."""

    def check(case: dict[str, Any]) -> None:
        call, comparable = arguments(case)
        out = nsa_attention(**call)
        if (blocks := call.get("blocks")) is not None and blocks.numel():  # a block that is given twice counts once
            once = blocks[0, 0, 0].unique()
            call["blocks"] = once.expand(*blocks.shape[:3], len(once))
        want = nsa_attention(**(call | {"kernels": "reference"}))
        assert isinstance(out, Tensor)
        assert isinstance(want, Tensor)
        assert out.shape == want.shape
        assert out.dtype == want.dtype
        if comparable and (scale := call.get("scale") or 0.0) < 10 and scale > -10:
            torch.testing.assert_close(out, want, atol=ROUNDING, rtol=ROUNDING)
            if out.requires_grad:
                out.sum().backward()

    fuzz.run(attention_cases(), check, examples=700, read_seed=json.loads)


BATCH, LONGEST, REWIND, WIDTH = 2, 48, 6, 24
WHOLE = st.one_of(st.integers(-2, 60), st.sampled_from(HUGE))
ROWS = st.integers(0, BATCH - 1) | WHOLE
CACHE_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 12), st.none()),
        st.tuples(st.just("append"), st.integers(1, 12), st.none()),
        st.tuples(st.just("append"), st.just(1), st.none()),
        st.tuples(st.just("append"), st.integers(1, 9), st.lists(st.integers(0, 9), min_size=BATCH, max_size=BATCH)),
        st.tuples(st.just("append"), st.integers(1, 9), st.lists(WHOLE, max_size=3)),
        st.tuples(st.just("crop"), st.integers(0, REWIND + 1), st.none()),
        st.tuples(st.just("crop_to"), st.just(0), st.one_of(WHOLE, st.lists(WHOLE, max_size=3))),
        st.tuples(st.just("reorder"), st.just(0), st.lists(ROWS, min_size=1, max_size=3)),
        st.tuples(st.just("reset"), st.just(0), st.one_of(st.none(), st.lists(ROWS, max_size=2))),
    ).map(list),
    min_size=1,
    max_size=10,
)  # fmt: skip


def test_cache_arguments(fuzz: FuzzCampaign) -> None:
    """A cache does what it is asked to or changes nothing; its rows are those of a fresh forward pass."""
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny")).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)

    def check(steps: list[list[Any]]) -> None:
        cache = module.new_cache(BATCH, LONGEST, REWIND)
        generator = torch.Generator().manual_seed(len(steps))
        rows = [torch.zeros(0, WIDTH) for _ in range(BATCH)]
        refused: NSAError | None = None
        for what, number, values in steps:
            before = cache.length_B.tolist()
            assert before == [len(row) for row in rows]
            try:
                if what == "append":
                    x = torch.randn(BATCH, number, WIDTH, generator=generator)
                    new = values if values is not None else [number] * BATCH
                    with torch.no_grad():
                        new_lens = None if values is None else torch.tensor(values, dtype=torch.int64)
                        out = module(x, cache=cache, new_lens_B=new_lens)
                        rows = [torch.cat([row, x[b, : new[b]]]) for b, row in enumerate(rows)]
                        for b, row in enumerate(rows):
                            if new[b]:
                                want = module(row[None])[0, -new[b] :]
                                torch.testing.assert_close(out[b, : new[b]], want, atol=ROUNDING, rtol=ROUNDING)
                elif what == "crop":
                    cache.crop([max(0, length - number) for length in before])
                    rows = [row[: max(0, len(row) - number)] for row in rows]
                elif what == "crop_to":
                    cache.crop(values)
                    ends = values if isinstance(values, list) else [values] * BATCH
                    ends = [end if end >= 0 else max(0, len(row) + end) for row, end in zip(rows, ends, strict=True)]
                    rows = [row[: min(end, len(row))] for row, end in zip(rows, ends, strict=True)]
                elif what == "reorder":
                    cache.reorder(values)
                    rows = [rows[row] for row in values]
                else:
                    cache.reset(values)
                    rows = [row[:0] if values is None or b in values else row for b, row in enumerate(rows)]
            except NSAError as error:
                assert cache.length_B.tolist() == before
                refused = error
        if refused is not None:
            raise refused

    fuzz.run(CACHE_STEPS, check, examples=250, read_seed=json.loads)
