"""Decides whether Triton kernels may be used on a GPU: from a record, or by checking them in a child process.

Every process logs a failed verdict once. What is checked covers the run's shape and dtype, with and without autocast.
"""

import logging
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from nsa.kernels.cpu.build import cache_folder
from nsa.kernels.interface import KernelShape
from nsa.kernels.self_check.child import child_messages, clean_environment, exception_line, output_lines
from nsa.kernels.self_check.comparison import CheckedFigure
from nsa.kernels.self_check.record import CheckKey, CheckRecord, RecordStore, key_for
from nsa.kernels.triton.tile_store import tunes

_log = logging.getLogger(__name__)

ABOUT_S = 30
"""What a check is expected to take, compilation included."""
SILENCE_TIMEOUT_S = 300.0
"""A child without a message for this long hangs."""
TUNED_SILENCE_TIMEOUT_S = 3600.0
_PROGRESS_S = 2.0
_MOST_LINES = 60
RERUN = "nsa gpu-check --only self-check"
_HINTS = {
    "busy or unavailable": "Another process holds the GPU: in compute mode EXCLUSIVE_PROCESS a check cannot run beside "
    f"it. Set nvidia-smi -c DEFAULT, or check before training: {RERUN}",
    "out of memory": f"The GPU has too little free memory for the check: run it before anything else: {RERUN}",
}
"""By words of the child's output."""
# The child must import this very package, wherever it was started; other modules are found as usual.
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); import nsa; del sys.path[0]; "
    "from nsa.kernels.self_check.worker import main; main(sys.argv[2])"
)


@dataclass(frozen=True)
class Verification:
    passed: bool
    reason: str
    """Why not; empty if it passed."""
    evidence: str = ""
    """The record's file, if there is one."""
    checked: bool = True
    """False: there was no GPU to check it on."""

    @property
    def summary(self) -> str:
        """Why it is not used, in one line."""
        evidence = f" (evidence: {self.evidence})" if self.evidence else ""
        return f"failed its check on this GPU: {self.reason}{evidence}" if self.checked else self.reason


class CheckRequest(NamedTuple):
    device: torch.device
    """With its index."""
    key: CheckKey
    folder: Path
    silence_s: float = SILENCE_TIMEOUT_S
    package: Path = Path(__file__).parents[2]
    """The `nsa` that the child imports."""

    @property
    def arguments(self) -> dict[str, Any]:
        of_key = {name: getattr(self.key, name) for name in ("gpu", "dtype", "shape", "geometry", "tuned", "parts")}
        return {**of_key, "device": str(self.device), "folder": str(self.folder)}


def verification(device: torch.device, dtype: torch.dtype, shape: KernelShape) -> Verification:
    """Verdict on the Triton kernels on this GPU; checked once per process at most."""
    if not torch.cuda.is_available():
        return Verification(False, "there is no GPU here to check it on", checked=False)
    index = torch.cuda.current_device() if device.index is None else device.index
    return _verified_once(index, dtype, shape, tunes())


@cache
def _verified_once(index: int, dtype: torch.dtype, shape: KernelShape, tuned: bool) -> Verification:
    device = torch.device("cuda", index)
    silence_s = TUNED_SILENCE_TIMEOUT_S if tuned else SILENCE_TIMEOUT_S
    request = CheckRequest(device, key_for(device, dtype, shape, tuned=tuned), cache_folder(), silence_s)
    verdict = verify(request)
    if not verdict.passed:
        _log.warning("%s", warning_text(request.key, verdict))
    return verdict


def warning_text(key: CheckKey, verdict: Verification) -> str:
    bar = "!" * 100
    return (
        f"the Triton kernels FAILED their check on this GPU\n{bar}\n"
        f"!! The Triton kernels are NOT used on {key.gpu}: {verdict.reason}\n"
        f"!! kernels=auto takes the portable backend instead, which is many times slower.\n"
        f"!! Evidence: {verdict.evidence or 'not kept on disk'}\n"
        f"!! Check again with: {RERUN}\n{bar}"
    )


def verify(request: CheckRequest, *, rerun: bool = False) -> Verification:
    """From the record, or by a check, which is then recorded; `rerun`: check whatever the record says."""
    store = RecordStore(request.folder, request.key)
    if not rerun and (known := store.read()):
        return _verdict(known, store.path)
    with ExitStack() as held:
        path: Path | None = store.path
        try:
            held.enter_context(store.locked())
        except OSError as error:
            _say_not_kept(request, error)
            path = None
        known = None if rerun else store.read()  # another process may have written it in the meantime
        if known is None:
            known = run_check(request)
            try:
                if path:
                    store.write(known)
            except OSError as error:
                _say_not_kept(request, error)
                path = None
        return _verdict(known, path)


def _say_not_kept(request: CheckRequest, error: OSError) -> None:
    _log.warning(
        "the check of the Triton kernels cannot be kept in %s (%s): every process checks again. Set "
        "runtime.kernel_cache.", request.folder, error,
    )  # fmt: skip


def _verdict(record: CheckRecord, path: Path | None) -> Verification:
    return Verification(record.passed, record.reason, str(path or ""))


def run_check(request: CheckRequest) -> CheckRecord:
    """In a child process: whatever happens there becomes a verdict."""
    key = request.key
    _log.warning(
        "checking Triton kernels on %s, %s (once per GPU, driver and version; about %d s)", key.gpu, key.dtype, ABOUT_S
    )
    began = said = time.monotonic()
    figures: list[CheckedFigure] = []
    seconds: dict[str, float] = {}
    part, done, why = "start", False, ""
    command = [sys.executable, "-P", "-c", _PROGRAM, str(request.package.parent)]
    environ = clean_environment(interpret=request.device.type == "cpu")
    with tempfile.TemporaryFile() as output:
        try:
            for message in child_messages(command, request.arguments, environ, output, request.silence_s):
                match message:
                    case {"kind": "begin", "part": str(part)}:
                        if time.monotonic() - said > _PROGRESS_S:
                            said = time.monotonic()
                            _log.warning("checking Triton kernels: %s, %.0f s so far", part, said - began)
                    case {"kind": "figures", "figures": list(found)}:
                        figures += [CheckedFigure(**figure) for figure in found]
                    case {"kind": "seconds", "what": str(what), "seconds": float(took)}:
                        seconds[what] = round(took, 2)
                    case {"kind": "exited", "why": str(reason)}:
                        why = reason or exception_line(output)
                    case {"kind": "done"}:
                        done = True
        except (ValueError, TypeError, OSError) as error:
            why = f"it cannot be started, or its output not read ({error!r})"
        seconds["all"] = round(time.monotonic() - began, 2)
        return _record(key, figures, seconds, output, part, "" if done and not why else why or "it ended too early")


def _record(
    key: CheckKey, figures: list[CheckedFigure], seconds: dict[str, float], output: IO[bytes], part: str, why: str
) -> CheckRecord:
    wrong = [figure for figure in figures if not figure.right]
    lines = output_lines(output)
    hint = next((hint for words, hint in _HINTS.items() if any(words in line for line in lines)), "") if why else ""
    reason = ""
    if wrong:
        others = f", and {len(wrong) - 1} more figures" if len(wrong) > 1 else ""
        reason = f"{wrong[0]}{others}"
    elif why:
        reason = f"{part}: {why}" + (f". {hint}" if hint else "")
    elif not figures:
        reason = "nothing was compared"
    tail = lines[-_MOST_LINES:] if reason else []
    if not reason:
        _log.warning("Triton kernels verified on %s in %.0f s", key.gpu, seconds["all"])
    return CheckRecord(key, not reason, reason, figures, seconds, tail, transient=bool(hint))
