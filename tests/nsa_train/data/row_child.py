"""One rank of a run without a model: reads batches through a BatchPrefetcher, logs them, saves its cursor.

KIND SOURCE DIR RANK WORLD STEPS HOLD_AT EXCHANGE: appends one line per batch to DIR/rank{RANK}.jsonl, and before step
HOLD_AT waits to be killed. As a trainer does, it writes its output first and its cursor afterwards and atomically, and
resumes from the newest step of which every rank has a cursor; what was seen after it is redone. Ranks of kind
`direct_divided` divide the reading through the folder EXCHANGE, which serves ranks that start at the same cursor.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from nsa.files import write_atomic
from nsa_train.data.prefetcher import BatchPrefetcher, PrefetchSettings
from nsa_train.data.rows.specs import DirectData, MixedData, PreparedData, RowData
from nsa_train.data.unit_exchange import ExchangeSettings

GLOBAL_ROWS = 4
MIXTURE = {"web": 6, "code": 3, "math": 1}
"""Weights of the sets of a mixture, folders of its source."""


def data_of(kind: str, source: str) -> RowData:
    if kind == "prepared":
        return PreparedData(source, seq_len=64, seed=5, with_provenance=True)
    if kind == "mixture":
        sets = [PreparedData(f"{source}/{name}", seq_len=64, seed=5, with_provenance=True) for name in MIXTURE]
        return MixedData(tuple(sets), tuple(MIXTURE.values()), seq_len=64)
    packing = "best_fit" if kind == "direct_best_fit" else "concat"
    return DirectData(source, "byte", seq_len=64, seed=5, held_out_fraction=0.1, packing=packing, buffer_rows=8)


def cursor_path(folder: Path, rank: int, step: int) -> Path:
    return folder / f"cursor{rank}-{step}.json"


def newest_common_step(folder: Path, world: int) -> int:
    steps = [{int(p.stem.split("-")[1]) for p in folder.glob(f"cursor{rank}-*.json")} for rank in range(world)]
    return max(set.intersection(*steps), default=0)


def main() -> None:
    kind, source, folder, *numbers, exchange = sys.argv[1:]
    rank, world, steps, hold_at = map(int, numbers)
    data = data_of(kind, source)
    if kind == "direct_divided":
        assert isinstance(data, DirectData)
        data = replace(data, exchange=ExchangeSettings(exchange, rank, world))
    first = newest_common_step(Path(folder), world)
    state = json.loads(cursor_path(Path(folder), rank, first).read_text()) if first else None
    settings = PrefetchSettings(queue_depth=8)
    with (
        BatchPrefetcher(
            data,
            global_rows=GLOBAL_ROWS,
            rank=rank,
            world=world,
            settings=settings,
            state=state,
        ) as prefetcher,
        open(Path(folder, f"rank{rank}.jsonl"), "a") as seen,
    ):
        for step in range(first, steps):
            while step == hold_at:
                time.sleep(60)
            batch = next(prefetcher)
            segments = [[[s.doc_id, s.offset, s.length] for s in row] for row in batch.provenance or ()]
            record = {
                "step": step,
                "rows": batch.row_ids.tolist(),
                "segments": segments,
                "tokens": batch.tokens.tolist(),
            }
            seen.write(json.dumps(record) + "\n")
            seen.flush()
            if step % 3 == 2 or step == steps - 1:
                write_atomic(cursor_path(Path(folder), rank, step + 1), json.dumps(prefetcher.state_dict()).encode())
            time.sleep(0.01)


if __name__ == "__main__":
    main()
