import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nsa_train.record.beats import a_run
from tests.nsa_train.record.written import write_run


@pytest.fixture(scope="module")
def read_only(tmp_path_factory) -> Iterator[Path]:
    """A folder in which nobody can write, with a run folder `run` in it.

    Permission bits do not stop root, a mount that is read-only does. Where root may not mount either (a container), a
    path below a regular file has to do.
    """
    base = tmp_path_factory.mktemp("outputs")
    folder = base / "read_only"
    folder.mkdir()
    if os.geteuid() != 0:
        write_run(folder / "run", a_run(30))
        for path in (folder / "run", folder):
            path.chmod(0o555)
        yield folder
        for path in (folder, folder / "run"):
            path.chmod(0o755)
    elif subprocess.run(["mount", "-t", "tmpfs", "nsa-test", folder], capture_output=True, check=False).returncode == 0:
        try:
            write_run(folder / "run", a_run(30))
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
            yield folder
        finally:
            subprocess.run(["umount", folder], check=True)
    else:
        (base / "regular").write_text("")
        yield base / "regular" / "read_only"
