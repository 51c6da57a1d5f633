"""Debian packages with English documentation: resolved by name, downloaded and unpacked, not installed."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa.errors import DataError

_APT_LIMITS = ("-o", "Acquire::http::Timeout=30", "-o", "Acquire::Retries=3", "-o", "APT::Sandbox::User=root")
_COMMAND_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class DocPackage:
    """`pattern` matches the package's name in any Debian release, `below` the part of it that holds English text."""

    pattern: str
    licence: str
    below: str = "usr/share"


# Small, clean packages first, so that a small corpus needs few downloads.
PACKAGES = (
    DocPackage(r"debian-policy", "GPL-2+"),
    DocPackage(r"git-doc", "GPL-2", "usr/share/doc"),
    DocPackage(r"postgresql-doc-\d+", "PostgreSQL"),
    DocPackage(r"python-django-doc", "BSD-3-Clause"),
    DocPackage(r"sqlite3-doc", "public domain"),
    DocPackage(r"python3\.\d+-doc", "PSF-2.0"),
    DocPackage(r"manpages", "various free, per page", "usr/share/man"),
    DocPackage(r"manpages-dev", "various free, per page", "usr/share/man"),
    DocPackage(r"vim-doc", "Vim and OPL-1+"),
    DocPackage(r"perl-doc", "Artistic or GPL-1+", "usr/share/perl"),
    DocPackage(r"apache2-doc", "Apache-2.0", "usr/share/doc/apache2-doc/manual/en"),
    DocPackage(r"debian-reference-en", "GPL-2+"),
    DocPackage(r"dict-foldoc", "GFDL-1.1+"),
    DocPackage(r"debian-handbook", "GPL-2+ or CC-BY-SA-3.0", "usr/share/doc/debian-handbook/html/en-US"),
    DocPackage(r"llvm-\d+-doc", "Apache-2.0 with LLVM exception"),
    DocPackage(r"linux-doc-[\d.]+", "GPL-2"),
    DocPackage(r"dict-gcide", "GPL-3+"),
)


@dataclass(frozen=True, slots=True)
class UnpackedPackage:
    name: str
    version: str
    licence: str
    root: Path
    below: str


def resolve(packages: Sequence[DocPackage]) -> list[tuple[str, DocPackage]]:
    """The newest available package of each pattern; updates apt's package lists if they are empty."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise DataError("the demo corpus needs apt-get and dpkg, which are not installed. Use Debian or Ubuntu.")
    names = _package_names()
    if not any(re.fullmatch(packages[0].pattern, name) for name in names):
        _update_lists()
        names = _package_names()
    found = []
    for package in packages:
        matching = sorted((n for n in names if re.fullmatch(package.pattern, n)), key=_version_key)
        if matching:
            found.append((matching[-1], package))
    if not found:
        raise DataError("none of the documentation packages is available. Check its sources and run apt-get update.")
    return found


def download(name: str, package: DocPackage, folder: Path) -> UnpackedPackage:
    """Download `name` and unpack it below `folder`."""
    target = folder / name
    target.mkdir(parents=True)
    try:
        _run("apt-get", *_APT_LIMITS, "download", "-q", name, cwd=target)
    except DataError:
        # Outdated package lists may refer to versions that the archive no longer has.
        _update_lists()
        _run("apt-get", *_APT_LIMITS, "download", "-q", name, cwd=target)
    archives = list(target.glob("*.deb"))
    if len(archives) != 1:
        raise DataError(f"`apt-get download {name}` produced {len(archives)} archives instead of one. Run it manually.")
    root = target / "root"
    _run("dpkg", "-x", str(archives[0]), str(root))
    version = _run("dpkg-deb", "-f", str(archives[0]), "Version").strip()
    archives[0].unlink()
    return UnpackedPackage(name, version, package.licence, root, package.below)


def _update_lists() -> None:
    _run("apt-get", *_APT_LIMITS, "update", "-q")


def _package_names() -> list[str]:
    return _run("apt-cache", "pkgnames").split()


def _version_key(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def _run(*command: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, check=True, timeout=_COMMAND_TIMEOUT_S, errors="replace"
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise DataError(f"`{' '.join(command)}` failed with status {error.returncode}: {last}") from error
    except subprocess.TimeoutExpired as error:
        raise DataError(f"`{' '.join(command)}` took over {_COMMAND_TIMEOUT_S} s. Check the network.") from error
    return done.stdout
