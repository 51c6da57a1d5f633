"""Choosing tiles by timing: the winner is kept, a cached one is not timed again, and what breaks limits never runs.

No GPU is here: kernels are pretended ones that say how long they take, the clock reads that, and the rest is real. The
resource check is real too, on kernels compiled ahead of time.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="it is in the dev extra")

import triton

from nsa.gpus import ARCHITECTURES as GPUS
from nsa.kernels.triton import autotune, tuning
from nsa.kernels.triton.autotune import TileTuner, Work, key_of, tuned
from nsa.kernels.triton.launch import Launch, launch_all
from nsa.kernels.triton.tile_store import TileStore, set_tuning
from nsa.kernels.triton.tuning import TileSizes, candidates, choose
from tests import fork_server

ROOT = Path(__file__).parents[3]
TABLE, SLOW, FAST, SPILLS = TileSizes(64, 64), TileSizes(32, 64), TileSizes(128, 64, 8), TileSizes(256, 64)
CANDIDATES = (TABLE, SLOW, FAST, SPILLS)
TAKES = {TABLE: 2.0, SLOW: 3.0, FAST: 1.0, SPILLS: 0.1}


class Kernel:
    """Kernel as `triton.jit` returns it: `kernel[grid](…)` runs it, `warmup` only compiles."""

    def __init__(self, takes: dict[TileSizes, float]) -> None:
        self.takes, self.ran, self.clock = takes, [], 0.0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(tiles: TileSizes) -> None:
            self.ran.append(tiles)
            self.clock += self.takes[tiles]

        return run

    def warmup(self, tiles: TileSizes, *, grid: tuple[int, ...]) -> TileSizes:
        return tiles


class Bench:
    """A tuner over a folder, and what it did."""

    def __init__(
        self, folder: Path, takes: dict[TileSizes, float] | None = None, gpu: str = "NVIDIA A100-SXM4"
    ) -> None:
        self.kernel, self.timed = Kernel(takes or TAKES), 0
        self.store = TileStore(folder, gpu, "3.7.1")
        self.tuner = TileTuner(self.store, self.refusals, self.measure)

    def prepare(self, tiles: TileSizes) -> Work:
        return Work([Launch(self.kernel, (1,), (tiles,), {})])

    def refusals(self, compiled: TileSizes) -> list[str]:
        return ["8 bytes spilled"] if compiled == SPILLS else []

    def measure(self, call: Callable[[], Any]) -> float:
        self.timed += 1
        before = self.kernel.clock
        call()
        return self.kernel.clock - before

    def choose(self, key: str = "selected_forward bfloat16 R=6", **more: bool) -> TileSizes:
        return self.tuner.choose(key, CANDIDATES, self.prepare, **more)


def test_the_fastest_wins_and_is_kept_on_disk(tmp_path):
    bench = Bench(tmp_path)
    assert bench.choose() == FAST
    content = json.loads(bench.store.path.read_text())
    assert content["tiles"] == {"selected_forward bfloat16 R=6": list(FAST)}


def test_what_the_resource_check_refuses_never_runs(tmp_path):
    bench = Bench(tmp_path)
    bench.choose()
    assert bench.kernel.ran == [TABLE, SLOW, FAST]


def test_where_every_candidate_is_refused_the_table_stays(tmp_path, caplog):
    bench = Bench(tmp_path)
    bench.tuner = TileTuner(bench.store, lambda compiled: ["too large"], bench.measure)
    assert bench.choose() == TABLE
    assert not bench.kernel.ran
    assert "every candidate was refused" in caplog.text


def test_a_choice_never_changes_in_a_process(tmp_path):
    bench = Bench(tmp_path)
    assert bench.choose() == FAST
    bench.kernel.takes = {TABLE: 0.1, SLOW: 0.1, FAST: 9.0}
    bench.store.path.unlink()
    assert bench.choose() == FAST
    assert bench.timed == 3


def test_what_is_on_disk_is_not_timed_again(tmp_path):
    Bench(tmp_path).choose()
    later = Bench(tmp_path, {TABLE: 0.1, SLOW: 0.1, FAST: 9.0})
    assert later.choose() == FAST
    assert later.timed == 0


def test_another_key_is_timed_and_kept_beside_the_first(tmp_path):
    Bench(tmp_path).choose("one")
    later = Bench(tmp_path, {TABLE: 1.0, SLOW: 0.5, FAST: 9.0})
    assert later.choose("two") == SLOW
    assert later.store.read() == {"one": FAST, "two": SLOW}


def test_each_gpu_and_triton_version_has_its_own_file(tmp_path):
    stores = [TileStore(tmp_path, "NVIDIA A100", "3.7.1"), TileStore(tmp_path, "NVIDIA H100", "3.7.1")]
    stores.append(TileStore(tmp_path, "NVIDIA A100", "3.9.0"))
    assert len({store.path for store in stores}) == 3
    assert stores[0].path.name == "tiles_NVIDIA-A100-triton-3.7.1.json"


def test_a_gain_within_the_noise_keeps_the_table(tmp_path):
    assert Bench(tmp_path, {TABLE: 1.0, SLOW: 3.0, FAST: 0.98}).choose() == TABLE


@pytest.mark.parametrize("content", ["", '{"tiles": {"x": [64', "[]", '{"kernels": "k", "tiles": {"x": ["a"]}}', "7"])
def test_a_broken_file_is_reported_and_replaced(tmp_path, caplog, content):
    bench = Bench(tmp_path)
    bench.store.path.write_text(content)
    assert bench.choose() == FAST
    assert str(bench.store.path) in caplog.text
    assert bench.store.read() == {"selected_forward bfloat16 R=6": FAST}


def test_tiles_of_other_kernel_sources_are_timed_again(tmp_path, monkeypatch):
    Bench(tmp_path).choose()
    (tmp_path / "kernel.py").write_text("changed")
    monkeypatch.setattr("nsa.kernels.triton.tile_store.SOURCES", tmp_path)
    later = Bench(tmp_path)
    later.choose()
    assert later.timed == 3


def test_tiles_that_are_no_candidates_any_more_are_timed_again(tmp_path):
    bench = Bench(tmp_path)
    bench.store.write({"key": TileSizes(512, 512)})
    assert bench.choose("key") == FAST


def test_a_folder_that_cannot_be_written_leaves_the_table_and_says_so(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    bench = Bench(tmp_path / "file" / "below")
    assert bench.choose() == TABLE
    assert not bench.timed
    assert "Set runtime.kernel_cache" in caplog.text


def test_under_graph_capture_nothing_is_timed_and_the_choice_stays(tmp_path):
    bench = Bench(tmp_path)
    assert bench.choose(may_time=False) == TABLE
    assert bench.choose() == TABLE
    assert not bench.timed


_TUNE = """
import sys, time
from pathlib import Path
from tests.nsa.kernels.test_tuning import Bench
bench = Bench(Path(sys.argv[1]))
measure = bench.tuner._measure
bench.tuner._measure = lambda call: (time.sleep(0.1), measure(call))[1]
for key in sys.argv[2].split(","):
    bench.choose(key)
print(bench.timed)
"""


def test_processes_that_start_together_time_once_and_leave_one_whole_file(tmp_path):
    def run(keys: str) -> int:
        done = fork_server.run(["-c", _TUNE, str(tmp_path), keys], cwd=ROOT, env=os.environ)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    fork_server.run(["-c", ""], cwd=ROOT, env={})  # the server is there before two threads want one
    with ThreadPoolExecutor(2) as pool:
        timed = list(pool.map(run, ["shared,a", "shared,b"]))
    assert sum(timed) == 3 * 3  # keys, each with the candidates that may run
    assert Bench(tmp_path).store.read() == dict.fromkeys(("shared", "a", "b"), FAST)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".lock"]


@pytest.fixture
def tuning_on():
    set_tuning(True)
    yield
    set_tuning(False)


class OnGpu:
    """Tensor that says it is on a GPU, with what `tuned` asks of one."""

    shape, device = (1, 4096, 2, 6, 64), torch.device("cuda")

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Pretended GPU on which the fourth candidate is fastest."""
    tiles = (choose("range_forward", 64), *candidates("range_forward"))
    bench = Bench(tmp_path, dict.fromkeys(tiles, 1.0) | {tiles[4]: 0.5})
    monkeypatch.setattr(autotune, "_tuner", lambda name: bench.tuner)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return bench


def test_tuning_is_off_by_default(gpu):
    launch_all(tuned("range_forward", OnGpu(), 64, gpu.prepare).launches)
    assert gpu.kernel.ran == [choose("range_forward", 64)]


def test_without_a_gpu_nothing_is_timed(gpu, tuning_on):
    """Covers the interpreter, whose one configuration is the table's."""
    launch_all(tuned("range_forward", torch.empty(1, 8, 2, 6, 64, dtype=torch.bfloat16), 64, gpu.prepare).launches)
    assert gpu.kernel.ran == [choose("range_forward", 64)]


def test_fp32_keeps_the_table_and_has_smaller_tiles(gpu, tuning_on):
    small = choose("range_forward", 64, element_size=4)
    gpu.kernel.takes[small] = 1.0
    launch_all(tuned("range_forward", OnGpu(torch.float32), 64, gpu.prepare).launches)
    assert gpu.kernel.ran == [small]
    assert (small == choose("range_forward", 64)) == triton.knobs.runtime.interpret


def test_on_a_gpu_the_winner_runs(gpu, tuning_on):
    launch_all(tuned("range_forward", OnGpu(), 64, gpu.prepare).launches)
    assert gpu.kernel.ran[-1] == candidates("range_forward")[3]
    assert list(gpu.store.read()) == ["range_forward bfloat16 G=2 R=6 d_k=64 d_v=64 long"]


def test_a_key_names_all_that_a_kernel_is_compiled_for_and_whether_the_call_is_long():
    def key(S: int = 8, dtype: torch.dtype = torch.bfloat16, **constants: int) -> str:
        return key_of("selected_backward", torch.empty(1, S, 2, 6, 64, dtype=dtype, device="meta"), **constants)

    assert key(d_v=64, l_sel=64) == "selected_backward bfloat16 G=2 R=6 d_k=64 d_v=64 l_sel=64 short"
    assert len({key(), key(4096), key(dtype=torch.float16), key(d_v=32), key(l_sel=32)}) == 5


@pytest.mark.parametrize("kernel", tuning._CANDIDATES)
def test_the_table_knows_every_kernel_that_is_tuned(kernel):
    for gpu in (*GPUS, "sm_75", "gfx90a", ""):
        for width in (64, 128, 192, 256):
            for element_size in (2, 4):
                tiles = choose(kernel, width, gpu, element_size=element_size)
                assert all(size & (size - 1) == 0 for size in tiles[:3])


_JUDGE = """
from nsa.gpus import ARCHITECTURES
from nsa.kernels.triton import autotune, tuning
from proofs.compile_report.report import MODELS, compile_for, jobs
from nsa.kernels.triton.tuning import TileSizes
tuning.gpu_here = lambda: "sm_90"
for tiles in (TileSizes(64, 64, 4, 3), TileSizes(256, 64, 4, 3)):
    (job,) = (j for j in jobs(MODELS["base"], "sm_90", {"range_forward": tiles}) if j.kernel == "range_forward")
    print(autotune._over_limits(compile_for(job, ARCHITECTURES["sm_90"])))
"""


def test_the_real_check_reads_the_machine_code():
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _JUDGE]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    good, bad = done.stdout.splitlines()
    assert good == "[]"
    assert "bytes spilled" in bad
