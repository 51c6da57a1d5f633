"""Checks that the held-out split gives one batch to evaluate on: the preflight rule `held_out`."""

from nsa.config.schema import RunConfig
from nsa.data.feed.feeder import Feeder, FeedSettings
from nsa.data.rows.opening import DirectData, PreparedData
from nsa.data.shards.folder import Folder
from nsa.data.shards.manifest import read_manifest
from nsa.errors import DataError, DataTimeout
from nsa.guard.facts import Attempt
from nsa.train import rows


def try_held_out(config: RunConfig, vocab_size: int, *, fetch_remote: bool) -> Attempt:
    data, wanted = rows.held_out_rows(config, vocab_size), config.train.batch_size
    if isinstance(data, DirectData) and not data.held_out_fraction:
        return Attempt(problem="data.held_out is 0 and train.eval_every is not: there is nothing to evaluate on")
    if not fetch_remote and (place := rows.remote_address(config)):
        return Attempt(not_tried=f"{place} is on another machine; --fetch tries it")
    try:
        if isinstance(data, PreparedData):
            return _in_manifest(data, wanted)
        if isinstance(data, DirectData):
            return _in_documents(data, wanted, config.data.loader_timeout_s)
    except DataError as error:
        if isinstance(error, DataTimeout) or config.data.synthetic_on_fail:
            return Attempt(not_tried=f"no held-out batch was read: {error}")
        return Attempt(problem=f"no batch of {wanted} held-out rows to evaluate on: {error}")
    return Attempt(seen=f"{data} have no end")


def _in_manifest(data: PreparedData, wanted: int) -> Attempt:
    tokens = read_manifest(Folder(data.url)).totals(data.split)["tokens"]
    found = -(-tokens // data.seq_len)
    what = f"{data} holds {tokens:,} tokens, {found} rows of {data.seq_len}"
    if found >= wanted:
        return Attempt(seen=what)
    return Attempt(
        problem=f"{what}: an evaluation needs a batch of {wanted} rows (train.batch_size); prepare it again with a "
        f"larger --held-out"
    )


def _in_documents(data: DirectData, wanted: int, timeout_s: float) -> Attempt:
    """In a process of its own: a source in which held-out documents are rare is not waited for longer than this."""
    with Feeder(data, global_rows=wanted, settings=FeedSettings(queue_depth=1, timeout_s=timeout_s)) as feeder:
        next(feeder)
    return Attempt(seen=f"{data} gives a batch of {wanted} rows")
