"""Requirements of the tests of this folder: Debian packages (.ci/apt-packages.txt) and, for daemons, root."""

import os
import shutil
from typing import NoReturn

import pytest

_WHERE = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def programs(*names: str) -> dict[str, str]:
    """Name → path."""
    paths = {name: path for name in names if (path := shutil.which(name, path=_WHERE))}
    if missing := [name for name in names if name not in paths]:
        _missing(f"{', '.join(missing)} not found: .ci/install-apt-packages installs them, as root")
    return paths


def root() -> None:
    if os.geteuid() != 0:
        _missing("the daemons of this test need root")


def _missing(why: str) -> NoReturn:
    """In CI, where it was to be there, that is a failure; elsewhere the test is left out."""
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)
