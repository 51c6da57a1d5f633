import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from nsa.errors import ConfigError, DataError, DataProcessKilled, DataTimeout
from nsa.files import SHARED_MEMORY
from nsa_train import names
from nsa_train.data.prefetcher import BatchPrefetcher, PrefetchSettings
from nsa_train.data.rows.batch import EndOfData
from nsa_train.data.rows.specs import DirectData, PreparedData, SyntheticData
from nsa_train.record.failure_codes import code_of_exception
from nsa_train.record.heartbeat_record import HeartbeatRecord
from nsa_train.watch.conditions import HealthLimits
from nsa_train.watch.health import examine
from nsa_train.watch.history import RunHistory
from tests.nsa_train.data.shard_sets import documents, write_set

SYNTHETIC = SyntheticData("uniform", vocab_size=100, seq_len=16, seed=1)


def test_batches_come_in_order_and_the_cursor_is_the_consumed_one(tmp_path: Path) -> None:
    write_set(tmp_path, documents(100))
    data = PreparedData(str(tmp_path), seq_len=32, seed=2)
    direct = data.open()
    with BatchPrefetcher(data, global_rows=4, settings=PrefetchSettings(queue_depth=8, warmup_batches=6)) as prefetcher:
        assert prefetcher.warm_up() == 6
        assert prefetcher.state_dict() is None
        for taken in range(1, 10):
            assert np.array_equal(next(prefetcher).tokens, direct.next_batch(4).tokens)
            state = prefetcher.state_dict()
            assert state is not None
            assert state["next_row"] == 4 * taken  # though many more are waiting
        assert state == direct.state_dict()
    with BatchPrefetcher(data, global_rows=4, state=json.loads(json.dumps(state))) as prefetcher:
        assert np.array_equal(next(prefetcher).tokens, direct.next_batch(4).tokens)


def test_every_document_comes_once(tmp_path: Path) -> None:
    docs = documents(40)
    write_set(tmp_path, docs)
    data = PreparedData(str(tmp_path), seq_len=64, max_epochs=1)
    batches = []
    with BatchPrefetcher(data, global_rows=1) as prefetcher, pytest.raises(EndOfData):
        batches.extend(prefetcher)
    assert sum(batch.documents for batch in batches) == len(docs)
    assert sum(batch.valid_tokens for batch in batches) == sum(len(tokens) + 1 for _, tokens in docs)


def test_what_was_warmed_up_is_used_before_the_end_is_reported(tmp_path: Path) -> None:
    write_set(tmp_path, documents(40))
    data = PreparedData(str(tmp_path), seq_len=64, max_epochs=1)
    with BatchPrefetcher(data, global_rows=4, settings=PrefetchSettings(warmup_batches=10_000)) as prefetcher:
        waiting = prefetcher.warm_up()
        for _ in range(waiting):
            next(prefetcher)
        with pytest.raises(EndOfData):
            next(prefetcher)


def test_an_error_of_the_source_arrives_with_its_own_message(tmp_path: Path) -> None:
    with (
        BatchPrefetcher(PreparedData(str(tmp_path), seq_len=8), global_rows=1) as prefetcher,
        pytest.raises(DataError, match="manifest"),
    ):
        next(prefetcher)
    bad = DirectData(str(tmp_path / "nothing"), "byte", seq_len=8)
    with BatchPrefetcher(bad, global_rows=1) as prefetcher, pytest.raises(ConfigError):
        next(prefetcher)


def test_a_cursor_of_other_data_is_refused_in_the_trainer() -> None:
    state = SYNTHETIC.open().state_dict()
    other = SyntheticData("uniform", vocab_size=100, seq_len=16, seed=2)
    with (
        BatchPrefetcher(other, global_rows=1, state=state) as prefetcher,
        pytest.raises(ConfigError, match="seed"),
    ):
        next(prefetcher)


def test_a_silent_source_ends_with_what_was_waited_for() -> None:
    release = Event()

    class Silent(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            release.wait(30)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}/a.parquet"
    try:
        data = DirectData(address, "byte", seq_len=8, loader_timeout_s=600)
        start = time.monotonic()
        settings = PrefetchSettings(timeout_s=2.0)
        with BatchPrefetcher(data, global_rows=1, settings=settings) as prefetcher, pytest.raises(DataError) as caught:
            prefetcher.warm_up()
        assert time.monotonic() - start < 120  # a busy machine takes long to start the worker
        assert "the first batch" in str(caught.value)
        assert address in str(caught.value)
    finally:
        release.set()
        server.shutdown()


def test_a_killed_worker_is_reported() -> None:
    with BatchPrefetcher(SYNTHETIC, global_rows=2, settings=PrefetchSettings(queue_depth=1)) as prefetcher:
        next(prefetcher)
        os.kill(prefetcher.worker_pid, signal.SIGKILL)
        with pytest.raises(DataProcessKilled):
            list(prefetcher)


def test_a_term_signal_does_not_take_the_worker_from_the_trainer() -> None:
    with BatchPrefetcher(SYNTHETIC, global_rows=2, settings=PrefetchSettings(queue_depth=1)) as prefetcher:
        next(prefetcher)
        os.kill(prefetcher.worker_pid, signal.SIGTERM)
        for _ in range(10):
            next(prefetcher)


@pytest.mark.parametrize("end", ["killed", "returns without closing"])
def test_the_worker_ends_with_its_parent(end: str) -> None:
    program = textwrap.dedent(
        """
        import sys, time
        from nsa_train.data.prefetcher import BatchPrefetcher
        from nsa_train.data.rows.specs import SyntheticData

        if __name__ == "__main__":
            prefetcher = BatchPrefetcher(SyntheticData("uniform", vocab_size=100, seq_len=16), global_rows=1)
            next(prefetcher)
            print(prefetcher.worker_pid, flush=True)
            if sys.argv[1] == "killed":
                time.sleep(60)
        """
    )
    child = subprocess.Popen([sys.executable, "-c", program, end], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    worker = int(child.stdout.readline())
    if end == "killed":
        child.kill()
    child.wait(timeout=120)
    deadline = time.monotonic() + 120
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.05)


def test_a_killed_run_leaves_nothing_in_shared_memory() -> None:
    """Every process of it at once, as a scheduler or a container's end kills: nobody is left to clean up."""
    program = textwrap.dedent(
        """
        import time
        from nsa_train.data.prefetcher import BatchPrefetcher
        from nsa_train.data.rows.specs import SyntheticData

        if __name__ == "__main__":
            prefetcher = BatchPrefetcher(SyntheticData("uniform", vocab_size=100, seq_len=16), global_rows=1)
            next(prefetcher)
            print(prefetcher.worker_pid, flush=True)
            time.sleep(60)
        """
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        processes = (child.pid, int(child.stdout.readline()))
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in processes)
        os.killpg(child.pid, signal.SIGKILL)
    assert not [name for name in os.listdir(SHARED_MEMORY) if f"{SHARED_MEMORY}/{name}" in maps]


def test_an_impossible_share_is_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError):
        BatchPrefetcher(SYNTHETIC, global_rows=3, world=2)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_source_that_is_gone_is_data_that_did_not_come_in_time(name: str) -> None:
    """Checks the class of the error through the prefetch process: health names it `loader_timeout` and not just a
    failed run."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/{name}"
    data = DirectData(url, "byte", seq_len=8, loader_timeout_s=4.0)
    with (
        BatchPrefetcher(data, global_rows=1, settings=PrefetchSettings(timeout_s=60.0)) as prefetcher,
        pytest.raises(DataTimeout) as seen,
    ):
        next(prefetcher)
    beat = HeartbeatRecord.now(
        ts=1.7e9, rank=0, step=1, msg=names.FAILED, detail="reworded", failure_code=code_of_exception(seen.value)
    )
    history = RunHistory()
    history.add(beat, 0.0)
    assert [finding.name for finding in examine(history, now=1.0, limits=HealthLimits())] == ["loader_timeout"]
