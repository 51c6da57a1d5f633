"""Pictures of block selection: which blocks the queries of a text selected in each layer, as SVG and as characters.

B batch · S tokens · G kv groups · N selected · n all blocks
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nsa.core.probe import probing
from nsa.core.selection_quality import SelectionProbe
from nsa.files import write_atomic
from nsa_train.infer.load_model import LoadedModel
from nsa_train.watch.view.svg_chart import ACCENT, MUTED, svg_box, svg_label, svg_legend, svg_picture, svg_turned_label

_SIDE, _GAP, _LEFT, _TOP, _BELOW, _MOST_ROWS = 256, 26, 62, 92, 88, 64
_SHADES, _BETWEEN = " ░▒▓█", "   "
_LEGEND = (("not read", MUTED, 0.12), ("read by some groups of heads", ACCENT, 0.4), ("by all of them", ACCENT, 1.0))
_TITLE = "Blocks of earlier tokens that each token read in the selected branch"
_NOTE = "The first block and the two nearest are always read; the others are those with the highest scores."


@dataclass(frozen=True)
class _SelectionMap:
    """The choices of one layer."""

    layer: int
    share_Sn: Tensor
    """Share of the groups that selected each block, by query."""
    l_sel: int
    """Tokens of a block."""


@torch.inference_mode()
def selection_maps(loaded: LoadedModel, text: str) -> list[_SelectionMap]:
    """One map per layer that selects blocks, for the beginning of a text, at most as long as a training row."""
    ids = torch.tensor([loaded.encode([text])[0][: loaded.trained_length]], device=loaded.model.device)
    n_tokens = ids.shape[1]
    with probing(loaded.model, lambda: SelectionProbe(every=n_tokens + 1, keep=range(n_tokens))) as probes:
        loaded.model(input_ids=ids, use_cache=False)
    l_sel: int = loaded.model.config.l_sel
    n_blocks = -(-n_tokens // l_sel)
    return [
        # model.layers.N.attention
        _SelectionMap(int(name.split(".")[2]), _share_of_groups(probe.chosen_BQGN[0].cpu(), n_blocks), l_sel)
        for name, probe in probes.items()
        if probe.chosen_BQGN is not None
    ]


def _share_of_groups(idx_SGN: Tensor, n_blocks: int) -> Tensor:
    chosen_SGn = torch.zeros(*idx_SGN.shape[:2], n_blocks + 1)  # one more, where −1 (no block) goes
    chosen_SGn.scatter_(-1, torch.where(idx_SGN < 0, n_blocks, idx_SGN).long(), 1.0)
    return chosen_SGn[..., :n_blocks].mean(1)


def write_svg(maps: Sequence[_SelectionMap], path: Path) -> None:
    """A panel per layer: queries downwards, key blocks to the right; the darker a cell, the more groups selected it."""
    n_tokens, n_blocks = maps[0].share_Sn.shape
    width, height = _LEFT + len(maps) * (_SIDE + _GAP), _TOP + _SIDE + _BELOW
    parts = [svg_label(_LEFT, 24, _TITLE, kind="t"), svg_label(_LEFT, 46, _NOTE)]
    for tokens in range(0, n_tokens + 1, max(1, n_blocks // 4) * maps[0].l_sel):
        parts.append(svg_label(_LEFT - 8, _TOP + _SIDE * tokens / n_tokens + 4, str(tokens), anchor="end"))
    parts.append(svg_turned_label(16, _TOP + _SIDE / 2, "token that reads"))
    for i, each in enumerate(maps):
        parts += _panel(each, _LEFT + i * (_SIDE + _GAP))
    parts += svg_legend(_LEFT, height - 18, _LEGEND)
    write_atomic(path, svg_picture(_TITLE, width, height, parts))


def _panel(each: _SelectionMap, left: int) -> list[str]:
    """Rows are samples of the queries, the last token of equal parts; blocks that a query cannot see stay empty."""
    n_tokens, n_blocks = each.share_Sn.shape
    every = max(1, n_tokens // _MOST_ROWS)
    queries = range(every - 1, n_tokens, every)
    cell_w, cell_h = _SIDE / n_blocks, _SIDE / len(queries)
    parts = [svg_label(left + _SIDE / 2, _TOP - 12, f"layer {each.layer}", kind="t", anchor="middle")]
    for row, query in enumerate(queries):
        top = _TOP + row * cell_h
        parts.append(svg_box(left, top, (query // each.l_sel + 1) * cell_w, cell_h, MUTED, 0.12))
        shares = each.share_Sn[query].tolist()
        cells = ((block, share) for block, share in enumerate(shares) if share > 0)
        parts += [svg_box(left + block * cell_w, top, cell_w, cell_h, ACCENT, share) for block, share in cells]
    for block in range(0, n_blocks, max(1, n_blocks // 4)):
        parts.append(svg_label(left + (block + 0.5) * cell_w, _TOP + _SIDE + 17, str(block), anchor="middle"))
    parts.append(
        svg_label(left + _SIDE / 2, _TOP + _SIDE + 35, f"block of {each.l_sel} tokens that is read", anchor="middle")
    )
    return parts


def _text_rows(each: _SelectionMap) -> list[str]:
    """Rows of characters for blocks of queries, columns for blocks of keys; darker where more queries selected it."""
    n_blocks = each.share_Sn.shape[1]
    of_blocks = [part.mean(0).tolist() for part in each.share_Sn.chunk(n_blocks)]
    return ["".join(_SHADES[round(share * (len(_SHADES) - 1))] * 2 for share in shares) for shares in of_blocks]


def side_by_side(maps: Sequence[_SelectionMap], columns: int) -> Iterator[str]:
    """Lines with the maps as characters, as many beside each other as fit in so many columns."""
    shown = [[f"layer {each.layer}".ljust(2 * each.share_Sn.shape[1]), *_text_rows(each)] for each in maps]
    fitting = max(1, (columns + len(_BETWEEN)) // (len(shown[0][0]) + len(_BETWEEN)))
    for first in range(0, len(shown), fitting):
        for line in zip(*shown[first : first + fitting], strict=True):
            yield _BETWEEN.join(line).rstrip()
