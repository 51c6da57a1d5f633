"""Real DCP checkpoints through the engine's checkpointer, on one rank and on two (this file is also their program)."""

import contextlib
import errno
import os
import pickle
import pickletools
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from torch import nn  # noqa: E402
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402

from nsa.errors import CheckpointError  # noqa: E402
from nsa.model.transformer import NSATransformer  # noqa: E402
from nsa_train.checkpoint import save_plan  # noqa: E402
from nsa_train.checkpoint.folder import CheckpointFolder, RetentionPolicy  # noqa: E402
from nsa_train.checkpoint.load import (  # noqa: E402
    VerifiedFiles,
    export,
    open_checkpoint,
    read_model,
    require_trustworthy,
)
from nsa_train.checkpoint.manifest import LocalFiles, build_manifest, encode, read_key  # noqa: E402
from nsa_train.checkpoint.run_state import RunRecord  # noqa: E402
from nsa_train.checkpoint.tensor_index import parse_index  # noqa: E402
from nsa_train.train.engine.checkpointer import VerifiedCheckpointer  # noqa: E402
from tests import fork_server  # noqa: E402
from tests.nsa_train.checkpoint.damaged_bytes import damaged_copies  # noqa: E402

CONFIG = {"train": {"lr": 0.1, "steps": 5}}
MODEL = dict(
    vocab_size=64, dim=32, n_layers=2, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=8
)


class Module:
    """The part of the engine's TrainModule that its checkpointer calls."""

    def __init__(self, seed: int = 0, *, shard: bool = False, replicas: int = 1) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = NSATransformer(**MODEL)
        if shard:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            ranks = torch.distributed.get_world_size()
            shape = (replicas, ranks // replicas) if replicas > 1 else (ranks,)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self) -> None:
        tokens = torch.arange(32).reshape(1, 32)
        self.model(tokens).float().pow(2).mean().backward()
        self.optim.step()
        self.optim.zero_grad()

    def state_dict_to_save(self) -> dict:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim}

    def state_dict_to_load(self, metadata, *, optim=None) -> dict:
        return self.state_dict_to_save()

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def whole(self) -> dict[str, torch.Tensor]:
        state = self.model.state_dict()
        return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


def checkpointer(folder: Path, step: int = 1, key_file: str | None = None, **settings) -> VerifiedCheckpointer:
    return VerifiedCheckpointer(
        work_dir=folder / "work",
        save_thread_count=1,
        key=read_key(Path(key_file) if key_file else None),
        record=lambda: RunRecord(step=step, world_size=1, config=CONFIG, data_cursor={"row": 7}),
        **settings,
    )


def save(folder: Path, step: int, module: Module | None = None, **settings) -> Module:
    module = module or Module()
    module.step()
    checkpointer(folder, step, **settings).save(folder / f"step{step}", module, {"global_step": step})
    return module


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints of one run; tests copy the folder before they break it."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    module = save(folder, 1)
    save(folder, 2, module)
    return folder, module


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints", symlinks=True))


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_what_was_saved_is_loaded(folder, saved):
    fresh = Module(seed=1)
    state = checkpointer(folder).load(folder / "latest", fresh)
    assert state == {"global_step": 2}
    assert_same(fresh.whole(), saved[1].whole())
    fresh.step()  # the optimizer came back too
    moved = Module()
    for _ in range(3):
        moved.step()
    assert_same(fresh.whole(), moved.whole())


def test_an_asynchronous_save_exists_when_its_future_is_done(tmp_path):
    module = Module()
    module.step()
    before = {name: tensor.clone() for name, tensor in module.whole().items()}
    maker = checkpointer(tmp_path)
    saving = maker.save_async(tmp_path / "step1", module, {"global_step": 1})
    module.step()  # training goes on: the checkpoint must hold the weights of the moment it was asked for
    maker.wait_for_save(saving)
    assert maker.find_resumable(tmp_path).step == 1
    assert_same(read_model(open_checkpoint(tmp_path / "step1")), before)


def test_the_record_comes_back(tmp_path):
    save(tmp_path, 3, Module(seed=5))
    record = RunRecord.read(tmp_path / "step3")
    assert (record.step, record.data_cursor, record.config) == (3, {"row": 7}, CONFIG)


def test_a_record_that_was_changed_is_refused(tmp_path):
    record = RunRecord(1, 1, CONFIG, {}, skipped_batches=[(3, 9)], spike_window={"losses": [1.5]})
    record.write(tmp_path)
    assert RunRecord.read(tmp_path) == record
    text = (tmp_path / "state.json").read_text()
    (tmp_path / "state.json").write_text(text.replace("0.1", "0.3"))
    with pytest.raises(CheckpointError):
        RunRecord.read(tmp_path)
    with pytest.raises(CheckpointError):
        RunRecord(1, 1, CONFIG, {}, spike_window={"losses": [float("nan")]}).write(tmp_path)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_flipped_tensor_is_refused(folder):
    flip(folder / "step2/model_and_optim/__0_0.distcp")
    fresh = Module(seed=1)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        checkpointer(folder).load(folder / "step2", fresh)
    resumable = checkpointer(folder).find_resumable(folder)
    assert (resumable.step, resumable.passed_over[0].name) == (1, "step2")
    checkpointer(folder).load(resumable.path, fresh)


def test_a_foreign_folder_is_refused_unless_asked_for(folder):
    (folder / "step2/COMMIT.json").unlink()
    with pytest.raises(CheckpointError, match=r"COMMIT\.json"):
        checkpointer(folder).load(folder / "step2", Module(seed=1))
    checkpointer(folder, allow_foreign=True).load(folder / "step2", Module(seed=1))
    flip(folder / "step1/state.json")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        checkpointer(folder, allow_foreign=True).load(folder / "step1", Module(seed=1))


def test_a_url_and_a_wrong_name_are_refused(tmp_path):
    with pytest.raises(CheckpointError):
        checkpointer(tmp_path).save("s3://bucket/step1", Module(), {})
    with pytest.raises(CheckpointError):
        checkpointer(tmp_path).save(tmp_path / "final", Module(), {})


def test_nothing_on_disk_names_a_module_or_class_of_this_package(folder):
    """Allows that files are moved and classes renamed without losing older checkpoints."""
    checked = 0
    for file in (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".distcp"):
        raw = file.read_bytes()
        if file.suffix == ".pt":
            with zipfile.ZipFile(file) as archive:
                raw = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
        if file.suffix in (".json", ".jsonl"):
            assert not re.search(rb"\bnsa\.[a-z]", raw), file
        else:
            arguments = [argument for _, argument, _ in pickletools.genops(raw)]
            modules = [text for text in arguments if isinstance(text, str) and re.match(r"nsa(\.|$| )", text)]
            assert not modules, file
        checked += 1
    assert checked >= 10


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def engine_index(checkpoint: Path):
    """The index with the engine's own classes."""
    return pickle.loads((checkpoint / "model_and_optim/.metadata").read_bytes())


def write_older_index(checkpoint: Path, content: bytes) -> None:
    """Write the index as earlier versions did, which had the pickle alone."""
    (checkpoint / "model_and_optim/index.jsonl").unlink()
    (checkpoint / "model_and_optim/.metadata").write_bytes(content)


def plant_in_index(path: Path, bomb: Bomb) -> None:
    index = engine_index(path)
    index.planner_data["x"] = bomb
    write_older_index(path, pickle.dumps(index))


def plant_bare(path: Path, bomb: Bomb) -> None:
    write_older_index(path, pickle.dumps(bomb))


def plant_old_protocol(path: Path, bomb: Bomb) -> None:
    write_older_index(path, pickle.dumps(bomb, protocol=0))


def plant_in_rank_file(path: Path, bomb: Bomb) -> None:
    torch.save({"global_step": bomb}, path / "train/rank0.pt")


def plant_in_old_rank_file(path: Path, bomb: Bomb) -> None:
    torch.save({"global_step": bomb}, path / "train/rank0.pt", _use_new_zipfile_serialization=False)


def plant_bare_rank_file(path: Path, bomb: Bomb) -> None:
    (path / "train/rank0.pt").write_bytes(pickle.dumps(bomb))


def plant_in_tensors(path: Path, bomb: Bomb) -> None:
    index = engine_index(path)
    where = next(iter(index.storage_data.values()))
    file = path / "model_and_optim" / where.relative_path
    where.offset = file.stat().st_size
    with file.open("ab") as stream:
        torch.save(bomb, stream)
        where.length = stream.tell() - where.offset
    write_older_index(path, pickle.dumps(index))


PLANTS = [value for name, value in list(globals().items()) if name.startswith("plant_")]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("defence", ["manifest", "pickles", "override"])
def test_a_pickle_bomb_is_never_executed(folder, tmp_path, plant, defence):
    canary = tmp_path / "canary"
    step2 = folder / "step2"
    plant(step2, Bomb(canary))
    if defence == "pickles":  # a hostile folder brings a manifest that fits
        (step2 / "COMMIT.json").unlink()
        (step2 / "COMMIT.json").write_bytes(encode(build_manifest(LocalFiles(step2), 2, "now")))
    elif defence == "override":
        (step2 / "COMMIT.json").unlink()
    for use in (
        lambda: checkpointer(folder, allow_foreign=True).load(step2, Module(seed=1)),
        lambda: export(step2, tmp_path / "out", allow_foreign=True),
    ):
        with pytest.raises(CheckpointError):
            use()
    assert not canary.exists()
    if defence == "manifest":
        assert checkpointer(folder).find_resumable(folder).step == 1
    key = tmp_path / "key"
    key.write_text("k" * 32)
    with pytest.raises(CheckpointError):
        checkpointer(folder, key_file=str(key)).load(step2, Module(seed=1))


def test_the_planted_pickles_execute_code_in_an_unsafe_reader(folder, tmp_path):
    """Read as DCP and the engine read them, each one goes off: the test above would see it."""
    for plant in PLANTS:
        canary = tmp_path / plant.__name__
        path = Path(shutil.copytree(folder / "step2", tmp_path / f"x{plant.__name__}"))
        plant(path, Bomb(canary))
        from olmo_core.train.checkpoint import Checkpointer

        with contextlib.suppress(BaseException):
            Checkpointer(tmp_path / "work").load(path, Module(seed=1))
        assert canary.exists(), plant


class Reached:
    """Pickles as getattr(of, name), as members of enums do in Python up to 3.11.3."""

    def __init__(self, of, name) -> None:
        self.asked = of, name

    def __reduce__(self):
        return getattr, self.asked


def parse(checkpoint: Path, index: object = None, name: str = ".metadata") -> Metadata:
    """Parse the index of a checkpoint, or this one in its place."""
    path = checkpoint / "model_and_optim" / name
    raw = path.read_bytes() if index is None else pickle.dumps(index)
    return parse_index(raw, {path.name: path.stat().st_size for path in path.parent.glob("*.distcp")}, path)


@pytest.mark.parametrize("name", [".metadata", "index.jsonl"])
def test_the_index_is_the_one_that_pickle_would_read(folder, name):
    mine, theirs = parse(folder / "step2", name=name), engine_index(folder / "step2")
    assert mine.state_dict_metadata == theirs.state_dict_metadata
    assert mine.planner_data == theirs.planner_data
    assert mine.storage_meta == theirs.storage_meta
    assert {key: vars(place) for key, place in theirs.storage_data.items()} == {
        key: {"relative_path": place.relative_path, "offset": place.offset, "length": place.length}
        for key, place in mine.storage_data.items()
    }


def test_getattr_reaches_members_of_an_enum_and_nothing_else(folder):
    index = engine_index(folder / "step2")
    properties = next(iter(index.state_dict_metadata.values())).properties
    for of, name, good in (
        (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT", True),
        (_MEM_FORMAT_ENCODING, "__init__", False),
        (_MEM_FORMAT_ENCODING, "mro", False),
        (Metadata, "__reduce__", False),
    ):
        reached = properties.dtype, properties.layout, False, Reached(of, name), False
        type(properties).__getstate__, honest = lambda self, reached=reached: reached, type(properties).__getstate__
        try:
            raw = pickle.dumps(index)
        finally:
            type(properties).__getstate__ = honest
        (folder / "step2/model_and_optim/.metadata").write_bytes(raw)
        if good:
            parse(folder / "step2")
        else:
            with pytest.raises(CheckpointError):
                parse(folder / "step2")


def test_damaged_indices_never_raise_anything_else(folder):
    """The second line must not fall over what the first would have caught."""
    for path in ((folder / "step2/model_and_optim" / name) for name in (".metadata", "index.jsonl")):
        for broken in damaged_copies(path.read_bytes(), 300):
            with contextlib.suppress(CheckpointError):
                parse_index(broken, {"__0_0.distcp": 1 << 20}, path)


def test_export_gives_both_files_and_they_load(folder, saved, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file

    written = export(folder / "latest", tmp_path / "out")
    assert [path.name for path in written] == ["model.pt", "model.safetensors"]
    model = NSATransformer(**MODEL)
    for state in (torch.load(written[0], weights_only=True), load_file(written[1])):
        model.load_state_dict(state)
        assert_same(model.state_dict(), saved[1].whole())
    with safe_open(written[1], "pt") as file:
        assert file.metadata()["step"] == "2"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.pt", "model.safetensors"]


def test_a_full_disk_leaves_the_previous_checkpoint(folder, saved):
    maker = checkpointer(folder)
    module = Module()
    module.step()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
        with pytest.raises(BaseException, match=os.strerror(errno.EFBIG)):
            maker.save(folder / "step3", module, {"global_step": 3})
        with pytest.raises(CheckpointError, match="step 3"):
            maker.wait_for_save(maker.save_async(folder / "step3", module, {"global_step": 3}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert maker.find_resumable(folder).step == 2
    maker.save(folder / "step3", module, {"global_step": 3})
    assert maker.find_resumable(folder).step == 3


class Server:
    """A process that forks the ranks of the programs below."""

    def __init__(self) -> None:
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process = fork_server.start([__file__], cwd=ROOT, env=os.environ, **pipes)

    def start(self, what: str, folder: Path, ranks: int = 1) -> list[int]:
        """Fork one program per rank; the pids."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what} {ranks} {folder}\n")
        self._process.stdin.flush()
        return [int(pid) for pid in self._process.stdout.readline().split()]

    def wait(self) -> list[int]:
        """Exit codes of the programs started last, −9 for a killed one."""
        assert self._process.stdout is not None
        return [int(code) for code in self._process.stdout.readline().split()]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    running.close()


def test_two_sharded_ranks_save_what_one_rank_loads(server, tmp_path):
    server.start("save", tmp_path, ranks=2)
    assert server.wait() == [0, 0], (tmp_path / "errors").read_text()
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.steps() == [1, 2]
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_same(read_model(open_checkpoint(folder.step_path(2))), whole)
    require_trustworthy(folder.step_path(2))
    outside = {name for name in folder.examine(2).manifest.files if not name.startswith("model_and_optim/")}
    assert outside == {".metadata.json", "state.json", "train/rank0.pt", "train/rank1.pt"}
    fresh = Module(seed=1)
    checkpointer(tmp_path).load(folder.step_path(2), fresh)
    assert_same(fresh.whole(), whole)

    flip(tmp_path / "checkpoints/step2/model_and_optim/__1_0.distcp")
    server.start("resume", tmp_path, ranks=2)
    assert server.wait() == [0, 0], (tmp_path / "errors").read_text()


def test_replicas_share_the_writing_and_resume_bit_for_bit(server, tmp_path):
    """Four ranks save as HSDP 2×2 and as four plain replicas; each layout continues from the other's checkpoint."""
    server.start("replicas", tmp_path, ranks=4)
    assert server.wait() == [0] * 4, (tmp_path / "errors").read_text()
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    for step in (1, 2):
        manifest = CheckpointFolder(tmp_path / "checkpoints").examine(step).require_good()
        sizes = [manifest.files[f"model_and_optim/__{rank}_0.distcp"].bytes for rank in range(4)]
        assert max(sizes) < 1.3 * sum(sizes) / 4, sizes
        assert_same(read_model(open_checkpoint(tmp_path / f"checkpoints/step{step}")), whole)


def test_a_larger_world_reads_what_it_needs_and_no_more(server, tmp_path):
    """Two ranks saved, four load: with shards stored whole each rank would read twice what it needs."""
    server.start("save", tmp_path, ranks=2)
    assert server.wait() == [0, 0], (tmp_path / "errors").read_text()
    server.start("reshard", tmp_path, ranks=4)
    assert server.wait() == [0] * 4, (tmp_path / "errors").read_text()


def test_a_failed_save_fails_on_every_rank(server, tmp_path):
    server.start("fail", tmp_path, ranks=2)
    assert server.wait() == [0, 0], (tmp_path / "errors").read_text()


# 24 random moments; for every change tests/nsa_train/checkpoint/test_folder.py kills blocking saves
@pytest.mark.nightly
def test_sigkill_around_an_asynchronous_save_leaves_one_that_loads(server, tmp_path):
    """A process saves again and again; it is killed 24 times, at moments chosen at random."""
    dice = random.Random(os.getpid())
    saved_steps = tmp_path / "told"
    saved_steps.touch()
    for _ in range(24):
        lines = saved_steps.stat().st_size
        (pid,) = server.start("loop", tmp_path)
        deadline = time.monotonic() + 60
        while saved_steps.stat().st_size == lines and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(dice.uniform(0.0, 0.3))
        os.kill(pid, signal.SIGKILL)
        assert server.wait() == [-signal.SIGKILL], (tmp_path / "errors").read_text()
        newest = int(saved_steps.read_text().split()[-1])
        folder = CheckpointFolder(tmp_path / "checkpoints")
        resumable = folder.find_resumable()
        assert not resumable.passed_over, resumable
        assert resumable.step in (newest, newest + 1), "a save that was reported done is gone"
        require_trustworthy(resumable.path)
        assert RunRecord.read(resumable.path).step == resumable.step
        assert all(
            bool((tensor == resumable.step).all()) for tensor in read_model(open_checkpoint(resumable.path)).values()
        )
    assert newest >= 24


def _loop(folder: Path) -> None:
    checkpoints = folder / "checkpoints"
    maker = checkpointer(folder)
    maker.retention = RetentionPolicy(keep_last=2)
    maker.folder(checkpoints).clean_up()
    step = maker.find_resumable(checkpoints).step or 0
    module = Module()
    while True:
        step += 1
        with torch.no_grad():
            for parameter in module.model.parameters():
                parameter.fill_(step)
        record = RunRecord(step, 1, CONFIG, {})
        maker.record = lambda record=record: record
        maker.wait_for_save(maker.save_async(checkpoints / f"step{step}", module, {"global_step": step}))
        with (folder / "told").open("a") as saved_steps:
            saved_steps.write(f"{step}\n")


def _save(folder: Path) -> None:
    save_plan.SMALLEST_PIECE_BYTES = 1024
    maker = checkpointer(folder)
    maker.process_group = torch.distributed.new_group()
    module = Module(shard=True)
    read_back: list[str] = []
    chunks = LocalFiles.chunks
    LocalFiles.chunks = lambda self, name: read_back.append(name) or chunks(self, name)  # type: ignore[method-assign]
    for step in (1, 2):
        module.step()
        saving = maker.save_async(folder / f"checkpoints/step{step}", module, {"global_step": step})
        maker.wait_for_save(saving)
        assert (folder / f"checkpoints/step{step}/COMMIT.json").is_file(), "done before the commit"
    tensors_and_states = [name for name in read_back if name.endswith((".distcp", ".pt", "/.metadata", ".jsonl"))]
    assert not tensors_and_states, "a file was read again to be hashed"
    whole = module.whole()
    if torch.distributed.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")


def _replicas(folder: Path) -> None:
    maker = checkpointer(folder)
    maker.process_group = torch.distributed.new_group()
    layouts = (dict(shard=True, replicas=2), dict(shard=False))
    for step, layout in enumerate(layouts, 1):
        module = Module(**layout)
        module.step()
        maker.wait_for_save(maker.save_async(folder / f"checkpoints/step{step}", module, {"global_step": step}))
    module.step()
    expected = module.whole()
    for step in (1, 2):
        for layout in (*layouts, dict(shard=True)):
            other = Module(seed=1, **layout)
            assert checkpointer(folder).load(folder / f"checkpoints/step{step}", other) == {"global_step": step}
            if step == 2 and torch.distributed.get_rank() == 0 and not layout["shard"]:
                torch.save(other.whole(), folder / "whole.pt")
            other.step()
            assert_same(other.whole(), expected)


def _reshard(folder: Path) -> None:
    needed = 0
    lengths: list[int] = []
    read_range = VerifiedFiles.read_range

    def counted(self, name, offset, length):
        if name.endswith(".distcp"):
            lengths.append(length)
        return read_range(self, name, offset, length)

    VerifiedFiles.read_range = counted  # type: ignore[method-assign]
    module = Module(seed=1, shard=True)
    checkpointer(folder).load(folder / "checkpoints/step2", module)
    assert_same(module.whole(), torch.load(folder / "whole.pt", weights_only=True))
    for parameter in module.model.parameters():
        needed += 3 * parameter.to_local().nbytes  # and two moments
    overhead = 2_000 * len(lengths)  # of torch.save, per piece
    assert sum(lengths) < 1.1 * needed + overhead, (sum(lengths), needed, overhead)
    assert max(lengths) < 4096 + 2_000, "a shard was stored whole"


def _resume(folder: Path) -> None:
    maker = checkpointer(folder)
    module = Module(seed=1, shard=True)
    with pytest.raises(CheckpointError):
        maker.load(folder / "checkpoints/step2", module)
    resumable = maker.find_resumable(folder / "checkpoints")
    assert (resumable.step, resumable.passed_over[0].name) == (1, "step2")
    assert maker.load(resumable.path, module) == {"global_step": 1}
    module.step()
    assert_same(module.whole(), torch.load(folder / "whole.pt", weights_only=True))


def _fail(folder: Path) -> None:
    maker = checkpointer(folder)
    maker.process_group = torch.distributed.new_group()
    module = Module(shard=True)
    module.step()
    saving = maker.save_async(folder / "checkpoints/step1", module, {"global_step": 1})
    maker.wait_for_save(saving)
    if torch.distributed.get_rank() == 1:  # a disk that fills up under one rank only
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    saving = maker.save_async(folder / "checkpoints/step2", module, {"global_step": 2})
    with pytest.raises(CheckpointError, match=os.strerror(errno.EFBIG)):
        maker.wait_for_save(saving)
    assert maker.find_resumable(folder / "checkpoints").step == 1
    maker.retention = RetentionPolicy()
    folder_of_all = maker.folder(folder / "checkpoints")
    if torch.distributed.get_rank() == 0:
        folder_of_all.commit = lambda *_: (_ for _ in ()).throw(CheckpointError("cannot commit"))  # type: ignore[method-assign]
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saving = maker.save_async(folder / "checkpoints/step3", module, {"global_step": 3})
    with pytest.raises(CheckpointError):
        maker.wait_for_save(saving)
    with pytest.raises(CheckpointError):  # state of one rank that could not be loaded again
        maker.save(folder / "checkpoints/step4", module, {"x": Path if torch.distributed.get_rank() == 1 else 1})


def _program(what: str, rank: int, ranks: int, folder: Path) -> None:
    if ranks > 1:
        meeting = f"file://{folder}/meet-{what}"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    programs = {"loop": _loop, "save": _save, "resume": _resume, "fail": _fail, "replicas": _replicas}
    {**programs, "reshard": _reshard}[what](folder)
    if ranks > 1:
        torch.distributed.destroy_process_group()


def _serve() -> None:
    for line in sys.stdin:
        what, ranks, where = line.split()
        pids = []
        for rank in range(int(ranks)):
            if (pid := os.fork()) == 0:
                try:
                    _program(what, rank, int(ranks), Path(where))
                except BaseException:  # noqa: BLE001 - told through a file, and by the exit code
                    with Path(where, "errors").open("a") as errors:
                        traceback.print_exc(file=errors)
                    os._exit(1)
                os._exit(0)
            pids.append(pid)
        print(*pids, flush=True)
        print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _serve()
