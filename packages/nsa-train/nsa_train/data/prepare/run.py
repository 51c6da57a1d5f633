"""Runs `nsa data prepare`: tokenizes a corpus into token shards in parallel, on this machine or on Slurm, resumable.

Tasks are defined by the source alone. A task is done when its record exists, the set when its manifest exists; both are
written last. If it is killed at any moment and run again, the same command produces the same bytes.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from datatrove.executor.base import DistributedEnvVars, PipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor

from nsa.errors import ConfigError, DataError
from nsa.files import file_lock, storage_errors
from nsa_train.data.prepare.dedup import hash_task, hashed_tasks, is_deduplicated, write_masks
from nsa_train.data.prepare.plan import WORK, PreparePlan, is_finished, make_plan, record_plan
from nsa_train.data.prepare.task import CountCallback, PrepareStep, ReadUnits, WriteShards, done_tasks, read_record
from nsa_train.data.prepare.worker_pool import Counts, TaskFunction, WorkerLost, WorkerPool
from nsa_train.data.saved_tokenizer import save_with_set
from nsa_train.data.shards.manifest import MANIFEST_NAME, SPLITS, ShardManifest, read_manifest
from nsa_train.data.shards.writer import ShardInfo
from nsa_train.data.source.read_report import ReadReport
from nsa_train.data.source.resolve import open_source
from nsa_train.data.tokenizer import load_tokenizer, token_dtype
from nsa_train.storage import StorageFolder

_REPORT_NAME = "prepare_report.json"
_POLL_S = 0.2
_SAMPLED_UNITS = 2


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """`documents`, `tokens` and `elapsed_s` count from the start of this process; units also count earlier ones."""

    activity: str
    tasks_done: int
    tasks: int
    units_done: int
    units_before: int  # done by an earlier process
    units: int
    documents: int
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
    out = StorageFolder(out_url)
    with _output_errors(out_url):
        return _prepare(plan, out, workers, on_progress)


def _output_errors(out_url: str) -> AbstractContextManager[None]:
    """Explain errors that are not handled closer to their cause: of the lock, datatrove's logs, the cleanup."""
    return storage_errors(
        f"{out_url} cannot be written",
        fix="Choose a writable output folder.",
        if_full=(DataError, "Free disk space and run the same command again; finished tasks are kept."),
    )


def _prepare(
    plan: PreparePlan, out: StorageFolder, workers: int, on_progress: Callable[[PrepareProgress], None]
) -> ShardManifest:
    if is_finished(plan, out):
        out.delete_tree(WORK)  # in case it was killed right after writing the manifest
        return read_manifest(out)
    with _single_writer(out):
        record_plan(plan, out)
        out.delete_tree(f"{WORK}/tmp")
        # datatrove's logs and completion marks; our own record, stored with the shards, decides whether a task is done.
        place = str(out.local_path(f"{WORK}/log")) if out.is_local else ""
        with nullcontext(place) if place else tempfile.TemporaryDirectory(prefix="nsa-prepare-log-") as logs:
            executor = _LocalExecutor(plan, out.url, workers, logs, on_progress)
            if plan.dedup and not is_deduplicated(out):
                executor.hash_documents()
                write_masks(plan, out)
            executor.run()
        return _finish(plan, out)


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


def _finish(plan: PreparePlan, out: StorageFolder) -> ShardManifest:
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


class _LocalExecutor(PipelineExecutor):
    """datatrove executor on a pool of spawned processes.

    datatrove's own local executor waits forever if a worker is killed (e.g. by the out-of-memory killer), and its
    helper process outlives a killed parent. Here a lost worker raises an error, and workers exit with their parent.
    """

    def __init__(
        self,
        plan: PreparePlan,
        out_url: str,
        workers: int,
        logs: str,
        on_progress: Callable[[PrepareProgress], None],
        on_count: CountCallback | None = None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"workers is {workers}: at least one is needed.")
        out = StorageFolder(out_url)
        reader = ReadUnits(plan, out_url)
        super().__init__([reader, WriteShards(plan, out_url, reader, on_count)], logging_dir=logs, skip_completed=False)
        self.plan = plan
        self.out = out
        self.workers = workers
        self._logs = logs
        self._on_progress = on_progress
        self._tasks = len(plan.tasks())

    @property
    def world_size(self) -> int:
        return self._tasks

    def get_distributed_env(self, node_rank: int = -1) -> DistributedEnvVars:
        return DistributedEnvVars(
            datatrove_node_ips="localhost",
            datatrove_cpus_per_task="1",
            datatrove_mem_per_cpu="-1",
            datatrove_gpus_on_node="0",
            datatrove_executor="LOCAL",
        )

    def run(self) -> None:
        self._run_pool("tokenize", _run_task, done_tasks(self.out))

    def hash_documents(self) -> None:
        """First pass of a preparation with `dedup`: store the hashes of all documents."""
        self._run_pool("compare documents", _hash_task, hashed_tasks(self.out))

    def _run_pool(self, activity: str, run_task: TaskFunction, done_before: set[int]) -> None:
        sizes = [task.stop_unit - task.first_unit for task in self.plan.tasks()]
        units_before = sum(size for rank, size in enumerate(sizes) if rank in done_before)
        tasks = [rank for rank in range(self._tasks) if rank not in done_before]
        finished, documents, tokens, units = len(sizes) - len(tasks), 0, 0, 0
        shown = started = time.monotonic()
        try:
            with WorkerPool(self.workers, tasks, run_task, (self.plan, self.out.url, self._logs)) as pool:
                for ended, counts in pool.progress(_POLL_S):
                    finished += ended
                    documents, tokens, units = documents + counts[0], tokens + counts[1], units + counts[2]
                    now = time.monotonic()
                    if ended or now - shown >= _POLL_S:
                        shown = now
                        self._on_progress(
                            PrepareProgress(
                                activity, finished, self._tasks, units_before + units, units_before, sum(sizes),
                                documents, tokens, now - started,
                            )
                        )  # fmt: skip
        except WorkerLost as error:
            raise DataError(
                f"a prepare worker was killed by a signal, often by the out-of-memory killer ({error}). Use fewer "
                "workers or smaller tasks, and run the same command again; finished tasks are kept."
            ) from error


_Job = tuple[PreparePlan, str, str]
"""Plan, output URL, log folder."""


def _run_task(job: _Job, rank: int, report: Callable[[Counts], None]) -> None:
    plan, out_url, logs = job

    def count(documents: int, tokens: int, units: int) -> None:
        report((documents, tokens, units))

    with _output_errors(out_url):
        _LocalExecutor(plan, out_url, 1, logs, lambda progress: None, count)._run_for_rank(rank, local_rank=1)


def _hash_task(job: _Job, rank: int, report: Callable[[Counts], None]) -> None:
    plan, out_url, _ = job
    with _output_errors(out_url):
        for units in hash_task(plan, StorageFolder(out_url), rank):
            report((0, 0, units))


class _FinishPreparation(PrepareStep):
    """Last Slurm job: writes the manifest."""

    name = "manifest"
    type = "writer"

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        _finish(self.plan, StorageFolder(self.out_url))
        yield from ()


def slurm_executor(
    plan: PreparePlan,
    out_url: str,
    *,
    logging_dir: str,
    partition: str,
    time_limit: str,
    workers: int = -1,
    tasks_per_job: int = 1,
    mem_per_cpu_gb: int = 4,
    env_command: str | None = None,
    sbatch_args: dict[str, str] | None = None,
) -> SlurmPipelineExecutor:
    """Executor that submits two Slurm jobs: an array over the tasks, then one that writes the manifest.

    `logging_dir` must be on a file system shared by all nodes. Running it again submits only unfinished tasks.
    """
    if plan.dedup:
        raise ConfigError("--dedup does not run on Slurm: it compares all documents first. Prepare on one machine.")
    out = StorageFolder(out_url)
    if not is_finished(plan, out):
        record_plan(plan, out)
    shared: dict[str, Any] = {
        "partition": partition,
        "time": time_limit,
        "mem_per_cpu_gb": mem_per_cpu_gb,
        "env_command": env_command,
        "sbatch_args": sbatch_args,
        "qos": "",
    }
    reader = ReadUnits(plan, out_url)
    tasks = SlurmPipelineExecutor(
        pipeline=[reader, WriteShards(plan, out_url, reader)],
        tasks=len(plan.tasks()),
        workers=workers,
        tasks_per_job=tasks_per_job,
        job_name="nsa-prepare",
        logging_dir=f"{logging_dir}/tasks",
        **shared,
    )
    return SlurmPipelineExecutor(
        pipeline=[_FinishPreparation(plan, out_url)],
        tasks=1,
        job_name="nsa-prepare-manifest",
        logging_dir=f"{logging_dir}/manifest",
        depends=tasks,
        **shared,
    )


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
