"""Before a long run: does the source deliver at all, and a few gigabytes of it on local disk for a strict start."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from nsa.data.prefetch.prefetcher import BatchPrefetcher, PrefetchSettings
from nsa.data.prepare.plan import make_plan
from nsa.data.prepare.run import PrepareProgress, prepare
from nsa.data.rows.specs import DirectData
from nsa.data.shards.manifest import ShardManifest
from nsa.data.source.resolve import open_source
from nsa.data.tokenizer import load_tokenizer, token_dtype
from nsa.errors import ConfigError

# The smallest published sample of FineWeb-Edu: 14 files to list instead of thousands.
FINEWEB_EDU = "HuggingFaceFW/fineweb-edu:sample-10BT"
_SMOKE_BATCHES = 4
_SAMPLED_UNITS = 2


@dataclass(frozen=True, slots=True)
class SmokeReport:
    first_batch_s: float
    batches: int
    documents: int
    tokens: int
    tokens_per_s: float


def smoke(source: str, *, tokenizer: str, seq_len: int, batch: int, timeout_s: float) -> SmokeReport:
    """A few batches through the whole path, worker process included. Raises DataError when none comes in time."""
    data = DirectData(source, tokenizer, seq_len, loader_timeout_s=timeout_s)
    start = time.monotonic()
    with BatchPrefetcher(data, global_rows=batch, settings=PrefetchSettings(timeout_s=timeout_s)) as feeder:
        feeder.warm_up()
        first_batch_s = time.monotonic() - start
        for _ in range(_SMOKE_BATCHES):
            next(feeder)
        counters = feeder.counters
        elapsed_s = time.monotonic() - start
    return SmokeReport(
        first_batch_s, counters.batches, counters.documents, counters.tokens, counters.tokens / elapsed_s
    )


def bootstrap(
    source: str,
    out: str,
    *,
    gb: float,
    tokenizer: str,
    workers: int,
    held_out_fraction: float = 0.0,
    on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
) -> ShardManifest:
    """Prepare about `gb` gigabytes of token shards from the start of the source; continues where it was stopped."""
    if gb <= 0:
        raise ConfigError(f"gb is {gb:g}: there is nothing to stage. Give e.g. 5.")
    loaded = load_tokenizer(tokenizer)
    itemsize = token_dtype(loaded.vocab_size).itemsize
    opened = open_source(source)
    sampled = min(_SAMPLED_UNITS, len(opened))
    texts = [document.text for index in range(sampled) for document in opened.read(index)]
    sampled_bytes = itemsize * sum(len(ids) + 1 for ids in loaded.encode_batch(texts))
    units = max(1, round(gb * 1e9 * sampled / max(1, sampled_bytes)))
    plan = make_plan(source, tokenizer, held_out_fraction=held_out_fraction, limit_units=units)
    return prepare(plan, out, workers=workers, on_progress=on_progress)
