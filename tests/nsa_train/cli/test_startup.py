"""OpenMP's waiting, bars of libraries and torch's warning about NumPy, in the process of a command."""

import os
import subprocess
import sys
import termios
import warnings
from pathlib import Path

import pytest

from nsa_train.cli.startup import _SPIN_COUNT, prepare_process

ROOT = Path(__file__).parents[3]


def openmp_settings(**environ: str) -> str:
    """Settings that OpenMP's runtime reports when a command loads it together with torch."""
    clean = {name: text for name, text in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    code = "import sys; sys.argv = ['nsa', '--version']\nfrom nsa_train.cli.main import main\ntry: main()\n"
    code += "except SystemExit: import torch"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean | {"OMP_DISPLAY_ENV": "verbose"} | environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch does not use GNU's OpenMP here")
    return done.stderr


def test_openmp_takes_the_spin_count():
    assert f"GOMP_SPINCOUNT = '{_SPIN_COUNT}'" in openmp_settings()


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "77"), ("OMP_WAIT_POLICY", "ACTIVE")])
def test_a_value_of_the_user_is_kept(name, value):
    said = openmp_settings(**{name: value})
    assert f"{name} = '{value}'" in said
    assert f"GOMP_SPINCOUNT = '{_SPIN_COUNT}'" not in said


def test_bars_of_transformers_are_drawn_on_a_terminal_alone():
    code = "from nsa_train.cli.startup import prepare_process\nprepare_process()\n"
    code += "from transformers.utils import logging\nlist(logging.tqdm(range(3), desc='Loading weights'))"
    environ = {name: text for name, text in os.environ.items() if name != "TQDM_DISABLE"}
    command = dict(args=[sys.executable, "-c", code], cwd=ROOT, env=environ, check=True, timeout=120)
    assert subprocess.run(**command, stderr=subprocess.PIPE).stderr == b""
    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, 80))
    subprocess.run(**command, stderr=end)
    os.close(end)
    assert b"Loading weights" in os.read(terminal, 1000)
    os.close(terminal)


def test_only_a_missing_numpy_is_not_reported(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    with warnings.catch_warnings(record=True) as caught:
        prepare_process()
        warnings.warn("Failed to initialize NumPy: No module named 'numpy' (Triggered …)", UserWarning, stacklevel=1)
        warnings.warn("Failed to initialize NumPy: _ARRAY_API not found", UserWarning, stacklevel=1)
    assert [str(item.message) for item in caught] == ["Failed to initialize NumPy: _ARRAY_API not found"]
