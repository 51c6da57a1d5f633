"""The built documentation, once per test session, also with several pytest workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa.files import file_lock
from proofs import import_path

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(session_folder: Path) -> Path:
    """Folder of the HTML pages, built without a network and with warnings as errors."""
    built = session_folder / "site"
    with file_lock(session_folder / "site.lock"):
        if not (built / "searchindex.js").is_file():
            inherited = {name: value for name, value in os.environ.items() if not name.startswith("DOCS_")}
            words = ["-W", "--keep-going", "-q", "-d", session_folder / "doctrees", "docs", built]
            done = subprocess.run(
                [sys.executable, "-m", "sphinx", *words],
                cwd=ROOT, env=inherited | {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"},
                text=True, capture_output=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-5000:]
    return built
