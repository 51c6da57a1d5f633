"""Records of self-checks: one JSON file per GPU, driver, versions, kernel sources, shape and dtype.

They lie in the kernel cache folder (runtime.kernel_cache). The file's name holds a hash of the key, and the file the
key itself. One process checks while the others wait for the lock and then read.
"""

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nsa.errors import ConfigError
from nsa.files import file_lock, hash_of_files, write_atomic
from nsa.geometry import Geometry
from nsa.kernels.gpu_versions import architecture_of, driver_version, runtime_version
from nsa.kernels.interface import KernelShape
from nsa.kernels.self_check.comparison import CheckedFigure

_log = logging.getLogger(__name__)

KERNELS = Path(__file__).parents[1]
SOURCES = ("triton", "self_check", "ops.py", "interface.py", "precision.py", "reference.py")
"""Below `packages/nsa-attention/nsa/kernels`: what a record is no longer true for when it changes."""
RETRY_AFTER_S = 600.0
"""A check that failed for want of memory or because the GPU was busy is repeated after this time."""


@dataclass(frozen=True)
class CheckKey:
    """What a verdict holds for."""

    gpu: str
    architecture: str
    driver: str
    runtime: str
    torch: str
    triton: str
    sources: str
    """Hash of the kernels, their launchers and the check itself."""
    shape: list[int]
    """KV groups, heads per group, width of keys and of values."""
    geometry: list[int]
    """l, d, l_sel, n_sel, w."""
    dtype: str
    tuned: bool = False
    """Whether tile sizes are timed on the GPU (runtime.tune_kernels) instead of taken from the table."""
    parts: list[str] = field(default_factory=list)
    """Empty: all."""


@dataclass(frozen=True)
class CheckRecord:
    key: CheckKey
    passed: bool
    reason: str
    """Why it failed; empty if it passed."""
    figures: list[CheckedFigure]
    seconds: dict[str, float]
    output: list[str] = field(default_factory=list)
    """The last lines of the child's output, its traceback among them, if it failed."""
    time: float = field(default_factory=time.time)
    transient: bool = False
    """Failed for want of memory or because the GPU was busy."""

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "CheckRecord":
        figures = [CheckedFigure(**figure) for figure in content["figures"]]
        record = cls(**{**content, "key": CheckKey(**content["key"]), "figures": figures})
        if not isinstance(record.passed, bool) or not isinstance(record.reason, str):
            raise TypeError("no verdict")
        if record.passed and (not figures or not all(figure.right for figure in figures)):
            raise ValueError("passed with figures that do not hold")
        return record


class RecordStore:
    def __init__(self, folder: Path, key: CheckKey) -> None:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", key.gpu).strip("-")
        digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:16]
        self.key, self.path = key, folder / f"self_check_{name}_{key.dtype}_{digest}.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; OSError where the folder cannot be written."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = self.path.with_suffix(".lock")
        with ExitStack() as held:
            try:
                held.enter_context(file_lock(lock, wait=False, mode=0o600))
            except BlockingIOError:
                _log.warning("another process checks the Triton kernels on %s: waiting for its verdict", self.key.gpu)
                held.enter_context(file_lock(lock, mode=0o600))
            yield

    def read(self) -> CheckRecord | None:
        try:
            record = CheckRecord.from_json(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("%s is no record of a self-check (%r): it is ignored and replaced.", self.path, error)
            return None
        if record.key != self.key:
            _log.warning("%s is the record of another check: it is ignored and replaced.", self.path)
            return None
        return None if record.transient and time.time() - record.time > RETRY_AFTER_S else record

    def write(self, record: CheckRecord) -> None:
        text = json.dumps(asdict(record), indent=1) + "\n"
        write_atomic(self.path, text, durable=True, many_writers=True, mode=0o600)


def key_for(
    device: torch.device, dtype: torch.dtype, shape: KernelShape, *, tuned: bool = False, parts: tuple[str, ...] = ()
) -> CheckKey:
    """For this GPU, and what is installed; on a CPU, for the interpreter."""
    from triton import __version__ as triton_version

    if device.type == "cuda":
        gpu, architecture, driver = torch.cuda.get_device_name(device), architecture_of(device), driver_version()
    else:
        gpu, architecture, driver = "interpreter", "cpu", ""
    sizes, name = list(shape[:4]), str(dtype).removeprefix("torch.")
    return CheckKey(
        gpu, architecture, driver, runtime_version(), str(torch.__version__), triton_version, source_hash(), sizes,
        shape.geometry.ints, name, tuned, list(parts),
    )  # fmt: skip


def recorded(folder: Path, gpu: str) -> list[tuple[torch.dtype, KernelShape, bool]]:
    """What was checked on a GPU of this name, with any version: dtype, shape, whether tiles were timed."""
    checks = []
    for path in sorted(folder.glob("self_check_*.json")):
        try:
            key = CheckRecord.from_json(json.loads(path.read_text(encoding="utf-8"))).key
            groups, heads, d_k, d_v = key.shape
            shape = KernelShape(groups, heads, d_k, d_v, Geometry.from_ints(key.geometry))
            if key.gpu == gpu and not key.parts:
                checks.append((getattr(torch, key.dtype), shape, key.tuned))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
            _log.warning("%s is no record of a self-check (%r)", path, error)
    return checks


@cache
def source_hash() -> str:
    files = [file for name in SOURCES for file in list((KERNELS / name).rglob("*.py")) or [KERNELS / name]]
    return hash_of_files(files, KERNELS)
