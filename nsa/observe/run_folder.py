"""The folder of one run: what is in it, and what a new start finds there."""

import json
import os
import platform
import socket
import stat
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nsa import __version__
from nsa.config.schema import RunConfig
from nsa.files import write_atomic
from nsa.observe import halt_file, names, records
from nsa.observe.heartbeat import last_beat

_REPORTED_PACKAGES = ("torch", "ai2-olmo-core", "numpy", "pyarrow", "datasets", "tokenizers", "pydantic")

_GIT_TIMEOUT_S = 10.0


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoints(self) -> Path:
        return self.path / names.CHECKPOINTS

    def heartbeat(self, rank: int) -> Path:
        return self.path / names.heartbeat(rank)

    def halt_reason(self) -> str | None:
        """What `.HALT` says, or None without one; an empty file is a reason too."""
        asked = halt_file.read(self.path)
        return None if asked is None else asked.reason

    def last_step(self) -> int:
        """The last step any earlier process of this run reported; 0 if none did."""
        beats = (last_beat(path, names.PROGRESS) for _, path in records.heartbeat_files(self.path))
        return max((beat.step for beat in beats if beat is not None), default=0)

    def write_env(self, config: RunConfig, **facts: Any) -> None:
        """Versions, hardware, the resolved config and where each value came from."""
        content = {
            "nsa": __version__,
            "code": code_version(),
            "python": sys.version.split()[0],
            "packages": {name: found for name in _REPORTED_PACKAGES if (found := _version(name))},
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            **facts,
            "config": config.model_dump(mode="json"),
            "origins": config.origins(),
            "notices": list(config.notices),
        }
        write_atomic(self.path / names.ENV, json.dumps(content, indent=2) + "\n")


def code_version(root: Path = Path(__file__).parents[2]) -> dict[str, Any]:
    """The commit this package runs from and whether its files differ from it; empty where it is not a git checkout."""
    if not (root / ".git").exists():  # an installed package may lie inside somebody else's checkout
        return {}
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "modified": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):  # no git, or one that refuses another user's checkout
        return {}


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def why_not_writable(folder: Path) -> str | None:
    """Why no file can be made in this folder, or why the folder itself cannot be made; None where both can."""
    for place in (folder, *folder.absolute().parents):
        try:
            mode = place.stat().st_mode
        except FileNotFoundError:
            if place.is_symlink():
                return f"{place} is a link that leads nowhere"
            continue
        except NotADirectoryError:  # one of its parents is a file
            continue
        except (OSError, ValueError) as error:  # the latter for a path that is none, with a NUL byte in it
            return f"{place} cannot be looked at ({getattr(error, 'strerror', None) or error})"
        if not stat.S_ISDIR(mode):
            return f"{place} is not a folder"
        if not os.access(place, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            return f"{place} cannot be written by this user, or its disk is mounted read-only"
        return None
    return None
