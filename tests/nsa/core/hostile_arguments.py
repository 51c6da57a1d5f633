"""Attacks on memory through public arguments. Run as a program: one line of JSON per attack, in order.

A crash ends the process in the middle of the list, which `test_hostile_arguments.py` sees; it starts the rest again.

    python -m tests.nsa.core.hostile_arguments FIRST_ATTACK
"""

import copy
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa.core.functional import selected_attention
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import Positions
from nsa.errors import NSAError
from nsa.geometry import Geometry
from nsa.kernels import cpu
from nsa.kernels.interface import BranchInputs
from nsa.kernels.registry import BACKENDS, BackendRequest
from nsa.model.transformer import NSATransformer
from tests.shapes import attention_args

ATTACKS: dict[str, Callable[[], object]] = {}
REFUSED, HARMLESS = "refused", "harmless"
HUGE = 2**62


def attack(*cases: Any) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """An attack is stopped if it raises an error of ours, or returns True because the result is the right one."""

    def register(function: Callable[..., object]) -> Callable[..., object]:
        for case in cases or [None]:
            name = function.__name__ if case is None else f"{function.__name__}[{case!r}]"
            ATTACKS[name] = function if case is None else lambda case=case: function(case)
        return function

    return register


def make(**changes: Any) -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(**attention_args("tiny", **changes)).eval()


def filled(module: NSAAttention, batch: int, length: int = 40, room: int = 200) -> Any:
    cache = module.new_cache(batch, room)
    module(torch.randn(batch, length, 24), cache=cache)
    return cache


def steps(module: NSAAttention, cache: Any, batch: int, n: int = 40, **first: Any) -> None:
    module(torch.randn(batch, 1, 24), cache=cache, **first)
    for _ in range(n):
        module(torch.randn(batch, 1, 24), cache=cache)


# new_lens_B


@attack([-30, 1], [1, -2_000_000], [2, 1], [1_000_000, 0])
def new_lens_of_one_token(values: list[int]) -> None:
    module = make()
    steps(module, filled(module, 2), 2, new_lens_B=torch.tensor(values))


@attack([-3, 7], [8, 1])
def new_lens_of_a_chunk(values: list[int]) -> None:
    module = make()
    cache = filled(module, 2)
    module(torch.randn(2, 7, 24), cache=cache, new_lens_B=torch.tensor(values))
    steps(module, cache, 2)


@attack("scalar", "[1]", "[3]", "[2, 1]", "float", "bool", "meta")
def new_lens_that_are_no_lengths(kind: str) -> None:
    lengths = {
        "scalar": torch.tensor(1),
        "[1]": torch.ones(1, dtype=torch.int64),
        "[3]": torch.ones(3, dtype=torch.int64),
        "[2, 1]": torch.ones(2, 1, dtype=torch.int64),
        "float": torch.ones(2),
        "bool": torch.ones(2, dtype=torch.bool),
        "meta": torch.ones(2, dtype=torch.int64, device="meta"),
    }
    module = make()
    steps(module, filled(module, 2), 2, new_lens_B=lengths[kind])


@attack()
def new_lens_without_a_cache() -> None:
    make()(torch.randn(2, 9, 24), new_lens_B=torch.tensor([3, 4]))


# caches


@attack((1, 4), (4, 1), (3, 2), (0, 2))
def a_step_of_another_batch(batches: tuple[int, int]) -> None:
    module = make()
    steps(module, filled(module, batches[1]), batches[0])


@attack((1, 4), (2, 1))
def a_chunk_of_another_batch(batches: tuple[int, int]) -> None:
    module = make()
    module(torch.randn(batches[0], 9, 24), cache=filled(module, batches[1]))


@attack(
    dict(w=400),
    dict(l=16, l_sel=16),
    dict(n_sel=12),
    dict(n_kv_groups=1),
    dict(n_kv_groups=6),
    dict(d_k=16),
    dict(d_v=40),
)
def a_cache_of_another_module(changes: dict[str, int]) -> None:
    module = make(**changes)
    steps(module, filled(make(), 2), 2)


@attack(dict(n_heads=2), dict(n_heads=24))
def a_cache_of_a_module_with_other_heads(changes: dict[str, int]) -> bool:
    """Keys and values fit; what was prepared for the first module's queries does not."""
    first, second = make(), make(**changes)
    portable = make(**changes, kernels=BackendRequest(*["portable"] * 4))
    cache = filled(first, 2)
    steps(first, cache, 2, n=5)
    twin, x = copy.deepcopy(cache), torch.randn(2, 1, 24)
    return torch.allclose(second(x, cache=cache), portable(x, cache=twin), atol=1e-5)


@attack(torch.bfloat16, torch.float64)
def a_cache_of_another_dtype(dtype: torch.dtype) -> None:
    steps(make(), make().to(dtype).new_cache(2, 60), 2)


@attack([5, 0], [-1, 1], [HUGE, 0])
def reordering_by_rows_that_are_none(rows: list[int]) -> None:
    module = make()
    cache = filled(module, 2)
    cache.reorder(rows)
    steps(module, cache, 2)


@attack(-HUGE, HUGE, 7)
def cropping_far_and_decoding(length: int) -> bool:
    """Crop to nothing, not at all, or be refused: the rings have lost tokens."""
    module = make()
    cache = filled(module, 2)
    cache.crop(length)
    steps(module, cache, 2, n=3)
    return True


@attack(-(2**40), 2**40, 2**31)
def given_blocks_far_outside(block: int) -> bool:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 40, 6, 8), torch.randn(2, 40, 2, 8), torch.randn(2, 40, 2, 6)
    blocks = torch.tensor([0, block]).expand(2, 40, 2, 2)
    outputs = [
        selected_attention(q, k, v, blocks, geometry=make().geometry, kernels=backend)
        for backend in ("cpu", "reference")
    ]
    return torch.allclose(*outputs, atol=1e-5)


@attack()
def a_cache_on_another_device() -> None:
    steps(make(), make().to("meta").new_cache(2, 60), 2)


@attack(-30, -(2**40), 200, 10**6)
def a_cache_with_a_wrong_length(length: int) -> None:
    module = make()
    cache = filled(module, 2)
    steps(module, cache, 2, n=3)
    cache.length_B.fill_(length)
    steps(module, cache, 2, n=3)


@attack((0, 10), (2, 0), (-1, 10), (2, -5))
def a_cache_of_no_size(sizes: tuple[int, int]) -> None:
    make().new_cache(*sizes)


@attack()
def a_model_cache_of_another_depth() -> None:
    args = attention_args("tiny") | dict(dim=24)
    args.pop("dim")
    two, three = (NSATransformer(32, 24, n, **args) for n in (2, 3))
    three(torch.zeros(1, 4, dtype=torch.int64), cache=two.new_cache(1, 8))


class Held:
    """Stands where a probe does and keeps a forward pass inside until it is let go."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

    def record(self, *_: object, **__: object) -> None:
        self.inside.set()
        assert self.go_on.wait(60)


@attack(1, 9)
def a_cache_in_use_by_another_thread(n_new: int) -> None:
    module = make()
    cache = filled(module, 2)
    other, module.probe = module, Held()
    held = module.probe
    thread = threading.Thread(target=lambda: other(torch.randn(2, 1, 24), cache=cache))
    thread.start()
    try:
        assert held.inside.wait(60)
        module.probe = None
        module(torch.randn(2, n_new, 24), cache=cache)
    finally:
        held.go_on.set()
        thread.join()


@attack()
def a_model_cache_in_use_by_another_thread() -> None:
    args = attention_args("tiny")
    args.pop("dim")
    model = NSATransformer(32, 24, 2, **args).eval()
    cache = model.new_cache(1, 50)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    held = model.blocks[1].attention.probe = Held()
    thread = threading.Thread(target=lambda: model(tokens, cache=cache))
    thread.start()
    try:
        assert held.inside.wait(60)
        model.blocks[1].attention.probe = None
        model(tokens, cache=cache)  # layer 0 is free again
    finally:
        held.go_on.set()
        thread.join()


@attack()
def many_threads_on_one_cache() -> bool:
    module = make()
    cache = filled(module, 4, room=4000)
    done, lock = [40], threading.Lock()

    def use() -> None:
        for _ in range(200):
            try:
                module(torch.randn(4, 1, 24), cache=cache)
            except NSAError:
                continue
            with lock:
                done[0] += 1

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return cache.length_B.tolist() == [done[0]] * 4 and done[0] > 40


# positions handed over


@attack("shorter", "longer", "more rows", "packed", "no layout", "other geometry")
def positions_of_other_tokens(kind: str) -> None:
    module, x = make(), torch.randn(2, 50, 24)
    other = {
        "shorter": lambda: module.locate(x[:, :30]),
        "longer": lambda: module.locate(torch.randn(2, 5000, 24)),
        "more rows": lambda: module.locate(torch.randn(8, 50, 24)),
        "packed": lambda: module.locate(x, cu_doc_lens=torch.tensor([0, 30, 100])),
        "no layout": lambda: module.locate(x, cache=module.new_cache(2, 60)),
        "other geometry": lambda: make(l=16, d=8).locate(x),
    }
    module(x, where=other[kind]())


@attack("another batch", "another length", "a layout", "another width")
def positions_of_other_tokens_with_a_cache(kind: str) -> None:
    module, x = make(), torch.randn(2, 5, 24)
    cache = filled(module, 2)
    other = {
        "another batch": lambda: module.locate(x[:1], cache=module.new_cache(1, 60)),
        "another length": lambda: module.locate(x[:, :1], cache=cache),
        "a layout": lambda: module.locate(x),
        "another width": lambda: make(d_k=4).locate(x, cache=cache),
    }
    module(x, cache=cache, where=other[kind]())


@attack("start", "first")
def positions_far_outside(which: str) -> None:
    module, x = make(), torch.randn(2, 50, 24)
    where = module.locate(x)
    assert where.layout is not None
    moved = where.layout._replace(**{f"{which}_BS": where.layout.start_BS + HUGE})
    module(x, where=Positions(moved, where.tables))


# the compiled kernels themselves


def tensors(T: int = 40, V: int = 6) -> dict[str, Tensor]:
    torch.manual_seed(0)
    B, S, G, R, K = 2, 9, 2, 3, 8
    return dict(
        q=torch.randn(B, S, G, R, K),
        k=torch.randn(B, T, G, K),
        v=torch.randn(B, T, G, V),
        pos=torch.arange(30, 30 + S).expand(B, S).contiguous(),
        start=torch.zeros(B, S, dtype=torch.int64),
        idx=torch.tensor([0, 1, 3, 4], dtype=torch.int32).expand(B, S, G, 4).contiguous(),
    )


GEOMETRY = Geometry(l=8, d=4, l_sel=8, n_sel=4, w=12)


def run(branch: str, backend: str, operands: dict[str, Tensor], geometry: Geometry = GEOMETRY) -> Any:
    names = {"select": ("q", "k", "pos", "start"), "selected": ("q", "k", "v", "idx", "pos", "start")}
    order = names.get(branch, ("q", "k", "v", "pos", "start"))
    function = getattr(BACKENDS[backend].functions, branch)
    return function(*(operands[name] for name in order), geometry=geometry, scale=0.3)


def agrees(branch: str, operands: dict[str, Tensor]) -> bool:
    """Output and gradients are the reference's."""
    results = []
    for backend in ("cpu", "reference"):
        leaves = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in operands.items()}
        out = run(branch, backend, leaves)
        if branch == "select":
            results.append([out])
            continue
        out.sum().backward()
        results.append([out, *(leaves[name].grad for name in "qkv")])
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True))


@attack([0, 4, 10**8, 10**8 + 3], [-7, 2, 3, 2**30])
def blocks_past_the_keys(idx: list[int]) -> bool:
    operands = tensors()
    operands["pos"] += 2**39
    operands["idx"] = torch.tensor(idx, dtype=torch.int32).expand(2, 9, 2, 4).contiguous()
    return agrees("selected", operands)


@attack()
def a_document_that_begins_far_before_the_keys() -> bool:
    operands = tensors()
    operands["start"] -= 10**9
    operands["pos"] += 10**9
    operands["idx"] = (
        torch.tensor([0, 1, 10**9 // 8, 10**9 // 8 + 2], dtype=torch.int32).expand(2, 9, 2, 4).contiguous()
    )
    return agrees("selected", operands)


@attack(*((b, x) for b in ("sliding", "compressed", "selected") for x in (HUGE, -HUGE, 2**63 - 1, -(2**63))))
def positions_that_overflow(case: tuple[str, int]) -> None:
    operands = tensors()
    operands["pos"] = torch.full_like(operands["pos"], case[1])
    run(case[0], "cpu", operands)


@attack(*((b, x) for b in ("sliding", "compressed", "select", "selected") for x in (HUGE, -HUGE, 2**63 - 1, -(2**63))))
def documents_that_overflow(case: tuple[str, int]) -> None:
    operands = tensors()
    operands["start"] = torch.full_like(operands["start"], case[1])
    run(case[0], "cpu", operands)


@attack()
def a_choice_far_past_the_keys() -> None:
    operands = tensors()
    operands["pos"] += 10_000_000
    run("select", "cpu", operands)


BAD_SIZES = (
    *(("select", s) for s in (dict(n_sel=0), dict(n_sel=1), dict(n_sel=2), dict(l=2), dict(l_sel=2), dict(d=0))),
    *(("select", s) for s in (dict(l=6), dict(l_sel=6), dict(l=-8), dict(d=-4), dict(l_sel=0))),
    *(("sliding", s) for s in (dict(w=0), dict(w=-3), dict(w=2**63 - 1))),
    *(("compressed", s) for s in (dict(l=0), dict(d=0), dict(d=-1), dict(l=-(2**62)))),
    *(("selected", s) for s in (dict(l_sel=0), dict(l_sel=-8), dict(l_sel=2**62))),
)


@attack(*BAD_SIZES)
def sizes_that_are_none(case: tuple[str, dict[str, int]]) -> None:
    run(case[0], "cpu", tensors(), replace(GEOMETRY, **case[1]))


def branch_inputs(branch: str, x: dict[str, Tensor], geometry: Geometry) -> BranchInputs:
    idx = x["idx"] if branch == "selected" else None
    return BranchInputs(branch, x["q"], x["k"], x["v"], idx, x["pos"], x["start"], geometry, 0.3)


@attack(*BAD_SIZES)
def sizes_past_the_geometry(case: tuple[str, dict[str, int]]) -> None:
    """The library's own check, of a geometry that nothing validated."""
    branch, sizes = case
    geometry = object.__new__(Geometry)
    vars(geometry).update(vars(GEOMETRY) | sizes)
    x = tensors()
    if branch == "select":
        cpu.select(x["q"], x["k"], x["pos"], x["start"], geometry, 0.3)
    else:
        cpu.attend_forward(branch_inputs(branch, x, geometry))


SHAPES: dict[str, tuple[str, Callable[[dict[str, Tensor]], Tensor]]] = {
    "fewer values than keys": ("v", lambda x: x["v"][:, :10]),
    "values of fewer groups": ("v", lambda x: x["v"][:, :, :1]),
    "values of fewer rows": ("v", lambda x: x["v"][:1]),
    "keys of fewer groups": ("k", lambda x: x["k"][:, :, :1]),
    "keys of fewer rows": ("k", lambda x: x["k"][:1]),
    "narrower keys": ("k", lambda x: x["k"][..., :4]),
    "keys of another dtype": ("k", lambda x: x["k"].bfloat16()),
    "values of another dtype": ("v", lambda x: x["v"].half()),
    "flat keys": ("k", lambda x: x["k"].flatten()),
    "queries without heads": ("q", lambda x: x["q"][:, :, :, :0]),
    "fewer positions": ("pos", lambda x: x["pos"][:, :2]),
    "positions of one row": ("pos", lambda x: x["pos"][:1]),
    "fewer starts": ("start", lambda x: x["start"][:, :1]),
    "blocks of fewer queries": ("idx", lambda x: x["idx"][:, :2]),
    "blocks of one group": ("idx", lambda x: x["idx"][:, :, :1]),
}


@attack(*SHAPES)
def tensors_that_do_not_fit(kind: str) -> None:
    operands = tensors()
    name, change = SHAPES[kind]
    operands[name] = change(operands)
    run("selected", "cpu", operands)


@attack("k", "v", "pos")
def tensors_on_another_device(name: str) -> None:
    """Past the dispatcher, which would take them elsewhere."""
    x = tensors()
    x[name] = x[name].to("meta")
    cpu.attend_forward(branch_inputs("sliding", x, GEOMETRY))


@attack("lse", "dlse", "out", "dout", "dtype")
def gradients_of_other_tensors(which: str) -> None:
    x = tensors()
    out, lse = torch.randn(2, 9, 2, 3, 6), torch.randn(2, 9, 2, 3)
    saved = dict(out=out, lse=lse, dout=out.clone(), dlse=lse.clone())
    if which == "dtype":
        saved["lse"] = lse.bfloat16()
    else:
        saved[which] = saved[which][:1, :2]
    cpu.attend_backward(branch_inputs("sliding", x, GEOMETRY), *saved.values())


@attack("gates", "gates per group", "branch", "dtype", "dout")
def mixing_what_does_not_fit(which: str) -> None:
    branches = [torch.randn(2, 9, 2, 4, 6) for _ in range(3)]
    gates, dout = torch.rand(2, 9, 2, 4, 3), torch.randn(2, 9, 2, 4, 6)
    if which == "gates":
        gates = torch.rand(2, 900, 2, 4, 3)
    elif which == "gates per group":
        gates = torch.rand(2, 9, 2, 8, 3)
    elif which == "branch":
        branches[1] = branches[1][:, :3]
    elif which == "dtype":
        branches[2] = branches[2].bfloat16()
    else:
        dout = dout[:1]
        cpu.mix_backward(dout, gates, *branches)
    cpu.mix_forward(gates, *branches)


@attack("queries", "gates", "heads", "tokens", "dtype")
def a_decoder_given_what_does_not_fit(which: str) -> None:
    module = make()
    cache = filled(module, 2)
    q, streams = module.project(torch.randn(2, 1, 24), module.rotary.tables(cache.positions(1)))
    gates = module.gates(torch.randn(2, 1, 24))
    decoder = module._decoder(cache, q)
    assert decoder is not None
    assert decoder.append is not None
    with torch.no_grad():
        if which == "tokens":
            decoder.append(tuple(x[:1] for x in streams))
        decoder.append(streams)
        arguments = dict(
            queries=(q[:1], gates),
            gates=(q, gates[:1]),
            heads=(q[:, :, :, :1], gates),
            tokens=(q, gates),
            dtype=(q.bfloat16(), gates),
        )
        decoder.attend(*arguments[which])


def main(first: int) -> None:
    for number, (name, function) in list(enumerate(ATTACKS.items()))[first:]:
        print(json.dumps(dict(number=number, name=name, outcome="started")), flush=True)
        try:
            with torch.enable_grad():
                outcome = HARMLESS if function() is True else "accepted"
        except NSAError as error:
            outcome = REFUSED if str(error) else "refused without a reason"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported as a failed defence
            outcome = f"{type(error).__name__}: {error}"
        print(json.dumps(dict(number=number, name=name, outcome=outcome)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--list":
        print(json.dumps(list(ATTACKS)))
    else:
        main(int(sys.argv[1]))
