"""Share of each attention branch in the keys that queries read and in the FLOPs of a layer, at one length."""

from dataclasses import dataclass

from nsa.core.branches import BRANCH_ORDER
from nsa.geometry import Geometry
from nsa_train.config.schema import RunConfig


@dataclass(frozen=True)
class BranchShare:
    branch: str
    reads_of_last: int
    """Keys that the last query reads, per kv group."""
    reads: float
    """Mean over the queries of the row."""
    flops: float
    """Forward FLOPs per token of one layer; the compressed branch with the scores that selection computes again. Of a
    model of `merged` layers these alone: nothing attends to compressed keys."""


def branch_shares(config: RunConfig) -> list[BranchShare]:
    model, geometry, length = config.model, config.nsa.geometry, config.train.seq_len
    merged = not {"nsa", "global"} & {*model.attention} and "merged" in model.attention
    totals = geometry.total_merged_reads(length) if merged else geometry.total_reads(length)
    reads = {branch: total / length for branch, total in totals.items()}
    per_read = 2 * model.n_heads * (model.d_k + model.d_v)
    selection = 2 * model.n_heads * model.d_k * reads["compressed"]
    last = _reads_of_last(geometry, length, merged)
    attended = BRANCH_ORDER[1:] if merged else BRANCH_ORDER
    return [
        BranchShare(
            branch,
            last[branch],
            reads[branch],
            per_read * reads[branch] * (branch in attended) + (selection if branch == "compressed" else 0.0),
        )
        for branch in BRANCH_ORDER
    ]


def _reads_of_last(geometry: Geometry, length: int, merged: bool = False) -> dict[str, int]:
    """Keys that the last query of a row reads in each branch. `merged`: blocks are of the tokens before the window."""
    selectable = max(0, length - geometry.w) if merged else length
    return {
        "compressed": geometry.n_compressed(selectable),
        "selected": geometry.n_selected_tokens(selectable),
        "sliding": min(geometry.w, length),
    }
