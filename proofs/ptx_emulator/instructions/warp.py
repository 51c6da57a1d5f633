"""Instructions across the lanes of a warp: shuffles, reductions, votes and warp barriers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from proofs.ptx_emulator.execution import Builder, ExecutionUnit
from proofs.ptx_emulator.parser import Immediate, Instruction, Operand, UnsupportedPtx
from proofs.ptx_emulator.state import WARP, Array, Run

_LANES = np.arange(WARP)


def shuffle_source(mode: str, lane: Array, by: Array, bounds: int) -> Array:
    """The lane that each lane reads from, itself where that is out of bounds; `bounds`: the third operand."""
    segment, clamp = bounds >> 8 & 0x1F, bounds & 0x1F
    last = lane & segment | clamp & ~segment
    by = by & 0x1F
    if mode == "up":
        source = lane - by
        return np.where(source >= last, source, lane)
    source = {"down": lane + by, "bfly": lane ^ by, "idx": lane & segment | by & ~segment}[mode]
    return np.where(source <= last, source, lane)


def build_shuffle(unit: ExecutionUnit, at: Instruction) -> Run:
    state = unit.state
    to, source, by, bounds, members = at.operands
    if not isinstance(bounds, Immediate):
        raise UnsupportedPtx(at.text)
    _all_lanes(members, at)
    mode, values = at.opcode.split(".")[2], state.values
    target, slot, mask = state.register(to, "b32"), state.source(source, "b32"), state.mask(at)
    fixed = shuffle_source(mode, _LANES, np.array(by.bits), bounds.bits) if isinstance(by, Immediate) else None
    by_slot = None if fixed is not None else state.source(by, "b32")

    def run() -> None:
        chosen = mask()
        state.whole_warps(at, chosen)
        value = values[slot]
        if value.shape[1] == 1:  # the same in all lanes
            return state.put_where(target, value, chosen)
        lanes = value.reshape(value.shape[0], -1, WARP)
        if fixed is not None:
            return state.put_where(target, lanes[..., fixed].reshape(value.shape), chosen)
        assert by_slot is not None
        index = shuffle_source(mode, _LANES, state.by_warp(values[by_slot]).astype(np.int64), bounds.bits)
        lanes = np.broadcast_to(lanes, index.shape)
        state.put_where(target, np.take_along_axis(lanes, index, -1).reshape(state.programs, -1), chosen)

    return run


_VIEWS: dict[str, Any] = {"s32": np.int32, "f32": np.float32}
_REDUCTIONS: dict[str, tuple[Callable[..., Array], Any]] = {
    f"redux.sync.{name}.{t}": (function, view)
    for name, function, types in (
        ("add", np.add.reduce, ("s32", "u32")), ("min", np.minimum.reduce, ("s32", "u32")),
        ("max", np.maximum.reduce, ("s32", "u32")), ("and", np.bitwise_and.reduce, ("b32",)),
        ("or", np.bitwise_or.reduce, ("b32",)), ("xor", np.bitwise_xor.reduce, ("b32",)),
        ("min", np.fmin.reduce, ("f32",)), ("max", np.fmax.reduce, ("f32",)),  # sm_100: NaN only if all are
    )
    for t in types
    for view in (_VIEWS.get(t, np.uint32),)
}  # fmt: skip


def build_reduction(unit: ExecutionUnit, at: Instruction) -> Run:
    state, (to, source, members) = unit.state, at.operands
    reduce, view = _REDUCTIONS[at.opcode]
    target, slot, mask, values = state.register(to, "b32"), state.source(source, "b32"), state.mask(at), state.values
    expected = state.source(members, "b32")

    def run() -> None:
        chosen = mask()
        state.whole_warps(at, chosen)
        partial = values[expected] != 0xFFFFFFFF
        if (partial if chosen is None else partial & chosen).any():
            raise UnsupportedPtx(f"{at.text}: of some lanes only")
        lanes = state.by_warp(values[slot]).view(view)
        result = np.repeat(reduce(lanes, axis=-1, dtype=view), WARP, 1).view(np.uint32)
        state.put_where(target, result, chosen)

    return run


def build_vote(unit: ExecutionUnit, at: Instruction) -> Run:
    state, (to, source, members) = unit.state, at.operands
    _all_lanes(members, at)
    mode = at.opcode.split(".")[2]
    target = state.register(to, "b32" if mode == "ballot" else "pred")
    slot, mask, values = state.source(source, "pred"), state.mask(at), state.values

    def run() -> None:
        chosen = mask()
        state.whole_warps(at, chosen)
        lanes = state.by_warp(values[slot])
        if mode == "ballot":
            result = (lanes.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(-1).astype(np.uint32)
        else:
            result = lanes.any(-1) if mode == "any" else lanes.all(-1)
        state.put_where(target, np.repeat(result, WARP, 1), chosen)

    return run


def build_warp_barrier(unit: ExecutionUnit, at: Instruction) -> Run:
    """bar.warp.sync: orders the lanes of a warp, and nothing between warps."""
    (members,) = at.operands
    _all_lanes(members, at)
    state, mask = unit.state, unit.state.mask(at)

    def run() -> None:
        chosen = mask()
        state.whole_warps(at, chosen)
        unit.shared.warp_barrier(chosen)

    return run


def _all_lanes(members: Operand, at: Instruction) -> None:
    if not isinstance(members, Immediate) or members.bits & 0xFFFFFFFF != 0xFFFFFFFF:
        raise UnsupportedPtx(f"{at.text}: of some lanes only")


BUILDERS: dict[str, Builder] = {
    **{f"shfl.sync.{mode}.b32": build_shuffle for mode in ("up", "down", "bfly", "idx")},
    **dict.fromkeys(_REDUCTIONS, build_reduction),
    "vote.sync.ballot.b32": build_vote,
    "vote.sync.any.pred": build_vote,
    "vote.sync.all.pred": build_vote,
    "bar.warp.sync": build_warp_barrier,
}
