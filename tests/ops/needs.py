"""Programs that come from Debian packages (.ci/apt-packages.txt): their paths, or the reason why a test is left out."""

import os
import shutil

import pytest

_WHERE = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def programs(*names: str) -> dict[str, str]:
    """Name → path. A missing one fails the test in CI, where it was to be installed, and skips it elsewhere."""
    found = {name: shutil.which(name, path=_WHERE) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        why = f"{', '.join(missing)} not found: run .ci/install-apt-packages as root, which installs .ci/apt-packages.txt"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
    if os.geteuid() != 0:
        why = "the daemons of this test need root"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
    return {name: path for name, path in found.items() if path is not None}
