"""The lock files of `.ci/locks`: every package that the gate installs, with version and SHA-256 of its files."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / ".ci" / "locks"
GATE, BUILD, INSTALLER, VLLM = (LOCKS / f"{name}.txt" for name in ("gate", "build", "uv", "vllm"))

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(\[[^\]]*\])?==(?P<version>[^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\b")


class LockFileError(Exception):
    """A lock file that does not pin a package to hashes."""


@dataclass(frozen=True)
class LockedPackage:
    name: str
    version: str
    hashes: frozenset[str]
    """SHA-256 of each file of this version that may be installed."""


def normalized(name: str) -> str:
    """The name by which PyPI compares packages."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, LockedPackage]:
    """Name → package. Refuses any line that is not one version with at least one hash."""
    packages: dict[str, LockedPackage] = {}
    for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match, hashes = _REQUIREMENT.match(text), frozenset(_HASH.findall(text))
        if match is None or not hashes:
            raise LockFileError(f"{path.name}: {text[:80]!r} is not NAME==VERSION with a SHA-256. Write it again.")
        name = normalized(match["name"])
        if name in packages:
            raise LockFileError(f"{path.name}: {name} occurs twice. Write it again.")
        packages[name] = LockedPackage(name, match["version"], hashes)
    return packages
