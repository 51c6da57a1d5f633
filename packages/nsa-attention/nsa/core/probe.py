"""Probe: gate entropy, selection and read counts of one attention layer, as device tensors, while it is attached.

B batch · S tokens · G kv groups · N chosen blocks
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from nsa.core.branches import BRANCH_ORDER, AttendedKeys, BranchKeys
from nsa.geometry import CoarseLevel, Geometry
from nsa.kernels.precision import widest_float

_UNION_TILE = 16  # queries whose chosen blocks a tile-wise kernel loads together
_COLLAPSED_ENTROPY = 0.2  # nats; a gate whose tokens stay below this on average takes one branch whatever it sees


@dataclass
class Probe:
    """Attach with `probing`; after a forward pass `figures` holds 0-d or small tensors, not synchronised."""

    figures: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def record(
        self, gates: Tensor | None, gate_kind: str, idx_BSGN: Tensor, keys: AttendedKeys, geometry: Geometry,
        branches: Sequence[str], coarse: CoarseLevel | None,
    ) -> None:  # fmt: skip
        """Record a layer that selects blocks; `keys` have the positions up to which each branch sees them."""
        pos_BS = keys[1].pos_BS
        reads_BSG = _count_reads(idx_BSGN, keys, geometry, branches, coarse)
        in_window_BS = (keys[2].pos_BS + 1).clamp(max=geometry.w) if "sliding" in branches else 0
        self.figures = {
            **({} if gates is None else _gate_figures(gates, gate_kind)),
            **_selection_figures(idx_BSGN, pos_BS, geometry),
            "reads_pred": (_predicted_reads(pos_BS, geometry, coarse) + in_window_BS).sum(),
            "reads_act_total": reads_BSG.to(widest_float(reads_BSG.device)).mean(-1).sum().long(),
        }

    def record_selection(
        self, q_BSGRK: Tensor, idx_BSGN: Tensor, keys: AttendedKeys, geometry: Geometry, scale: float, window: int
    ) -> None:
        """Called with the queries, the chosen blocks and the branches' keys; see `SelectionProbe`. `window`: tokens of
        the layer's window, 0 if it has none."""

    @torch.no_grad()
    def record_tokens(self, keys: BranchKeys, w: int) -> None:
        """Record a layer without gates and selection, whose queries read the last w tokens of their document."""
        self.figures = {
            "reads_pred": (keys.pos_BS + 1).clamp(max=w).sum(),
            "reads_act_total": _sliding_reads(keys.pos_BS, keys.start_BS, keys.k.shape[1], w).sum(),
        }


def attention_layers(model: nn.Module) -> dict[str, Any]:
    """Every `NSAAttention` of a model by the name of its module; of one that is held, that of its `AttentionHolder`."""
    modules = model.named_modules()
    return {name: module.attention_layer for name, module in modules if hasattr(module, "attention_layer")}


_AnyProbe = TypeVar("_AnyProbe", bound=Probe)


@overload
def probing(model: nn.Module) -> AbstractContextManager[dict[str, Probe]]: ...
@overload
def probing(model: nn.Module, make: Callable[[], _AnyProbe]) -> AbstractContextManager[dict[str, _AnyProbe]]: ...
@contextmanager
def probing(model: nn.Module, make: Callable[[], Any] = Probe) -> Iterator[dict[str, Any]]:
    """Attach a probe to every attention layer of a model for the duration of the block: {module name: probe}."""
    layers = attention_layers(model)
    probes = {name: make() for name in layers}
    for name, layer in layers.items():
        layer.probe = probes[name]
    try:
        yield probes
    finally:
        for layer in layers.values():
            layer.probe = None


def _count_reads(
    idx_BSGN: Tensor, keys: AttendedKeys, g: Geometry, branches: Sequence[str], coarse: CoarseLevel | None
) -> Tensor:
    """Keys each query and group reads, counted from the kernels' arguments rather than from the formula: [B, S, G]."""
    compressed, selected, window = keys
    shared_BS = _compressed_reads(compressed.pos_BS, compressed.start_BS, compressed.k.shape[1], g.l, g.d)
    if coarse is not None:
        shared_BS = _most_read(shared_BS, coarse.geometry)
    if "sliding" in branches:
        shared_BS = shared_BS + _sliding_reads(window.pos_BS, window.start_BS, window.k.shape[1], g.w)
    return shared_BS[..., None] + _selected_reads(idx_BSGN, selected.pos_BS, g.l_sel)


def _gate_figures(gates: Tensor, kind: str = "softmax") -> dict[str, Tensor]:
    """Entropy in nats (ln 3 is uniform), largest share, share per branch, fraction of collapsed gates.

    A gate belongs to a head (or group) of a layer. It has collapsed when it hardly mixes for any token; gates that are
    decided for some tokens and open for others are what training is for. Gates of kind `tanh` start with one branch and
    may be negative: of these only the shares of their magnitudes are recorded.
    """
    share = gates.abs() / gates.abs().sum(-1, keepdim=True).clamp(min=torch.finfo(gates.dtype).tiny)
    shares = {"gate_branch_shares": share.flatten(0, -2).mean(0).view(len(BRANCH_ORDER))}
    if kind == "tanh":
        return shares
    entropy = -torch.special.xlogy(share, share).sum(-1)
    return {
        "gate_entropy_mean": entropy.mean(),
        "gate_max_mean": share.amax(-1).mean(),
        "gate_collapse_frac": (entropy.mean((0, 1)) < _COLLAPSED_ENTROPY).to(share.dtype).mean(),
        **shares,
    }


def _selection_figures(idx_BSGN: Tensor, pos_BS: Tensor, geometry: Geometry) -> dict[str, Tensor]:
    keys_BSG = _selected_reads(idx_BSGN, pos_BS, geometry.l_sel)
    union, wide = _union_sizes(idx_BSGN), widest_float(idx_BSGN.device)
    return {
        "sel_k_mean": keys_BSG.to(wide).mean(),
        "sel_k_max": keys_BSG.max(),
        "sel_pct_at_max": (keys_BSG == geometry.n_sel * geometry.l_sel).to(wide).mean(),
        "sel_union_mean": union.to(wide).mean(),
        "sel_union_max": union.max(),
    }


def _union_sizes(idx_BSGN: Tensor) -> Tensor:
    """Distinct blocks that _UNION_TILE consecutive queries choose together: [B, tiles, G]."""
    B, S, G, N = idx_BSGN.shape
    padded = torch.nn.functional.pad(idx_BSGN, (0, 0, 0, 0, 0, -S % _UNION_TILE), value=-1)
    tiled = padded.view(B, -1, _UNION_TILE, G, N).transpose(2, 3).flatten(-2).sort(-1).values
    return (~_repeats(tiled) & (tiled >= 0)).sum(-1)


def _predicted_reads(pos_BS: Tensor, g: Geometry, coarse: CoarseLevel | None) -> Tensor:
    """`Geometry.reads` for a tensor of positions, without the window."""
    n = pos_BS + 1
    entries_BS = ((n - g.l) // g.d + 1).clamp(min=0)
    entries_BS = entries_BS if coarse is None else _most_read(entries_BS, coarse.geometry)
    return entries_BS + _most_read(n, g)


def _most_read(n: Tensor, g: Geometry) -> Tensor:
    """Count the tokens or entries, of n, in the chosen blocks of the last one, which chooses all that it can."""
    whole_blocks = ((n - 1) // g.l_sel).clamp(max=g.n_sel - 1)
    return (whole_blocks * g.l_sel + (n - 1) % g.l_sel + 1).where(n > 0, 0)


def _sliding_reads(pos_BS: Tensor, start_BS: Tensor, n_keys: int, w: int) -> Tensor:
    end = (start_BS + pos_BS + 1).clamp(max=n_keys)
    begin = (start_BS + pos_BS + 1 - w).maximum(start_BS).clamp(min=0)
    return (end - begin).clamp(min=0)


def _compressed_reads(pos_BS: Tensor, first_BS: Tensor, n_keys: int, l: int, d: int) -> Tensor:
    complete = ((pos_BS + 1 - l) // d + 1).clamp(min=0)
    return ((first_BS + complete).clamp(max=n_keys) - first_BS).clamp(min=0)


def _selected_reads(idx_BSGN: Tensor, pos_BS: Tensor, l_sel: int) -> Tensor:
    """Tokens at or before the query in the chosen blocks, per group; a block listed twice is read once."""
    tokens = (pos_BS[..., None, None] + 1 - idx_BSGN.long() * l_sel).clamp(0, l_sel)
    return tokens.masked_fill(_repeats(idx_BSGN) | (idx_BSGN < 0), 0).sum(-1)


def _repeats(idx: Tensor) -> Tensor:
    """Whether each number equals the one before it. Without writing into a slice of booleans: the C++ that torch 2.13
    generates for that does not compile."""
    return (idx == idx.roll(1, -1)) & (torch.arange(idx.shape[-1], device=idx.device) > 0)
