"""Runs `nsa data prepare`: tokenizes a corpus into token shards in parallel, resumable.

Tasks are defined by the source alone. A task is done when its record exists, the set when its manifest exists; both are
written last. If it is killed at any moment and run again, the same command produces the same bytes.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from nsa.errors import ConfigError, DataError
from nsa.files import file_lock, storage_errors
from nsa_train.data.prepare.plan import WORK, PreparePlan, is_finished, make_plan, record_plan
from nsa_train.data.prepare.task import (
    DEDUP_DONE,
    CountCallback,
    done_tasks,
    hash_task,
    read_record,
    run_task,
    write_masks,
)
from nsa_train.data.shards.manifest import MANIFEST_NAME, SPLITS, ShardManifest, read_manifest, save_with_set
from nsa_train.data.shards.writer import ShardInfo
from nsa_train.data.source.read_report import ReadReport
from nsa_train.data.source.resolve import open_source
from nsa_train.data.tokenizer import load_tokenizer, start_tokenizer_worker, token_dtype
from nsa_train.storage import StorageFolder

_REPORT_NAME = "prepare_report.json"
_POLL_S = 0.2
_SAMPLED_UNITS = 2
_TaskFunction = Callable[[PreparePlan, StorageFolder, int, CountCallback], None]


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """`tokens` and `elapsed_s` count from the start of this process; units also count earlier ones."""

    activity: str
    units_done: int
    units_before: int  # done by an earlier process
    units: int
    tokens: int
    elapsed_s: float

    @property
    def left_s(self) -> float | None:
        """Estimated time to the end of this activity; None before the first unit."""
        done = self.units_done - self.units_before
        return self.elapsed_s * (self.units - self.units_done) / done if done else None


def prepare(
    plan: PreparePlan,
    out_url: str,
    *,
    workers: int,
    on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
) -> ShardManifest:
    """Run every unfinished task with `workers` processes on this machine, then write the manifest."""
    if workers < 1:
        raise ConfigError(f"workers is {workers}: at least one is needed.")
    out = StorageFolder(out_url)
    with _output_errors(out_url):
        if is_finished(plan, out):
            out.delete_tree(WORK)  # in case it was killed right after writing the manifest
            return read_manifest(out)
        with _single_writer(out):
            record_plan(plan, out)
            out.delete_tree(f"{WORK}/tmp")
            if plan.dedup and not out.exists(DEDUP_DONE):
                _run_tasks(hash_task, "compare documents", plan, out, workers, done_tasks(out, "hashes"), on_progress)
                write_masks(plan, out)
            _run_tasks(run_task, "tokenize", plan, out, workers, done_tasks(out), on_progress)
            return write_manifest(plan, out)


def _output_errors(out_url: str) -> AbstractContextManager[None]:
    """Explain errors that are not handled closer to their cause: of the lock, the records, the cleanup."""
    return storage_errors(
        f"{out_url} cannot be written",
        fix="Choose a writable output folder.",
        if_full=(DataError, "Free disk space and run the same command again; finished tasks are kept."),
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
    """Prepare about `gb` gigabytes of token shards from the start of the source; resumes if interrupted."""
    if gb <= 0:
        raise ConfigError(f"gb is {gb:g}: it must be positive. Set e.g. 5.")
    loaded = load_tokenizer(tokenizer)
    itemsize = token_dtype(loaded.vocab_size).itemsize
    opened = open_source(source)
    sampled = min(_SAMPLED_UNITS, len(opened))
    texts = [document.text for index in range(sampled) for document in opened.read(index)]
    sampled_bytes = itemsize * sum(len(ids) + 1 for ids in loaded.encode_batch(texts))
    units = max(1, round(gb * 1e9 * sampled / max(1, sampled_bytes)))
    plan = make_plan(source, tokenizer, held_out_fraction=held_out_fraction, limit_units=units)
    return prepare(plan, out, workers=workers, on_progress=on_progress)


def write_manifest(plan: PreparePlan, out: StorageFolder) -> ShardManifest:
    """Write tokenizer and manifest from the plan and the records of all tasks, which must be done. Idempotent."""
    tasks = len(plan.tasks())
    if missing := sorted(set(range(tasks)) - done_tasks(out)):
        raise DataError(
            f"{len(missing)} of {tasks} tasks of {out.url} are not done (first: {missing[0]}): their "
            "documents would be missing. Run the same command again."
        )
    records = [read_record(out, rank) for rank in range(tasks)]
    quarantined = [unit for record in records for unit in record["bad_units"]]
    if len(quarantined) > plan.max_bad_units:
        raise DataError(
            f"{len(quarantined)} units are corrupt, max_bad_units is {plan.max_bad_units}: "
            f"{'; '.join(quarantined[:5])}. Download these files again and prepare into a new folder, or raise "
            "--max-bad-units."
        )
    manifest = ShardManifest(
        vocab_size=plan.vocab_size,
        tokenizer_fingerprint=plan.fingerprint,
        eos_id=plan.eos_id,
        dtype=plan.dtype,
        made_from=plan.made_from(),
        quarantined=quarantined,
        splits={split: [ShardInfo(**s) for record in records for s in record["shards"][split]] for split in SPLITS},
    )
    if out.is_local:
        for unfinished in out.local_path("").glob(f".{MANIFEST_NAME}.*.tmp"):  # left by a run that was killed here
            unfinished.unlink()
    report = ReadReport.from_json(plan.left_out)
    for record in records:
        if "report" in record:  # not in that of an earlier version
            report.add(ReadReport.from_json(record["report"]))
    out.write_bytes(_REPORT_NAME, json.dumps(report.as_json(), indent=1).encode())
    tokenizer = load_tokenizer(plan.tokenizer, eos_token=plan.eos_token)
    save_with_set(out, tokenizer, plan.vocab_size, plan.fingerprint)
    out.write_bytes(MANIFEST_NAME, manifest.to_bytes())
    out.delete_tree(WORK)
    return manifest


def read_report(out: StorageFolder) -> ReadReport | None:
    """Report of what was read and skipped for a prepared set; None for one of an earlier version, or a damaged file."""
    try:
        return ReadReport.from_json(json.loads(out.read_bytes(_REPORT_NAME))) if out.exists(_REPORT_NAME) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _run_tasks(
    run: _TaskFunction,
    activity: str,
    plan: PreparePlan,
    out: StorageFolder,
    workers: int,
    done: set[int],
    on_progress: Callable[[PrepareProgress], None],
) -> None:
    """Run the tasks that are not `done` with `workers` processes on this machine."""
    sizes = [task.stop_unit - task.first_unit for task in plan.tasks()]
    units_before = sum(size for rank, size in enumerate(sizes) if rank in done)
    ranks = [rank for rank in range(len(sizes)) if rank not in done]
    tokens = units = 0
    shown = started = time.monotonic()
    for ended, new_tokens, new_units in _run_in_processes(run, plan, out.url, ranks, workers):
        tokens, units, now = tokens + new_tokens, units + new_units, time.monotonic()
        if ended or now - shown >= _POLL_S:
            shown = now
            on_progress(
                PrepareProgress(activity, units_before + units, units_before, sum(sizes), tokens, now - started)
            )


def _run_in_processes(
    run: _TaskFunction, plan: PreparePlan, out_url: str, ranks: Sequence[int], workers: int
) -> Iterator[tuple[int, int, int]]:
    """Run tasks in spawned processes; yields the tasks that ended, tokens and units since the last yield.

    Raises the first error of a task. At the end the processes are killed: a task that did not end is run again by the
    next preparation. Tasks, counts and errors go through pipes: locks, queues and arrays of `multiprocessing` have
    named semaphores, which stay in /dev/shm when every process of a preparation is killed at once.
    """
    context = get_context("spawn")
    waiting = list(reversed(ranks))
    processes: dict[Connection, SpawnProcess] = {}
    working: set[Connection] = set()

    def send_task(connection: Connection) -> None:
        working.discard(connection)
        if waiting:
            working.add(connection)
            with suppress(BrokenPipeError):  # it is dead: the next receive says so
                connection.send(waiting.pop())

    try:
        for _ in range(min(workers, len(ranks))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, os.getpid(), run, plan, out_url), daemon=True)
            process.start()
            theirs.close()  # the worker has the only other end: its death is the end of the file
            processes[ours] = process
            send_task(ours)
        while working:
            ended = tokens = units = 0
            for connection in wait(list(working), _POLL_S):
                assert isinstance(connection, Connection)
                message = _receive(connection, processes[connection])
                if message is None:
                    ended += 1
                    send_task(connection)
                else:
                    tokens, units = tokens + message[0], units + message[1]
            yield ended, tokens, units
    finally:
        for process in processes.values():
            process.kill()
        for connection, process in processes.items():
            process.join()
            connection.close()


def _receive(connection: Connection, process: SpawnProcess) -> tuple[int, int] | None:
    """Tokens and units from a worker, or None at the end of a task."""
    try:
        message: tuple[int, int] | Exception | None = connection.recv()
    except (EOFError, ConnectionResetError) as error:
        process.join()
        raise DataError(
            f"a prepare worker was killed by a signal, often by the out-of-memory killer (process {process.pid}, exit "
            f"code {process.exitcode}). Use fewer workers or smaller tasks, and run the same command again; finished "
            "tasks are kept."
        ) from error
    if isinstance(message, Exception):
        raise message
    return message


def _work(connection: Connection, parent_pid: int, run: _TaskFunction, plan: PreparePlan, out_url: str) -> None:
    """Worker process: run the tasks that are sent until it is killed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the parent decides
        signal.signal(number, signal.SIG_IGN)
    start_tokenizer_worker(parent_pid)
    while True:
        rank, error = connection.recv(), None
        try:
            with _output_errors(out_url):
                run(plan, StorageFolder(out_url), rank, lambda *counts: connection.send(counts))
        except Exception as raised:  # noqa: BLE001 - the parent raises it again
            error = raised
        connection.send(error)


@contextmanager
def _single_writer(out: StorageFolder) -> Iterator[None]:
    if not out.is_local:
        yield  # tasks write deterministic bytes under fixed names: two writers duplicate work but do no harm
        return
    lock_path = out.local_path(f"{WORK}/lock")
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(lock_path, wait=False))
        except BlockingIOError as error:
            raise DataError(
                f"another process is preparing into {out.url}. Wait for it to finish, or stop it."
            ) from error
        yield
