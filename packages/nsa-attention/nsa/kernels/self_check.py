"""Self-check: whether kernels may be used on this GPU, from a record on disk or by a check in a child process.

It is made of the backend `triton`, and of `flash` where a package of FlashAttention is installed.

Records are JSON files in the kernel cache folder (runtime.kernel_cache), one per GPU, driver, versions, sources, shape
and dtype. A file's name holds a hash of that key, and the file the key itself. One process checks while the others wait
for the lock and then read. Every process logs a failed verdict once. The check covers the run's shape and dtype, with
and without autocast, and times a layer beside another backend: Triton beside the portable one, flash beside Triton.
The child runs `nsa.check.kernel_checks.main`: this module starts it by name and imports no check.

A check that the machine did not let finish (no memory, a busy GPU, no message for too long) says nothing about the
kernels: its record is a note for the processes that waited for it, and the next process checks again.
"""

import hashlib
import json
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from nsa.child_process import ChildFailed, ChildProcess, ChildTimeout
from nsa.errors import ConfigError
from nsa.files import file_lock, hash_of_files, write_atomic
from nsa.geometry import Geometry
from nsa.kernels import flash
from nsa.kernels.cpu.build import cache_folder
from nsa.kernels.gpu_versions import architecture_of, driver_version, runtime_version
from nsa.kernels.interface import KernelShape
from nsa.kernels.triton.tile_store import tunes

_log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
"""The folder of `nsa`, which the child imports too."""
_SOURCES = (
    *(
        f"kernels/{name}"
        for name in ("triton", "flash.py", "ops.py", "interface.py", "precision.py", "reference.py", "self_check.py")
    ),
    *(f"check/{name}.py" for name in ("cases", "comparison", "decode_case", "kernel_call", "kernel_checks")),
)
"""What a record is no longer true for when it changes."""
_ABOUT_S = 30
"""What a check is expected to take, compilation included."""
_SILENCE_TIMEOUT_S = 300.0
"""A child without a message for this long hangs."""
_TUNED_SILENCE_TIMEOUT_S = 3600.0
_PROGRESS_S = 2.0
_MOST_LINES = 60
_RERUN = "nsa gpu-check --only self-check"
_HINTS = {
    "busy or unavailable": "Another process holds the GPU: in compute mode EXCLUSIVE_PROCESS a check cannot run beside "
    f"it. Set nvidia-smi -c DEFAULT, or check before training: {_RERUN}",
    "out of memory": f"The GPU has too little free memory for the check: run it before anything else: {_RERUN}",
}
"""By words of the child's output."""
_ENVIRONMENT_HINT = f"This says nothing about the kernels. Mend that, or check on an idle machine: {_RERUN}"
_MARGIN = 1.1
"""How many times longer Triton must take than another backend to be passed over."""
_LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "NSA_")
# The child must import this very package, wherever it was started; other modules are found as usual.
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); import nsa; del sys.path[0]; "
    "from nsa.check.kernel_checks import main; main()"
)


@dataclass(frozen=True)
class KernelVerdict:
    """Whether a backend passed its check on a device."""

    passed: bool
    reason: str
    """Why not; empty if it passed."""
    evidence: str = ""
    """The record's file, if there is one."""
    checked: bool = True
    """False: there was no GPU to check it on, or the machine did not let the check finish."""
    slower: str = ""
    """Its time beside the other backend's, if it is right and takes longer in some branch."""
    faster_in: tuple[str, ...] = ()
    """Branches in which it is the faster one all the same."""

    def usable_in(self, branch: str) -> bool:
        return self.passed and (not self.slower or branch in self.faster_in)

    @property
    def summary(self) -> str:
        """Why it is not used, in one line."""
        evidence = f" (evidence: {self.evidence})" if self.evidence else ""
        if self.slower:
            return f"right, but slower on this GPU: {self.slower}{evidence}"
        return f"failed its check on this GPU: {self.reason}{evidence}" if self.checked else f"{self.reason}{evidence}"


@dataclass(frozen=True)
class CheckKey:
    """Key of a verdict: everything that it depends on."""

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
    backend: str = "triton"
    package: str = ""
    """Package that has the kernels of the backend `flash`, and its version."""

    @property
    def what(self) -> str:
        return f"kernels of {self.package}" if self.package else "Triton kernels"


@dataclass(frozen=True)
class KernelError:
    """The error of one result of a kernel, and the most that it may be."""

    name: str
    error: float
    limit: float

    @property
    def holds(self) -> bool:
        """NaN does not."""
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"{self.name}: {self.error:.3g} (at most {self.limit:.3g})"

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        return cls(content["name"], float(content["error"]), float(content["limit"]))


@dataclass(frozen=True)
class CheckRecord:
    key: CheckKey
    passed: bool
    reason: str
    """Why it failed; empty if it passed."""
    figures: list[KernelError]
    seconds: dict[str, float]
    output: list[str] = field(default_factory=list)
    """The last lines of the child's output, its traceback among them, if it failed."""
    time: float = field(default_factory=time.time)
    transient: bool = False
    """The machine did not let the check finish: nothing is said about the kernels."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of a layer, forward and backward, by backend; empty if it was not timed."""

    @property
    def faster_in(self) -> tuple[str, ...]:
        """Branches in which a layer with the backend `flash` is clearly faster than Triton's."""
        ours = self.times.get("triton", 0.0)
        return tuple(branch for branch in flash.SERVED if ours > _MARGIN * self.times.get(branch, float("inf")))

    @property
    def slower(self) -> str:
        """The times, if Triton took clearly longer than the portable backend, or flash is not faster in a branch."""
        ours, others = self.times.get("triton", 0.0), self.times.get("portable", float("inf"))
        if not self.passed:
            return ""
        if self.key.backend == "flash":
            measured = ", ".join(f"{what} {1e3 * took:.3g} ms" for what, took in self.times.items())
            return "" if self.faster_in == flash.SERVED else f"a layer, forward and backward, with it in: {measured}"
        if ours <= _MARGIN * others:
            return ""
        return f"{1e3 * ours:.3g} ms a layer, forward and backward, the portable backend {1e3 * others:.3g} ms"

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        figures = [KernelError.from_json(each) for each in content["figures"]]
        record = cls(**{**content, "key": CheckKey(**content["key"]), "figures": figures})
        if not isinstance(record.passed, bool) or not isinstance(record.reason, str):
            raise TypeError("no verdict")
        if record.passed and (not figures or not all(figure.holds for figure in figures)):
            raise ValueError("passed with figures that do not hold")
        return record

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


class RecordStore:
    def __init__(self, folder: Path, key: CheckKey) -> None:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", key.gpu).strip("-")
        digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:16]
        self.key, self.path = key, folder / f"self_check_{name}_{key.dtype}_{digest}.json"
        self.note = folder / f"not_checked_{name}_{key.dtype}_{digest}.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; OSError where the folder cannot be written."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = self.path.with_suffix(".lock")
        with ExitStack() as held:
            try:
                held.enter_context(file_lock(lock, wait=False, mode=0o600))
            except BlockingIOError:
                what, gpu = self.key.what, self.key.gpu
                _log.warning("another process checks the %s on %s: waiting for its verdict", what, gpu)
                held.enter_context(file_lock(lock, mode=0o600))
            yield

    def path_of(self, record: CheckRecord) -> Path:
        return self.note if record.transient else self.path

    def read(self, notes_since: float = float("inf")) -> CheckRecord | None:
        """The verdict, or a note of a check that could not finish and ended at this time or later."""
        verdict = self._read(self.path)
        if verdict is not None and not verdict.transient:
            return verdict
        note = self._read(self.note) if notes_since < float("inf") else None
        return note if note is not None and note.time >= notes_since else None

    def _read(self, path: Path) -> CheckRecord | None:
        try:
            record = CheckRecord.from_json(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("%s is no record of a self-check (%r): it is ignored and replaced.", path, error)
            return None
        if record.key != self.key:
            _log.warning("%s is the record of another check: it is ignored and replaced.", path)
            return None
        return record

    def write(self, record: CheckRecord) -> None:
        write_atomic(self.path_of(record), record.to_json(), durable=True, many_writers=True, mode=0o600)


def key_for(
    device: torch.device, dtype: torch.dtype, shape: KernelShape, *, tuned: bool = False, parts: tuple[str, ...] = (),
    backend: str = "triton",
) -> CheckKey:  # fmt: skip
    """Build the key of this GPU and what is installed; on a CPU, for the interpreter."""
    from triton import __version__ as triton_version

    if device.type == "cuda":
        gpu, architecture, driver = torch.cuda.get_device_name(device), architecture_of(device), driver_version()
    else:
        gpu, architecture, driver = "interpreter", "cpu", ""
    sizes, name = list(shape[:4]), str(dtype).removeprefix("torch.")
    return CheckKey(
        gpu, architecture, driver, runtime_version(), str(torch.__version__), triton_version, _source_hash(), sizes,
        shape.geometry.ints, name, tuned, list(parts), backend,
        (flash.package_for(device) or "FlexAttention") if backend == "flash" else "",
    )  # fmt: skip


def recorded(folder: Path, gpu: str) -> list[tuple[torch.dtype, KernelShape, bool]]:
    """List what was checked on a GPU of this name, with any version: dtype, shape, whether tiles were timed."""
    checks = []
    for path in sorted(folder.glob("self_check_*.json")):
        try:
            key = CheckRecord.from_json(json.loads(path.read_text(encoding="utf-8"))).key
            groups, heads, d_k, d_v = key.shape
            shape = KernelShape(groups, heads, d_k, d_v, Geometry.from_ints(key.geometry))
            if key.gpu == gpu and key.backend == "triton" and not key.parts:
                checks.append((getattr(torch, key.dtype), shape, key.tuned))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
            _log.warning("%s is no record of a self-check (%r)", path, error)
    return checks


@cache
def _source_hash(package: Path = _PACKAGE) -> str:
    files = [file for name in _SOURCES for file in list((package / name).rglob("*.py")) or [package / name]]
    return hash_of_files(files, package)


class CheckRequest(NamedTuple):
    device: torch.device
    """With its index."""
    key: CheckKey
    folder: Path
    silence_s: float = _SILENCE_TIMEOUT_S
    package: Path = _PACKAGE
    """The `nsa` that the child imports."""

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("gpu", "dtype", "shape", "geometry", "tuned", "parts", "backend")
        of_key = {name: getattr(self.key, name) for name in names}
        return {**of_key, "device": str(self.device), "folder": str(self.folder)}


def triton_verdict(device: torch.device, dtype: torch.dtype, shape: KernelShape) -> KernelVerdict:
    """Verdict on the Triton kernels on this GPU; checked once per process at most."""
    if not torch.cuda.is_available():
        return KernelVerdict(False, "there is no GPU here to check it on", checked=False)
    return _verified_once(_index_of(device), dtype, shape, tunes(), "triton")


def flash_verdict(device: torch.device, dtype: torch.dtype, shape: KernelShape) -> KernelVerdict:
    """Verdict on the backend `flash`, which stands beside Triton's kernels: checked where a package of FlashAttention
    is installed, once per process at most."""
    if not flash.package_for(device):
        why = "neither flash-attn-4 nor flash-attn is installed, or the installed one has no kernels for this GPU"
        return KernelVerdict(False, why, checked=False)
    if not triton_verdict(device, dtype, shape).usable_in("selected"):
        return KernelVerdict(False, "it completes the Triton backend, which is not used here", checked=False)
    return _verified_once(_index_of(device), dtype, shape, tunes(), "flash")


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _verified_once(index: int, dtype: torch.dtype, shape: KernelShape, tuned: bool, backend: str) -> KernelVerdict:
    device = torch.device("cuda", index)
    silence_s = _TUNED_SILENCE_TIMEOUT_S if tuned else _SILENCE_TIMEOUT_S
    key = key_for(device, dtype, shape, tuned=tuned, backend=backend)
    verdict = verify(CheckRequest(device, key, cache_folder(), silence_s))
    if not verdict.passed:
        _log.warning("%s", _warning_text(key, verdict))
    elif verdict.slower:
        used = f"used in {', '.join(verdict.faster_in)} only" if verdict.faster_in else "not used"
        _log.warning("the %s are right on %s and %s: %s", key.what, key.gpu, used, verdict.slower)
    return verdict


def _warning_text(key: CheckKey, verdict: KernelVerdict) -> str:
    bar = "!" * 100
    what = "FAILED their check on this GPU" if verdict.checked else "could NOT BE CHECKED on this GPU"
    instead = "Triton's kernels instead" if key.package else "the portable backend instead, which is many times slower"
    return (
        f"the {key.what} {what}\n{bar}\n"
        f"!! The {key.what} are NOT used on {key.gpu}: {verdict.reason}\n"
        f"!! kernels=auto takes {instead}.\n"
        f"!! Evidence: {verdict.evidence or 'not kept on disk'}\n"
        f"!! Check again with: {_RERUN}\n{bar}"
    )


def verify(request: CheckRequest, *, rerun: bool = False) -> KernelVerdict:
    """From the record, or by a check, which is then recorded; `rerun`: check whatever the record says."""
    store, began = RecordStore(request.folder, request.key), time.time()
    if not rerun and (known := store.read()):
        return _verdict(known, store.path)
    with ExitStack() as held:
        writable = True
        try:
            held.enter_context(store.locked())
        except OSError as error:
            _say_not_kept(request, error)
            writable = False
        known = None if rerun else store.read(notes_since=began)  # another process may have written it in the meantime
        if known is None:
            known = _run_check(request)
            try:
                if writable:
                    store.write(known)
            except OSError as error:
                _say_not_kept(request, error)
                writable = False
        return _verdict(known, store.path_of(known) if writable else None)


def _say_not_kept(request: CheckRequest, error: OSError) -> None:
    _log.warning(
        "the check of the %s cannot be kept in %s (%s): every process checks again. Set runtime.kernel_cache.",
        request.key.what, request.folder, error,
    )  # fmt: skip


def _verdict(record: CheckRecord, path: Path | None) -> KernelVerdict:
    checked = not record.transient
    return KernelVerdict(
        record.passed, record.reason, str(path or ""), checked=checked, slower=record.slower, faster_in=record.faster_in
    )


def _run_check(request: CheckRequest) -> CheckRecord:
    """Run the check in a child process: every failure there becomes a verdict, or a note on the machine."""
    key = request.key
    _log.warning(
        "checking %s on %s, %s (once per GPU, driver and version; about %d s)", key.what, key.gpu, key.dtype, _ABOUT_S
    )
    began = said = time.monotonic()
    figures: list[KernelError] = []
    seconds: dict[str, float] = {}
    times: dict[str, float] = {}
    part, done, why, hint, lines = "start", False, "", "", []
    command = ("-P", "-c", _PROGRAM, str(request.package.parent))
    try:
        with ChildProcess("the process", command, clean_environment(interpret=request.device.type == "cpu")) as child:
            child.send(**request.arguments)
            try:
                for message in child.messages(silence_s=request.silence_s):
                    match message:
                        case {"kind": "begin", "part": str(part)}:
                            if time.monotonic() - said > _PROGRESS_S:
                                said = time.monotonic()
                                _log.warning("checking %s: %s, %.0f s so far", key.what, part, said - began)
                        case {"kind": "figures", "figures": list(compared)}:
                            figures += map(KernelError.from_json, compared)
                        case {"kind": "seconds", "what": str(what), "seconds": float(took)}:
                            seconds[what] = round(took, 2)
                        case {"kind": "times", "times": dict(seconds_of)}:
                            times = {str(backend): float(took) for backend, took in seconds_of.items()}
                        case {"kind": "environment"}:
                            hint = _ENVIRONMENT_HINT
                        case {"kind": "done"}:
                            done = True
            finally:
                lines = child.output_lines()
    except ChildFailed as error:
        why = str(error)
        if isinstance(error, ChildTimeout) or error.returncode == -signal.SIGKILL:
            hint = _ENVIRONMENT_HINT
    except (ValueError, TypeError, KeyError, OSError) as error:
        why = f"it cannot be started, or its output not read ({error!r})"
        hint = _ENVIRONMENT_HINT if isinstance(error, OSError) else ""
    seconds["all"] = round(time.monotonic() - began, 2)
    why = "" if done and not why else why or "it ended too early"
    if why:
        hint = next((hint for words, hint in _HINTS.items() if any(words in line for line in lines)), hint)
    record = _record(key, figures, seconds, lines, f"{part}: {why}" if why else "", hint)
    if record.passed:
        _log.warning("%s verified on %s in %.0f s", key.what, key.gpu, seconds["all"])
    return replace(record, times=times)


def _record(
    key: CheckKey, figures: list[KernelError], seconds: dict[str, float], lines: list[str], why: str, hint: str
) -> CheckRecord:
    """`why`: what ended the child, if anything; `hint`: what to do about it if the kernels are not to blame."""
    wrong, reason = [figure for figure in figures if not figure.holds], ""
    if wrong:
        others = f", and {len(wrong) - 1} more figures" if len(wrong) > 1 else ""
        reason = f"{wrong[0]}{others}"
    elif why:
        reason = why + (f". {hint}" if hint else "")
    elif not figures:
        reason = "nothing was compared"
    tail = lines[-_MOST_LINES:] if reason else []
    return CheckRecord(key, not reason, reason, figures, seconds, tail, transient=bool(why and hint and not wrong))


def clean_environment(*, interpret: bool) -> dict[str, str]:
    """This process's variables without torchrun's and without settings of this package: for one process on one device.

    `interpret`: whether Triton's kernels are interpreted there.
    """
    environment = {
        name: text
        for name, text in os.environ.items()
        if name not in (*_LAUNCHER_VARIABLES, "TRITON_INTERPRET") and not name.startswith(_LAUNCHER_PREFIXES)
    }
    return environment | ({"TRITON_INTERPRET": "1"} if interpret else {})
