"""Drill scenarios: a data server that hangs, a corrupt shard."""

import time
from pathlib import Path

from nsa.errors import DataError
from nsa_train.record.events import EventKind
from nsa_train.record.failure_codes import FailureCode
from proofs.drill import artifacts
from proofs.drill.damage import flip_bit
from proofs.drill.data_server import DataServer, write_jsonl
from proofs.drill.harness import BATCH_ROWS, SAVE_EVERY, SEQ_LEN, STEPS, DrillHarness, NotObserved
from proofs.drill.result import DrillResult, finish

_LOADER_TIMEOUT_S = 12.0


def stalled_data(harness: DrillHarness, result: DrillResult) -> None:
    server = DataServer(harness.folder)
    harness.at_end(server.close)
    launched = harness.launch(
        "data.dataset=local",
        f"data.path={server.url}",
        f"data.loader_timeout_s={_LOADER_TIMEOUT_S:g}",
        "data.prefetch=true",
        "data.queue_depth=1",
        nproc=1,
    )
    harness.wait_for_step(SAVE_EVERY + 1, launched)
    server.hang()
    at = time.time()

    verdict = harness.wait_for(
        "the launcher's record", lambda: artifacts.launcher_verdicts(harness.run_folder), launched
    )[0]
    server.recover()
    error = artifacts.events(harness.run_folder, EventKind.ERROR)[0]
    result.detected(f"loader: {_shortened(error.details.get('error'))}", error.ts - at, within_s=_LOADER_TIMEOUT_S + 10)
    result.require_equal("exit code in the launcher's event", verdict.details.get("code"), DataError.exit_code)
    result.require_equal("failure code", error.details.get("failure_code"), FailureCode.DATA_TIMEOUT)
    step = artifacts.newest_good_step(harness.run_folder)
    result.require(step, "no verified checkpoint")
    result.left_behind = f"exit {DataError.exit_code}, verified checkpoint {step}, the address in the event"
    result.require(server.url in str(error.details.get("error")), "the event does not name the address")
    finish(harness, result, launched, fault_at=at)
    result.resumed = f"by the launcher: {result.resumed}"


def corrupt_shard(harness: DrillHarness, result: DrillResult) -> None:
    prepared = _prepare(harness)
    settings = ["data.dataset=prepared", f"data.path={prepared}"]
    shard, offset, due = _late_block(prepared)
    flip_bit(shard, offset)
    at = time.time()
    process = harness.train(*settings)
    result.require_equal("exit code", process.wait(), DataError.exit_code)
    errors = artifacts.events(harness.run_folder, EventKind.ERROR)
    result.require(errors, "no error event")
    if errors:
        text = str(errors[-1].details.get("error"))
        result.require(f"{shard.stem}.tok" in text and "SHA-256" in text, f"the event does not name the shard: {text}")
        began = artifacts.beats(harness.run_folder)[-1].ts if artifacts.beats(harness.run_folder) else at
        result.detected(f"reader: SHA-256 of {shard.name}, block by block", errors[-1].ts - began, within_s=10)
    result.require_equal("last step trained", artifacts.last_step(harness.run_folder), due - 1)
    verify = harness.start("nsa_train.cli", "data", "verify", str(prepared))
    result.require_equal("exit code of nsa data verify", verify.wait(), DataError.exit_code)
    result.require(shard.name in verify.output(), "nsa data verify does not name the shard")
    step = artifacts.newest_good_step(harness.run_folder)
    result.left_behind = f"exit {DataError.exit_code}, verified checkpoint {step}; no damaged row trained on"
    flip_bit(shard, offset)
    finish(harness, result, harness.train("--resume", *settings))


def _prepare(harness: DrillHarness) -> Path:
    corpus, prepared = harness.folder / "corpus.jsonl", harness.folder / "set"
    write_jsonl(corpus, 4000)
    command = ["data", "prepare", str(corpus), str(prepared), "--tokenizer", "byte", "--workers", "1"]
    process = harness.start("nsa_train.cli", *command)
    if (code := process.wait()) != 0:
        raise NotObserved(f"nsa data prepare exited with {code}: {process.output()[-300:]}")
    return prepared


def _late_block(prepared: Path) -> tuple[Path, int, int]:
    """A shard file, a byte in it, and the step that first reads the block around it: the latest there is."""
    import numpy as np

    from nsa_train.config.schema import TrainConfig
    from nsa_train.data.rows.prepared import PreparedRows
    from nsa_train.data.shards.reader import ShardReader
    from nsa_train.data.shards.writer import BLOCK_BYTES
    from nsa_train.storage import StorageFolder

    reader = ShardReader(StorageFolder(str(prepared)))
    rows = PreparedRows(reader, SEQ_LEN, shuffle_seed=TrainConfig().seed)
    row_bytes = SEQ_LEN * reader.manifest.numpy_dtype.itemsize
    stored = rows.stored_rows(np.arange(STEPS * BATCH_ROWS, dtype=np.int64)) * row_bytes
    first_step: dict[int, int] = {}
    for place, start in enumerate(stored.tolist()):
        for block in {start // BLOCK_BYTES, (start + row_bytes - 1) // BLOCK_BYTES}:
            first_step.setdefault(block, place // BATCH_ROWS + 1)
    block, due = max(first_step.items(), key=lambda item: item[1])
    (shard,) = sorted(prepared.rglob("*.tok"), key=lambda path: path.stat().st_size)[-1:]
    return shard, block * BLOCK_BYTES + 100, due


def _shortened(text: object, most: int = 60) -> str:
    message = str(text).removeprefix("DataError: ").removeprefix("DataTimeout: ")
    return message if len(message) <= most else f"{message[:most]}…"
