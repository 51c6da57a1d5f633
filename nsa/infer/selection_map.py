"""Pictures of block selection: which blocks the queries of a text chose in each layer, as SVG and as characters.

B batch · S tokens · G kv groups · N chosen · n all blocks
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nsa.core.branches import BranchKeys
from nsa.core.probe import Probe, probing
from nsa.files import write_atomic
from nsa.geometry import Geometry
from nsa.infer.load_model import LoadedModel

_SIDE, _GAP, _TOP, _MOST_ROWS = 260, 26, 40, 64
_SHADES = " ░▒▓█"
_COLOUR = "#d98032"


@dataclass
class ChosenBlocksProbe(Probe):
    """Keeps the blocks that every query of the last forward pass chose."""

    idx_BSGN: Tensor | None = None

    def record_selection(
        self, q_BSGRK: Tensor, idx_BSGN: Tensor, keys: BranchKeys, geometry: Geometry, scale: float
    ) -> None:
        self.idx_BSGN = idx_BSGN.detach().cpu()


@dataclass(frozen=True)
class SelectionMap:
    """The choices of one layer."""

    layer: int
    share_Sn: Tensor
    """Share of the groups that chose each block, by query."""


@torch.inference_mode()
def selection_maps(loaded: LoadedModel, text: str) -> list[SelectionMap]:
    """One map per layer that selects blocks, for the beginning of a text, at most as long as a training row."""
    ids = torch.tensor([loaded.encode([text])[0][: loaded.trained_length]], device=loaded.model.device)
    with probing(loaded.model, ChosenBlocksProbe) as probes:
        loaded.model(input_ids=ids, use_cache=False)
    n_blocks = -(-ids.shape[1] // loaded.model.config.l_sel)
    return [
        SelectionMap(int(name.split(".")[2]), share_of_groups(probe.idx_BSGN[0], n_blocks))  # model.layers.N.attention
        for name, probe in probes.items()
        if probe.idx_BSGN is not None
    ]


def share_of_groups(idx_SGN: Tensor, n_blocks: int) -> Tensor:
    chosen_SGn = torch.zeros(*idx_SGN.shape[:2], n_blocks + 1)  # one more, where −1 (no block) goes
    chosen_SGn.scatter_(-1, torch.where(idx_SGN < 0, n_blocks, idx_SGN).long(), 1.0)
    return chosen_SGn[..., :n_blocks].mean(1)


def write_svg(maps: Sequence[SelectionMap], path: Path) -> None:
    width, height = _GAP + len(maps) * (_SIDE + _GAP), _TOP + _SIDE + 34
    parts = [part for i, each in enumerate(maps) for part in _panel(each, _GAP + i * (_SIDE + _GAP))]
    style = "<style>.t{font:600 15px sans-serif;fill:#888}.s{font:13px sans-serif;fill:#888}</style>"
    note = f'<text x="{width / 2:.0f}" y="{height - 10}" text-anchor="middle" class="s">blocks → · queries ↓</text>'
    write_atomic(
        path,
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">{style}'
        f"{''.join(parts)}{note}</svg>\n",
    )


def _panel(each: SelectionMap, left: float) -> list[str]:
    every = max(1, len(each.share_Sn) // _MOST_ROWS)
    rows = each.share_Sn[every - 1 :: every].tolist()
    cell_w, cell_h = _SIDE / len(rows[0]), _SIDE / len(rows)
    title = f'<text x="{left + _SIDE / 2:.0f}" y="20" text-anchor="middle" class="t">layer {each.layer}</text>'
    frame = f'<rect x="{left}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}" fill="#888" fill-opacity="0.12"/>'
    cells = [
        f'<rect x="{left + column * cell_w:.1f}" y="{_TOP + row * cell_h:.1f}" width="{cell_w:.2f}" '
        f'height="{cell_h:.2f}" fill="{_COLOUR}" fill-opacity="{share:.2f}"/>'
        for row, shares in enumerate(rows)
        for column, share in enumerate(shares)
        if share > 0
    ]
    return [title, frame, *cells]


def text_rows(each: SelectionMap) -> list[str]:
    """One row of characters per block of queries, one column per block of keys; darker where more queries chose it."""
    n_blocks = each.share_Sn.shape[1]
    of_blocks = [part.mean(0).tolist() for part in each.share_Sn.chunk(n_blocks)]
    return ["".join(_SHADES[round(share * (len(_SHADES) - 1))] * 2 for share in shares) for shares in of_blocks]
