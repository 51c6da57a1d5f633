"""Cases of context parallelism for `context_ranks`, which runs them; needs no engine."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests import fork_server
from tests.nsa_train.train.runs import ROOT, environment


@dataclass
class ContextCase:
    """One layer on rows of `length` tokens, whole and divided."""

    zigzag: bool = False
    batch: int = 1
    length: int = 128
    documents: list[int] | None = None
    """Cumulative lengths over all rows."""
    dtype: str = "float64"
    layer: dict[str, Any] = field(default_factory=dict)
    """Arguments of the layer."""
    compiled: bool = False
    checkpointed: bool = False


Found = dict[str, float]


def run_cases(folder: Path, cases: dict[int, dict[str, ContextCase]], timeout_s: float = 200) -> dict[str, Found]:
    """Return the errors that `context_ranks.compare` measured for each case; the cases by number of ranks."""
    command = ["-m", "tests.nsa_train.train.parallel.context_ranks", str(folder / "rendezvous")]
    fields_by_ranks = {ranks: {name: asdict(case) for name, case in some.items()} for ranks, some in cases.items()}
    done = fork_server.run(command, cwd=ROOT, env=environment(), input=json.dumps(fields_by_ranks), timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, dict[str, Found]] = json.loads(done.stdout.splitlines()[-1])
    return {name: errors for some in results.values() for name, errors in some.items()}
