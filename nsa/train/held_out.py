"""Checks that the held-out split gives one batch to evaluate on: the preflight rule `held_out`."""

from nsa.config.schema import RunConfig
from nsa.data.prefetcher import BatchPrefetcher, PrefetchSettings
from nsa.data.rows.specs import DirectData, PreparedData
from nsa.data.shards.manifest import read_manifest
from nsa.errors import DataError, DataTimeout
from nsa.planning.preflight_facts import DryRunAttempt
from nsa.storage import StorageFolder
from nsa.train import datasets


def try_held_out(config: RunConfig, vocab_size: int, *, fetch_remote: bool) -> DryRunAttempt:
    data, wanted = datasets.held_out_rows(config, vocab_size), config.train.batch_size
    if isinstance(data, DirectData) and not data.held_out_fraction:
        return DryRunAttempt(problem="data.held_out is 0 and train.eval_every is not: there is nothing to evaluate on")
    if not fetch_remote and (place := datasets.remote_address(config)):
        return DryRunAttempt(not_tried=f"{place} is on another machine; --fetch tries it")
    try:
        if isinstance(data, PreparedData):
            return _in_manifest(data, wanted)
        if isinstance(data, DirectData):
            return _in_documents(data, wanted, config.data.loader_timeout_s)
    except DataError as error:
        if isinstance(error, DataTimeout) or config.data.synthetic_on_fail:
            return DryRunAttempt(not_tried=f"no held-out batch was read: {error}")
        return DryRunAttempt(problem=f"no batch of {wanted} held-out rows to evaluate on: {error}")
    return DryRunAttempt(seen=f"{data} have no end")


def _in_manifest(data: PreparedData, wanted: int) -> DryRunAttempt:
    tokens = read_manifest(StorageFolder(data.url)).totals(data.split)["tokens"]
    found = -(-tokens // data.seq_len)
    what = f"{data} holds {tokens:,} tokens, {found} rows of {data.seq_len}"
    if found >= wanted:
        return DryRunAttempt(seen=what)
    return DryRunAttempt(
        problem=f"{what}: an evaluation needs a batch of {wanted} rows (train.batch_size); prepare it again with a "
        f"larger --held-out"
    )


def _in_documents(data: DirectData, wanted: int, timeout_s: float) -> DryRunAttempt:
    """In a process of its own: a source in which held-out documents are rare is not waited for longer than this."""
    with BatchPrefetcher(
        data, global_rows=wanted, settings=PrefetchSettings(queue_depth=1, timeout_s=timeout_s)
    ) as feeder:
        next(feeder)
    return DryRunAttempt(seen=f"{data} gives a batch of {wanted} rows")
