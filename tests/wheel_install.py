"""Wheels of this checkout, installed into an environment that does not see the checkout, and commands run with it."""

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOBODY = 65534
_READS_ALL = 2  # number of CAP_DAC_READ_SEARCH


@dataclass(frozen=True)
class BuiltWheels:
    library: Path
    trainer: Path

    @classmethod
    def in_folder(cls, folder: Path) -> "BuiltWheels":
        (library,), (trainer,) = folder.glob("nsa_attention-*.whl"), folder.glob("nsa_train-*.whl")
        return cls(library, trainer)


def build_wheels(folder: Path, source: Path = ROOT) -> BuiltWheels:
    """Build with the backend of this environment, so that CI installs nothing beside its lock files."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    for name in ("nsa-attention", "nsa-train"):
        _run([sys.executable, "-m", "pip", "wheel", *options, str(source / "packages" / name)], folder)
    return BuiltWheels.in_folder(folder)


@dataclass(frozen=True)
class WheelInstall:
    """An environment with wheels; other packages are those of the running environment."""

    venv: Path
    user: int | None = None
    """Id of the user that runs commands; None for the present one."""

    @classmethod
    def make(cls, wheels: BuiltWheels, venv: Path) -> "WheelInstall":
        venv.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", "--without-pip", str(venv)], venv.parent)
        pip = [sys.executable, "-m", "pip", f"--python={venv / 'bin' / 'python'}", "install", "--quiet", "--no-deps"]
        _run([*pip, str(wheels.library), str(wheels.trainer)], venv.parent)
        (packages,) = venv.glob("lib/python*/site-packages")
        # A path in a .pth file is added as it is: the .pth file of an editable install in there is not read.
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return cls(venv)

    def run(
        self, command: str, folder: Path, *, path: str = "", home: Path | None = None, timeout_s: float = 300
    ) -> str:
        """Run a shell command in a folder with a new environment; return its output, which holds no traceback."""
        tools = self.venv / "only_nsa"
        if not tools.exists():
            tools.mkdir()
            (tools / "nsa").symlink_to(self.venv / "bin" / "nsa")
        environ = {
            "PATH": f"{tools}:{path}" if path else str(tools),
            "HOME": str(home or folder),
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        output = _run([*self._as_user(), "/bin/sh", "-c", command], folder, environ, timeout_s)
        assert "Traceback" not in output, output
        return output

    def folder_for(self, path: Path) -> Path:
        """A new folder that belongs to the user."""
        path.mkdir(parents=True)
        if self.user is not None:
            os.chown(path, self.user, self.user)
        return path

    def _as_user(self) -> list[str]:
        if self.user is None:
            return []
        # May read what root may, since Python may be installed in root's home folder; may write what the user may.
        caps = "-all,+dac_read_search" if _has_capability(_READS_ALL) else "-all"
        sets = [f"--{name}={caps}" for name in ("inh-caps", "ambient-caps", "bounding-set")]
        return [str(shutil.which("setpriv")), f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", *sets]


def ordinary_user(installed: WheelInstall) -> WheelInstall:
    """Return the environment as used by a user who is not root."""
    if os.geteuid() != 0:
        return installed
    if shutil.which("setpriv") is None:
        pytest.skip("root cannot switch to an ordinary user: setpriv (util-linux) is not installed")
    return WheelInstall(installed.venv, NOBODY)


def _has_capability(number: int) -> bool:
    status = Path("/proc/self/status").read_text()
    bounding = next(line.split()[1] for line in status.splitlines() if line.startswith("CapBnd:"))
    return bool(int(bounding, 16) >> number & 1)


def _run(command: list[str], folder: Path, environ: dict[str, str] | None = None, timeout_s: float = 300) -> str:
    if environ is None:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout
