"""The run folder (`train.out_dir`): paths, env.json, the last recorded step, and whether it can be written."""

import json
import os
import platform
import socket
import stat
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nsa import __version__
from nsa.files import git_commit, write_atomic
from nsa_train import names
from nsa_train.config.schema import RunConfig
from nsa_train.record import halt_file, heartbeat_record
from nsa_train.record.heartbeat_record import last_beat

_REPORTED_PACKAGES = ("torch", "ai2-olmo-core", "numpy", "pyarrow", "datasets", "tokenizers", "pydantic")


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def make(self) -> bool:
        """Make the folder; whether it is new."""
        new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        return new

    @property
    def checkpoints(self) -> Path:
        return self.path / names.CHECKPOINTS

    def heartbeat(self, rank: int) -> Path:
        return self.path / names.heartbeat(rank)

    def halt_reason(self) -> str | None:
        """The reason in `.HALT`, or None without one; an empty file counts."""
        halt = halt_file.read(self.path)
        return None if halt is None else halt.reason

    def last_step(self) -> int:
        """The last step that any earlier process of this run recorded; 0 if none."""
        beats = (last_beat(path, names.PROGRESS) for _, path in heartbeat_record.heartbeat_files(self.path))
        return max((beat.step for beat in beats if beat is not None), default=0)

    def write_env(self, config: RunConfig, **facts: Any) -> None:
        """Write env.json: versions, hardware, the resolved config and the origin of each value."""
        commit = git_commit(Path(__file__))
        content = {
            "nsa": __version__,
            "code": {} if commit is None else {"commit": commit[0], "modified": commit[1]},
            "python": sys.version.split()[0],
            "packages": {name: number for name in _REPORTED_PACKAGES if (number := _version(name))},
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            **facts,
            "config": config.model_dump(mode="json"),
            "origins": config.origins(),
            "notices": list(config.notices),
        }
        write_atomic(self.path / names.ENV, json.dumps(content, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def why_not_writable(folder: Path) -> str | None:
    """Why files cannot be created in this folder, or the folder itself cannot be created; None if both can."""
    for place in (folder, *folder.absolute().parents):
        try:
            mode = place.stat().st_mode
        except FileNotFoundError:
            if place.is_symlink():
                return f"{place} is a dangling symbolic link"
            continue
        except NotADirectoryError:  # one of its parents is a file
            continue
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
            return f"{place} cannot be accessed ({getattr(error, 'strerror', None) or error})"
        if not stat.S_ISDIR(mode):
            return f"{place} is not a folder"
        if not os.access(place, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            return f"{place} cannot be written by this user, or its disk is mounted read-only"
        return None
    return None
