"""Benchmark of prepared data (tokenizing, serving rows, a huge index): `python -m tools.bench_data`.

1. prepare with 1 and 2 workers, against one bare `encode_batch_fast` process on the same texts
2. serving prepared rows from one core, first epoch (every byte verified) and second
3. memory while 10⁷ rows are addressed, start-up and resume, with an index of 15 trillion tokens (no token file)

The texts are the real documentation shipped with the tests, repeated; the BPE is trained on them. Numbers of a shared
machine vary: each ratio's two sides are measured next to each other, and per CPU second besides wall clock.
"""

import argparse
import json
import multiprocessing as mp
import os
import platform
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nsa_train.data.prepare.plan import make_plan
from nsa_train.data.prepare.run import prepare
from nsa_train.data.rows.prepared import PreparedRows, ShuffleSettings
from nsa_train.data.rows.row_stream import IndexedRowStream
from nsa_train.data.shards.manifest import MANIFEST_NAME, TRAIN, VALIDATION, ShardManifest
from nsa_train.data.shards.reader import ShardReader
from nsa_train.data.shards.writer import ShardInfo, ShardWriter
from nsa_train.data.tokenizer import start_tokenizer_worker, train_bpe
from nsa_train.shipped import CORPUS
from nsa_train.storage import StorageFolder

VOCAB = 32_768
BATCH_DOCUMENTS = 128


def report(name: str, value: str, target: str = "") -> None:
    print(f"{name:<62} {value:>16}   {target}", flush=True)


def documents(corpus: Path, megabytes: float) -> list[str]:
    """The texts of a parquet file, repeated until there are enough."""
    pieces = pq.read_table(corpus, columns=["text"]).column("text").to_pylist()
    kept: list[str] = []
    size = 0
    while size < megabytes * 1e6:
        piece = pieces[len(kept) % len(pieces)]
        kept.append(piece)
        size += len(piece)
    return kept


def bare_encode(path: str, texts: list[str], answer: Any) -> None:
    start_tokenizer_worker(os.getppid())
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    start, cpu_start = time.perf_counter(), time.process_time()
    tokens = 0
    for first in range(0, len(texts), BATCH_DOCUMENTS):
        batch = tokenizer.encode_batch_fast(texts[first : first + BATCH_DOCUMENTS], add_special_tokens=False)
        tokens += sum(len(encoding) for encoding in batch)
    answer.put((tokens, time.perf_counter() - start, time.process_time() - cpu_start))


def bench_prepare(work: Path, corpus: Path, megabytes: float) -> None:
    texts = documents(corpus, megabytes)
    tokenizer = work / "bpe.json"
    train_bpe(documents(corpus, 4.0), VOCAB, tokenizer)
    source = work / "src"
    source.mkdir()
    files = 4
    for f in range(files):
        part = texts[f::files]
        table = pa.table({"text": part, "id": [f"{f}-{i}" for i in range(len(part))]})
        pq.write_table(table, source / f"{f}.parquet", row_group_size=250, write_page_checksum=True)
    for workers in (1, 2):
        # The baseline is measured again next to each: other work on the machine changes both alike.
        answer: Any = mp.get_context("spawn").Queue()
        child = mp.get_context("spawn").Process(target=bare_encode, args=(str(tokenizer), texts, answer))
        child.start()
        tokens, seconds, cpu_seconds = answer.get()
        child.join()
        bare, bare_cpu = tokens / seconds, tokens / cpu_seconds
        report(f"bare encode_batch_fast, 1 process ({tokens:,} tokens)", f"{bare / 1e6:.3f} M tok/s")
        plan = make_plan(str(source), str(tokenizer), units_per_task=8)
        start, cpu_start = time.perf_counter(), _children_cpu_s()
        made = prepare(plan, str(work / f"out{workers}"), workers=workers).totals(TRAIN)["tokens"]
        rate = made / (time.perf_counter() - start)
        rate_cpu = made / (_children_cpu_s() - cpu_start)
        report(f"prepare, {workers} worker(s), start-up included", f"{rate / 1e6:.3f} M tok/s")
        report("  relative to workers × bare, wall clock", f"{rate / bare / workers:.2f}", "target ≥ 0.80")
        report(
            "  relative to bare, per CPU second of all workers", f"{rate_cpu / bare_cpu:.2f}", "(busy machine: this)"
        )


def bench_serving(work: Path, tokens: int, seq_len: int) -> None:
    path = work / "serve"
    folder = StorageFolder(str(path))
    rng = np.random.default_rng(0)
    shards = []
    per_shard = tokens // 4
    for number in range(4):
        writer = ShardWriter(f"{TRAIN}/{number:06d}-000", np.dtype(np.uint16), path / "scratch")
        while writer.tokens < per_shard:
            writer.add(f"d{writer.documents}", rng.integers(0, VOCAB, int(rng.integers(100, 2000)), dtype=np.uint16), 0)
        shards.append(writer.finish(folder))
    folder.write_bytes(MANIFEST_NAME, synthetic_manifest(shards).to_bytes())
    rows = PreparedRows(ShardReader(folder), seq_len, shuffle=ShuffleSettings(1))
    stream = IndexedRowStream(rows)
    batch = 16
    for epoch in ("first epoch, every byte verified", "second epoch"):
        steps = rows.rows_per_epoch // batch
        start = time.process_time(), time.perf_counter()
        served = 0
        for _ in range(steps):
            served += stream.next_batch(batch).tokens.size
            stream.state_dict()  # the feeding process sends it along with every batch
        cpu, wall = time.process_time() - start[0], time.perf_counter() - start[1]
        report(
            f"serving rows of {seq_len}, {epoch} (wall {served / wall / 1e6:.0f})",
            f"{served / cpu / 1e6:.0f} M tok/s",
            "target ≥ 50, one core",
        )


def synthetic_manifest(shards: list[ShardInfo]) -> ShardManifest:
    return ShardManifest(VOCAB, "bench", 0, "uint16", {"source": "bench"}, [], {TRAIN: shards, VALIDATION: []})


def bench_huge_index(work: Path) -> None:
    total, per_shard, seq_len = 15 * 10**12, 2**30, 8192
    count = -(-total // per_shard)
    digest = "0" * 64
    shards = [
        ShardInfo(f"{TRAIN}/{n:06d}-000", per_shard, 10**6, 2 * per_shard, 10**7, 10**7, digest, digest, digest)
        for n in range(count)
    ]
    path = work / "huge"
    StorageFolder(str(path)).write_bytes(MANIFEST_NAME, synthetic_manifest(shards).to_bytes())
    del shards

    def open_rows() -> PreparedRows:
        return PreparedRows(ShardReader(StorageFolder(str(path))), seq_len, shuffle=ShuffleSettings(7))

    start = time.perf_counter()
    rows = open_rows()
    rows.stored_rows(np.arange(64))
    report(f"start-up with {count:,} shards, {rows.reader.total_tokens:,} tokens", _seconds(start), "target < 1 s")
    stream = IndexedRowStream(rows)
    state = json.dumps(stream.state_dict() | {"next_row": 1_234_567_890})
    start = time.perf_counter()
    resumed = IndexedRowStream(open_rows())
    resumed.load_state_dict(json.loads(state))
    rows.stored_rows(np.arange(1_234_567_890, 1_234_567_890 + 64))
    report(f"resume at row 1,234,567,890 (cursor of {len(state)} bytes)", _seconds(start), "target < 1 s")

    addressed, chunk = 10**7, 4096
    before = _rss_mib()
    start = time.perf_counter()
    check = 0
    for first in range(0, addressed, chunk):
        stored = rows.stored_rows(np.arange(first, first + chunk, dtype=np.int64))
        shard, offset = rows.reader.locate(stored * seq_len)
        check ^= int(shard.sum() + offset.sum())
    elapsed = time.perf_counter() - start
    report(f"addressing 10⁷ shuffled rows ({addressed / elapsed / 1e6:.1f} M rows/s)", f"{elapsed:.1f} s")
    report("memory growth meanwhile", f"{_rss_mib() - before:.1f} MiB", "flat")


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _seconds(start: float) -> str:
    return f"{time.perf_counter() - start:.3f} s"


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="parquet file with a column `text`")
    parser.add_argument("--megabytes", type=float, default=64.0, help="text for the prepare measurement")
    parser.add_argument("--serve-tokens", type=int, default=2**26)
    parser.add_argument("--seq-len", type=int, default=2048)
    arguments = parser.parse_args()
    print(f"python {platform.python_version()}, numpy {np.__version__}, {len(os.sched_getaffinity(0))} cores")
    work = Path(tempfile.mkdtemp(prefix="bench-data-"))
    try:
        bench_huge_index(work)
        bench_serving(work, arguments.serve_tokens, arguments.seq_len)
        bench_prepare(work, arguments.corpus, arguments.megabytes)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
