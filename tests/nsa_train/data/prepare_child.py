"""`prepare` as a process of its own, to be killed: SOURCE OUT WORKERS."""

import sys

from nsa_train.data.prepare.plan import make_plan
from nsa_train.data.prepare.run import prepare

SETTINGS = {"held_out_fraction": 0.1, "units_per_task": 1, "shard_tokens": 60_000}

if __name__ == "__main__":
    source, out, workers = sys.argv[1:]
    prepare(make_plan(source, "byte", **SETTINGS), out, workers=int(workers))  # type: ignore[arg-type]
